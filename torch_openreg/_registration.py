"""Registers the device with PyTorch. Starts nothing."""

import atexit
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys

import torch
from torch.utils import backend_registration


class _AfterImport(importlib.abc.MetaPathFinder):
    """Imports a module of ours as soon as another package has been imported, without importing that
    one itself. pytorch-pfn-extras looks up a device's runtime in a registry, and takes a plain one
    for a device that it does not find there."""

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


def register_for_inductor():
    _import_after("torch._inductor.compile_fx", "torch_openreg._compile.inductor")


class _BothNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes a module of the device's module in torch the same as in torch_openreg.openreg, so that
    its classes are not duplicated."""

    def __init__(self, module, names):
        self.names = {f"{module}.{name}" for name in names}

    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name in self.names else None

    def create_module(self, spec):
        module = importlib.import_module(f"torch_openreg.openreg.{spec.name.rpartition('.')[2]}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module):
        module.__spec__ = module.__spec__.loader_state


def _at_exit():
    """Reports the last races. It is registered at the import, so it runs after the functions that
    the program registers later, which may race too."""
    sanitizer = sys.modules.get("torch_openreg.openreg.sanitizer")
    if sanitizer is not None:
        sanitizer._at_exit()


def _add_module(name, openreg):
    torch._register_device_module(name, openreg)
    sys.meta_path.insert(0, _BothNames(f"torch.{name}", openreg.SUBMODULES))
    if name != "openreg":  # what documentation and tests of torch_openreg say
        torch.openreg = sys.modules["torch.openreg"] = openreg
        sys.meta_path.insert(0, _BothNames("torch.openreg", openreg.SUBMODULES))


def register(name, driver):
    torch.utils.rename_privateuse1_backend(name)
    from . import _C

    if name != "openreg":
        _C._name_devices(name, os.fspath(driver))
    from . import _sharing, openreg
    from ._patches import accelerator, data_parallel, default_type, dlpack, python_kernels

    _add_module(name, openreg)
    backend_registration.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
    )
    atexit.register(_at_exit)
    atexit.register(_C._stop_autograd_device_threads)
    for patches in (accelerator, data_parallel, default_type, dlpack, python_kernels, _sharing):
        patches.install()
    _import_after("pytorch_pfn_extras.runtime", "torch_openreg.ppe")
    _import_after("torch._dynamo", "torch_openreg._compile.dynamo")
    if torch.__version__ < "2.15":  # which calls _inductor_backend_init of the device's module
        register_for_inductor()
    _import_after("torch.utils._runtime_estimation", "torch_openreg._compile.estimates")
    _import_after("torch._functorch._aot_autograd.streams", "torch_openreg._compile.deallocations")
    _import_after("torch.nn.attention.flex_attention", "torch_openreg._compile.flex")
    if torch.distributed.is_available():
        from .openreg import distributed

        distributed.register()
        _import_after("torch.distributed.tensor", "torch_openreg._patches.sharding")
    mode = {"1": "error", "warn": "warn"}.get(os.environ.get("OPENREG_SANITIZER"))
    if mode:
        openreg.sanitizer.enable(mode)
        openreg.sanitizer._processes.start()
