"""The names that PyTorch's test files import from torch, and that moved or went since.

The only place that knows of versions. A shim is made only where the name is missing, so that any
tree runs, and an older one than the installed PyTorch too.
"""

import importlib
import os
import sys
import types
import unittest

import torch
from torch.testing._internal import (
    common_cuda,
    common_device_type,
    common_methods_invocations,
    common_mkldnn,
    common_nn,
    common_utils,
)
from torch.utils._dtype_abbrs import dtype_abbrs


def provide(module, **names):
    for name, value in names.items():
        if not hasattr(module, name):
            setattr(module, name, value)


def gone(name):
    def gone(*_, **__):
        raise unittest.SkipTest(f"{name} is no longer in PyTorch {torch.__version__}")

    return gone


def _bf32_on_and_off(bf32_precision=1e-2):
    return common_mkldnn.reduced_f32_on_and_off(bf32_precision=bf32_precision)


def _moved_names():
    provide(common_cuda, tf32_is_not_fp32=lambda: False)  # without CUDA it was never true
    provide(common_mkldnn, bf32_on_and_off=_bf32_on_and_off)
    provide(common_utils, dtype_abbrs=dtype_abbrs)
    provide(common_nn, new_module_tests=common_nn.get_new_module_tests())
    provide(
        common_methods_invocations,
        binary_ufuncs_and_refs=common_methods_invocations.binary_ufuncs,
        skip=common_device_type.skip,
        xfail=common_device_type.xfail,
        # The test's name was an argument; now it is the function's.
        skipOps=lambda _, __, which: common_device_type.skipOps(which),
    )
    attention = importlib.import_module("torch.nn.attention.flex_attention")
    provide(attention, create_nested_block_mask=gone("create_nested_block_mask"))


def _missing_modules():
    """A module of the tree that a file imports, in trees of which only a part is there."""
    name = "test_cpp_extensions_open_device_registration"
    try:
        importlib.import_module(name)
    except ImportError:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].generate_faked_module = gone("a device named foo")


def _missing_failures():
    """test_custom_ops.py reads a file beside it for further tests, none of which is a device's."""
    optests = importlib.import_module("torch.testing._internal.optests")
    original = optests.generate_opcheck_tests

    def generate(case, namespaces, path, *arguments, **options):
        if os.path.exists(path):
            original(case, namespaces, path, *arguments, **options)

    optests.generate_opcheck_tests = generate


def _devices():
    """Classes are made for the CPU and for this device: also those that name the devices which
    PyTorch's own machines have, "cpu" and "cuda", as they are generic; those that name one of them
    are not. The lazy device is nobody's here."""
    original = common_device_type.get_desired_device_type_test_bases
    private = common_device_type.PrivateUse1TestBase
    private.setUpClass()  # else the first class of a process is named otherwise than the next
    if hasattr(common_device_type, "Capability"):  # kernels are the CPU's
        private._capabilities = common_device_type.CPUTestBase._capabilities

    def bases(except_for=None, only_for=None, *_, **__):
        if only_for and not isinstance(only_for, str) and {"cpu", "cuda"} <= set(only_for):
            only_for = (*only_for, "privateuse1")
        wanted = (common_device_type.CPUTestBase, private)
        return [base for base in original(except_for, only_for) if base in wanted]

    common_device_type.get_desired_device_type_test_bases = bases


def _set_up_of_classes():
    """`super(self.__class__, self).setUp()` never ends since a device's class inherits from the
    generic one. It has copies of that one's methods, so that the originals can go."""
    original = common_device_type.instantiate_device_type_tests

    def instantiate(generic, *arguments, **options):
        original(generic, *arguments, **options)
        for name in ("setUp", "tearDown"):
            method = vars(generic).get(name)
            if method is not None and "__class__" in method.__code__.co_names:
                delattr(generic, name)

    common_device_type.instantiate_device_type_tests = instantiate


def install():
    """In the process that is about to import a test file, with the tree on `sys.path`."""
    _moved_names()
    _missing_modules()
    _missing_failures()
    _devices()
    _set_up_of_classes()
