"""PyTorch's own test classes: one for CUDA, and none for a device with another name beside it."""

from torch.testing._internal import common_device_type

common_device_type.device_type_test_bases[:] = [
    base
    for base in common_device_type.device_type_test_bases
    if base is not common_device_type.PrivateUse1TestBase
]
