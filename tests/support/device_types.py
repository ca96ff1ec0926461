"""PyTorch's own way to test a device: generic tests, instantiated for it.

Run by test_device_types.py in a process of its own, as PyTorch's test modules change settings of
the one that imports them.
"""

import torch
from torch.testing import make_tensor
from torch.testing._internal.common_device_type import (
    OpDTypes,
    deviceCountAtLeast,
    dtypes,
    instantiate_device_type_tests,
    onlyCUDA,
    onlyPRIVATEUSE1,
    ops,
    skipPRIVATEUSE1,
    tol,
    toleranceOverride,
)
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db, modules
from torch.testing._internal.common_utils import TestCase, gradcheck, gradgradcheck, parametrize
from torch.utils._pytree import tree_map

NAMES = {
    "add",
    "exp",
    "matmul",
    "sum",
    "sort",
    "cat",
    "where",
    "gather",
    "cumsum",
    "nn.functional.conv2d",
}
OPERATORS = [op for op in op_db if op.name in NAMES]
MODULES = [
    info
    for info in module_db
    if info.module_cls in (torch.nn.Linear, torch.nn.Conv2d, torch.nn.GELU)
]


def on_cpu(tree):
    return tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, tree)


class TestDevice(TestCase):
    @onlyPRIVATEUSE1
    def test_device_has_its_name_and_index(self, device):
        self.assertEqual(device, "openreg:0")
        self.assertEqual(self.device_type, "openreg")
        self.assertEqual(torch.empty(2, device=device).device, torch.device(device))

    @onlyCUDA
    def test_only_cuda_test_is_skipped(self, device):
        raise AssertionError("this is another device's test")

    @skipPRIVATEUSE1
    def test_skip_decorator_skips_the_test(self, device):
        raise AssertionError("this device is skipped")

    @deviceCountAtLeast(2)
    def test_tensors_of_several_devices_do_not_mix(self, devices):
        first, second = (torch.ones(3, device=device) for device in devices[:2])
        self.assertEqual(first.to(second.device) + second, torch.full((3,), 2.0, device=devices[1]))
        with self.assertRaisesRegex(RuntimeError, "same device"):
            first + second

    @dtypes(torch.float32, torch.bfloat16, torch.int64, torch.complex64)
    def test_dtypes_decorator_gives_each_dtype(self, device, dtype):
        x = make_tensor((4, 5), device=device, dtype=dtype)
        self.assertEqual((x + x).cpu(), x.cpu() + x.cpu())
        self.assertEqual(x.t().contiguous().t(), x)

    @parametrize("dim", [0, 1, -1])
    def test_parametrize_decorator_gives_each_value(self, device, dim):
        x = make_tensor((4, 5), device=device, dtype=torch.float32)
        self.assertEqual(x.softmax(dim).cpu(), x.cpu().softmax(dim))

    def test_assert_equal_finds_a_difference(self, device):
        with self.assertRaises(AssertionError):
            self.assertEqual(torch.ones(2, device=device), torch.zeros(2, device=device))


class TestOperators(TestCase):
    @toleranceOverride({torch.float16: tol(1e-3, 1e-3)})
    @ops(OPERATORS, allowed_dtypes=(torch.float32, torch.float16, torch.int64))
    def test_operator_samples_have_the_cpus_results(self, device, dtype, op):
        for sample in op.sample_inputs(device, dtype):
            host = sample.transform(on_cpu)
            got = op(sample.input, *sample.args, **sample.kwargs)
            self.assertEqual(got, op(host.input, *host.args, **host.kwargs), exact_device=False)

    @ops(OPERATORS, dtypes=OpDTypes.supported_backward, allowed_dtypes=(torch.float64,))
    def test_operator_passes_gradcheck_and_gradgradcheck(self, device, dtype, op):
        sample = next(iter(op.sample_inputs(device, dtype, requires_grad=True)))

        def call(x):
            return op(x, *sample.args, **sample.kwargs)

        if isinstance(sample.input, torch.Tensor):
            self.assertTrue(gradcheck(call, (sample.input,)))
            self.assertTrue(gradgradcheck(call, (sample.input,)))


class TestModules(TestCase):
    @modules(MODULES, allowed_dtypes=(torch.float32,))
    def test_module_forward_has_the_cpus_output(self, device, dtype, module_info, training):
        inputs = module_info.module_inputs_func(
            module_info, device=device, dtype=dtype, requires_grad=False, training=training
        )
        for given in inputs:
            made, call = given.constructor_input, given.forward_input
            module = module_info.module_cls(*made.args, **made.kwargs).train(training)
            expected = module(*on_cpu(call.args), **on_cpu(call.kwargs))
            got = module.to(device)(*call.args, **call.kwargs)
            self.assertEqual(got.device.type, "openreg")
            self.assertEqual(got, expected, exact_device=False)


instantiate_device_type_tests(TestDevice, globals(), only_for="openreg")
instantiate_device_type_tests(TestOperators, globals(), only_for="openreg")
instantiate_device_type_tests(TestModules, globals(), only_for="openreg")
