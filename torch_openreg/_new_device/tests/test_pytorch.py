"""PyTorch's own generic tests on the device. Tests that it cannot pass yet are excluded by name."""

import torch
from torch.testing._internal.common_device_type import (
    PrivateUse1TestBase,
    dtypes,
    instantiate_device_type_tests,
    ops,
)
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import TestCase

# The operators that the driver has kernels for, and the tests to leave out with their dtypes.
OPERATORS = ("add", "mul", "sum", "relu", "mm", "softmax")
PrivateUse1TestBase.set_test_configs(
    test_exclusions={"TestValues": {"test_of_nothing": {"dtypes": [torch.float64]}}}
)


class TestValues(TestCase):
    @ops([op for op in op_db if op.name in OPERATORS], allowed_dtypes=[torch.float32])
    def test_values_are_the_cpus(self, device, dtype, op):
        for sample in op.sample_inputs(device, dtype):
            on_cpu = sample.transform(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x)
            expected = op(on_cpu.input, *on_cpu.args, **on_cpu.kwargs)
            found = op(sample.input, *sample.args, **sample.kwargs)
            self.assertEqual(found.cpu(), expected)

    @dtypes(torch.float32, torch.float64)
    def test_of_nothing(self, device, dtype):
        self.assertEqual(torch.ones(0, device=device, dtype=dtype).sum().item(), 0)


instantiate_device_type_tests(TestValues, globals(), only_for="acme")
