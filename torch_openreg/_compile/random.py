"""Generators' states in compiled graphs, by which a checkpoint draws again what it drew."""

import torch
from torch._functorch._aot_autograd.utils import register_graphsafe_rng_device_type
from torch._higher_order_ops.utils import registered_hop_fake_fns
from torch._prims import rng_prims

from .. import openreg
from ..openreg._utils import is_ours, type_name


def _state_and_result(op, *args, **kwargs):
    return openreg.get_rng_state(), op(*args, **kwargs)


def _result_of_state(state, op, *args, **kwargs):
    before = openreg.get_rng_state()
    openreg.set_rng_state(state)
    try:
        return op(*args, **kwargs)
    finally:
        openreg.set_rng_state(before)


def _and_ours(known, ours):
    def call(*args, **kwargs):
        places = (getattr(a, "device", a) for a in (*args, *kwargs.values()))
        here = any(isinstance(place, torch.device) and is_ours(place) for place in places)
        return (ours if here else known)(*args, **kwargs)

    return call


def register():
    register_graphsafe_rng_device_type(type_name())
    if type_name() == "cuda":
        return  # which PyTorch knows
    key = torch._C.DispatchKey.BackendSelect
    keeps, sets = rng_prims.run_and_save_rng_state, rng_prims.run_with_rng_state
    keeps.py_kernels[key] = _and_ours(keeps.py_kernels[key], _state_and_result)
    sets.py_kernels[key] = _and_ours(sets.py_kernels[key], _result_of_state)
    registered_hop_fake_fns[keeps] = _and_ours(registered_hop_fake_fns[keeps], _state_and_result)


register()
