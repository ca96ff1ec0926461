"""What several modules use: the indices of device arguments, and functions of PyTorch's."""

import types

import torch

from .. import _C

# The device's own name: "openreg", or that of a package (torch_openreg/_packages.py).
OWN_NAME = _C._own_name()
# The name of this module in PyTorch.
OWN_MODULE = f"torch.{OWN_NAME}"


def type_name():
    """The process's name for our devices: OWN_NAME, or "cuda" under as_cuda()."""
    return torch._C._get_privateuse1_backend_name()


def a_device():
    """The same with an article: ``an openreg device``."""
    return f"{_with_article(type_name())} device"


def _with_article(name):
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def is_ours(device):
    """Whether a torch.device is one of ours."""
    return device.type == type_name()


class DeviceContext:
    """The base of ``torch.openreg.device``, which is taken as the device that it selects."""

    idx = -1


def device_index(device=None):
    """The index that `device` names. None, ``"openreg"`` and a context that changes nothing are the
    current device.

    An index that is negative or out of range raises RuntimeError with the index and the range; a
    device of another type raises ValueError.
    """
    if device is None:
        return _C._get_device()
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if not is_ours(device):
            raise ValueError(f"expected {a_device()}, got '{device}'")
        return _C._get_device() if device.index is None else _C._check_index(device.index)
    if isinstance(device, DeviceContext):
        return device.idx if device.idx >= 0 else _C._get_device()
    if isinstance(device, bool) or not hasattr(device, "__index__"):
        raise TypeError(
            f"expected {a_device()}, its index or None, got {device!r} "
            f"of type {type(device).__name__}"
        )
    return _C._check_index(device.__index__())


def _get_device_index(device, optional=False, allow_cpu=False):
    """The index that `device` names, as in ``torch.cuda._utils``: a number is returned unchanged.

    Args:
        device: a device, its name or index, ``torch.openreg.device(...)``, or None.
        optional: whether None and a device without an index are the current device; otherwise they
            raise ValueError, as a device of another type does.
        allow_cpu: whether the CPU is accepted too, whose index is -1.
    """
    if isinstance(device, int):
        return device
    if isinstance(device, DeviceContext):
        return device.idx
    if isinstance(device, str):
        device = torch.device(device)
    index = None
    if isinstance(device, torch.device):
        index = -1 if device.type == "cpu" else device.index
        if not is_ours(device) and not (allow_cpu and device.type == "cpu"):
            allowed = f"{OWN_NAME} or cpu" if allow_cpu else OWN_NAME
            raise ValueError(f"Expected {_with_article(allowed)} device, but got: {device}")
    if index is not None:
        return index
    if not optional:
        raise ValueError(
            f"Expected a torch.device with a specified index or an integer, but got: {device!r}"
        )
    return _C._get_device()


def borrowed(function, **names):
    """A function of PyTorch's that is written for CUDA, with these names in place of those of its
    module."""
    found = {**function.__globals__, **names}
    return types.FunctionType(function.__code__, found, argdefs=function.__defaults__)
