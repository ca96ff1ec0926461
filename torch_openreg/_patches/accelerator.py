"""Adds to torch.accelerator and autocast what they support for this device only in C++."""

import torch

from .. import _C, openreg
from ..openreg import _stray
from . import wrap


def _check_first(function, index):
    _C._check_index(index)
    return function(index)


def _initialize(choose, index):
    before = choose(index)
    if index >= 0 and not _C._is_active(index):
        openreg.init()
    return before


def _select(choose, index):
    _initialize(choose, index)
    if index >= 0:
        _stray.check(index, stacklevel=5)


def _autocast_higher_order_operators():
    """They have no kernel for autocast: what they call is cast. PyTorch lists the CPU's key, CUDA's
    and XPU's."""
    key = torch._C.DispatchKey.AutocastPrivateUse1
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(key)
    for operator in torch._ops._higher_order_ops.values():
        operator.fallthrough(key)


def install():
    # The guard takes -1 for the current device. Before first use synchronize is a no-op and does
    # not check the index.
    for name in ("synchronizeDevice", "exchangeDevice", "getStream"):
        wrap(f"torch._C._accelerator_{name}", _check_first)
    # Where the device is CUDA, choosing one initializes it, as torch.openreg.set_device does.
    wrap("torch._C._accelerator_exchangeDevice", _initialize)
    wrap("torch._C._accelerator_setDeviceIndex", _select)
    _autocast_higher_order_operators()
