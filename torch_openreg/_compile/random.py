"""Generators' states in compiled graphs, with which a checkpoint repeats its draws."""

from functools import partial

import torch
from torch._functorch._aot_autograd.utils import register_graphsafe_rng_device_type
from torch._higher_order_ops.utils import registered_hop_fake_fns
from torch._prims import rng_prims
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    disable_proxy_modes_tracing,
    track_tensor_tree,
)
from torch.utils import _pytree as pytree

from .. import openreg
from ..openreg._utils import is_ours, type_name


def _device_of(args, kwargs):
    """The operator's device if it is ours, which need not be the current one."""
    device = kwargs.get("device")
    places = [torch.device(device)] if device else []
    places += (getattr(arg, "device", None) for arg in (*args, *kwargs.values()))
    ours = (place for place in places if isinstance(place, torch.device) and is_ours(place))
    return next(ours, None)


def _state_and_result(op, *args, **kwargs):
    return openreg.get_rng_state(_device_of(args, kwargs)), op(*args, **kwargs)


def _result_of_state(state, op, *args, **kwargs):
    device = _device_of(args, kwargs)
    before = openreg.get_rng_state(device)
    openreg.set_rng_state(state, device)
    try:
        return op(*args, **kwargs)
    finally:
        openreg.set_rng_state(before, device)


def _choose(known, ours, /, *args, **kwargs):
    here = _device_of(args, kwargs) is not None
    return (ours if here else known)(*args, **kwargs)


def _traced(mode, *args, **kwargs):
    """For a graph that make_fx records."""
    with disable_proxy_modes_tracing():
        out = rng_prims.run_and_save_rng_state(*args, **kwargs)
    given = pytree.tree_map(mode.tracer.unwrap_proxy, (args, kwargs))
    node = mode.tracer.create_proxy("call_function", rng_prims.run_and_save_rng_state, *given)
    return track_tensor_tree(out, node, constant=None, tracer=mode.tracer)


def register():
    register_graphsafe_rng_device_type(type_name())
    key = torch._C.DispatchKey.BackendSelect
    keeps, sets = rng_prims.run_and_save_rng_state, rng_prims.run_with_rng_state
    keeps.py_kernels[key] = partial(_choose, keeps.py_kernels[key], _state_and_result)
    sets.py_kernels[key] = partial(_choose, sets.py_kernels[key], _result_of_state)
    table = keeps.python_key_table
    table[ProxyTorchDispatchMode] = partial(_choose, table[ProxyTorchDispatchMode], _traced)
    fakes = registered_hop_fake_fns
    fakes[keeps] = partial(_choose, fakes[keeps], _state_and_result)


register()
