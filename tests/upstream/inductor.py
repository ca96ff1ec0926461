"""The tests of Inductor, which are made for a device by a function of their own file."""

import sys
import unittest.mock

from . import shims

DEVICES = ("cpu", "openreg")


def prepare():
    """Names that moved since, imported for these files alone; an operator of the tests' own, which
    PyTorch registers for each device that it knows."""
    from torch._inductor import compile_fx, test_operators
    from torch.testing._internal import inductor_utils

    shims.provide(compile_fx, complex_memory_overlap=shims.gone("complex_memory_overlap"))
    shims.provide(inductor_utils, HAS_CUDA=False, HAS_XPU=False)
    test_operators._test_lib_impl.impl("realize", lambda x: x.clone(), "PrivateUse1")


def _check_on(device, module):
    """`check_model_gpu`, which takes its arguments to a device first, for that one."""

    def check(*args, **options):
        home = sys.modules[module.check_model_gpu.__module__]
        with unittest.mock.patch.object(home, "GPU_TYPE", device):
            module.check_model_gpu(*args, **options)

    return check


def instantiate(module):
    """For the CPU and for this device, named as PyTorch's device-generic tests are."""
    # The file of dynamic shapes has both: it makes its own of the other file's.
    templates = [n for n in ("DynamicShapesCommonTemplate", "CommonTemplate") if hasattr(module, n)]
    if not templates or not hasattr(module, "copy_tests"):
        return
    for device in DEVICES:
        check = module.check_model if device == "cpu" else _check_on(device, module)
        members = {"common": check, "device": device, "device_type": device}
        cls = type(f"{templates[0]}{device.upper()}", (module.TestCase,), members)
        module.copy_tests(getattr(module, templates[0]), cls, device)
        setattr(module, cls.__name__, cls)
