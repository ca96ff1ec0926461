"""What registering the device with PyTorch consists of. Starts nothing."""

import functools
import sys

import torch
from torch.utils import backend_registration


def _check_indices(check_index):
    """Of torch.accelerator: the guard takes -1 for the current device, and synchronize, a no-op
    before first use, looks at no index then."""
    for name in ("synchronizeDevice", "exchangeDevice", "getStream"):
        name = f"_accelerator_{name}"
        setattr(torch._C, name, _checked(getattr(torch._C, name), check_index))


def _checked(function, check_index):
    @functools.wraps(function)
    def checked(index):
        check_index(index)
        return function(index)

    return checked


def register():
    torch.utils.rename_privateuse1_backend("openreg")
    from . import _C, openreg

    torch._register_device_module("openreg", openreg)
    for name in openreg.SUBMODULES:
        # Under both names it is one module, so that its classes are one class.
        sys.modules[f"torch.openreg.{name}"] = getattr(openreg, name)
    backend_registration.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
    )
    _check_indices(_C._check_index)
    if torch.distributed.is_available():
        from .openreg import distributed

        distributed.register()
