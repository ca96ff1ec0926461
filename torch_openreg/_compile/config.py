"""This device's options of torch.compile. Since PyTorch 2.15 they are given with the device's name:
options={"openreg.min_chunk_factor": 8}."""

import sys

from torch.utils._config_module import install_config_module

# A kernel takes one more thread where that has at least so many times Inductor's
# `cpp.min_chunk_size` elements. The host runs on beside the kernel: where both need its cores, a
# thread must pay for itself.
min_chunk_factor: int = 4

install_config_module(sys.modules[__name__])
