"""Kernels that a program registers from Python for the CPU's dispatch keys. The device, which
computes with the CPU's kernels, continues with those that they replace
(csrc/aten/python_kernels.cpp)."""

import gc

import torch
from torch.library import Library, fallthrough_kernel

from .. import _C
from . import wrap

KEYS = {"CPU", "SparseCPU", "SparseCsrCPU", "QuantizedCPU", "NestedTensorCPU"}


class _Handle:
    """A registration that PyTorch destroys with its library. It removes the library's kernels
    first, because without the kernel above it a Python kernel would serve the device."""

    def __init__(self, module, kernel):
        self.module, self.kernel = module, kernel

    def destroy(self):
        self.kernel.pause()
        try:
            self.module.reset()
            self.kernel.gone()
        finally:
            self.kernel.resume()


def _refuse_earlier():
    """Kernels from before this import have replaced unknown ones, so the device has no kernel for
    their operators while their library exists."""
    places = {place for place in torch.library._impls if place.rpartition("/")[2] in KEYS}
    libraries = [each for each in gc.get_objects() if type(each) is Library] if places else []
    for library in libraries:
        for place in library._op_impls & places:
            namespace, name, key = place.split("/")
            kernel = _C._PythonKernel(f"{namespace}::{name}", key)
            kernel.registered(early=True)
            library._registration_handles.append(_Handle(library.m, kernel))


def _for_the_cpu_alone(impl, library, op_name, fn, dispatch_key="", **options):
    key = dispatch_key or library.dispatch_key
    if key not in KEYS or fn is fallthrough_kernel:
        return impl(library, op_name, fn, dispatch_key, **options)
    name = library._resolve_op_name(op_name, "impl").split("::")[-1]
    kernel = _C._PythonKernel(f"{library.ns}::{name}", key)

    def register():
        kernel.registered()
        library._registration_handles.append(_Handle(library.m, kernel))

    kernel.pause()
    try:
        impl(library, op_name, fn, dispatch_key, **options)
        register()
    except Warning:  # a filter raised it when the kernel was registered
        register()
        raise
    finally:
        kernel.resume()


def install():
    _refuse_earlier()
    wrap("torch.library.Library.impl", _for_the_cpu_alone)
