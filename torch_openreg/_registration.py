"""What registering the device with PyTorch consists of. Starts nothing."""

import functools
import sys

import torch
from torch.utils import backend_registration


def _check_index_in_synchronize(check_index):
    """torch.accelerator.synchronize is a no-op before first use, and then looks at no index."""
    synchronize = torch._C._accelerator_synchronizeDevice

    @functools.wraps(synchronize)
    def checked(index):
        check_index(index)
        synchronize(index)

    torch._C._accelerator_synchronizeDevice = checked


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
    _check_index_in_synchronize(_C._check_index)
    if torch.distributed.is_available():
        from .openreg import distributed

        distributed.register()
