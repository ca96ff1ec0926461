"""What a device argument may be."""

import torch

from .. import _C


def device_index(device=None):
    """The index that `device` names: None or ``"openreg"`` is the current device.

    An index that is negative or out of range raises RuntimeError with the index and the range; a
    device of another type raises ValueError.
    """
    if device is None:
        return _C._get_device()
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != "openreg":
            raise ValueError(f"expected an openreg device, got '{device}'")
        return _C._get_device() if device.index is None else _C._check_index(device.index)
    if isinstance(device, bool) or not hasattr(device, "__index__"):
        raise TypeError(
            f"expected an openreg device, its index or None, got {device!r} "
            f"of type {type(device).__name__}"
        )
    return _C._check_index(device.__index__())
