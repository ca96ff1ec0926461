"""What registering the device with PyTorch consists of. Starts nothing."""

import atexit
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
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


def _initialize_where_chosen(is_active, initialize):
    """Of torch.accelerator: where the device is CUDA, the one that a program chooses is initialized
    by that, as it is by torch.openreg.set_device."""
    for name in ("_accelerator_setDeviceIndex", "_accelerator_exchangeDevice"):
        setattr(torch._C, name, _initializing(getattr(torch._C, name), is_active, initialize))


def _initializing(function, is_active, initialize):
    @functools.wraps(function)
    def choose(index):
        before = function(index)
        if index >= 0 and not is_active(index):
            initialize()
        return before

    return choose


def _autocast_higher_order_operators():
    """They have no kernel for autocast: what they call is cast. PyTorch says so of the CPU's key,
    CUDA's and XPU's."""
    key = torch._C.DispatchKey.AutocastPrivateUse1
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(key)
    for operator in torch._ops._higher_order_ops.values():
        operator.fallthrough(key)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Imports a module of ours as soon as another package's has been imported, and does not import
    that one itself. pytorch-pfn-extras asks a registry for a device's runtime, and takes a plain
    one for a device that it does not find there."""

    def __init__(self, theirs, ours):
        self.theirs, self.ours = theirs, ours

    def find_spec(self, name, path, target=None):
        if name != self.theirs:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            execute = spec.loader.exec_module

            def execute_both(module):
                execute(module)
                importlib.import_module(self.ours)

            spec.loader.exec_module = execute_both
        return spec


def _import_after(theirs, ours):
    if theirs in sys.modules:
        importlib.import_module(ours)
    else:
        sys.meta_path.insert(0, _AfterImport(theirs, ours))


class _BothNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A module of torch.openreg is the one of torch_openreg.openreg, so that its classes are one
    class."""

    def __init__(self, names):
        self.names = {f"torch.openreg.{name}" for name in names}

    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name in self.names else None

    def create_module(self, spec):
        module = importlib.import_module(f"torch_openreg.openreg.{spec.name.rpartition('.')[2]}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module):
        module.__spec__ = module.__spec__.loader_state


def _at_exit():
    """Registered at the import, so that it comes after the program's own, which may race."""
    sanitizer = sys.modules.get("torch_openreg.openreg.sanitizer")
    if sanitizer is not None:
        sanitizer._at_exit()


def register():
    torch.utils.rename_privateuse1_backend("openreg")
    from . import _C, _python_kernels, openreg

    torch._register_device_module("openreg", openreg)
    sys.meta_path.insert(0, _BothNames(openreg.SUBMODULES))
    backend_registration.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
    )
    atexit.register(_at_exit)
    atexit.register(_C._stop_autograd_device_threads)
    _check_indices(_C._check_index)
    _initialize_where_chosen(_C._is_active, openreg.init)
    _autocast_higher_order_operators()
    _python_kernels.install()
    _import_after("pytorch_pfn_extras.runtime", "torch_openreg.ppe")
    _import_after("torch._dynamo", "torch_openreg._compile.dynamo")
    _import_after("torch._inductor.compile_fx", "torch_openreg._compile.inductor")
    _import_after("torch.utils._runtime_estimation", "torch_openreg._compile.estimates")
    _import_after("torch.nn.attention.flex_attention", "torch_openreg._compile.flex")
    if torch.distributed.is_available():
        from .openreg import distributed

        distributed.register()
        _import_after("torch.distributed.tensor", "torch_openreg.openreg._sharding")
    mode = {"1": "error", "warn": "warn"}.get(os.environ.get("OPENREG_SANITIZER"))
    if mode:
        openreg.sanitizer.enable(mode)
        openreg.sanitizer._processes.start()
