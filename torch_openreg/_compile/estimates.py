"""The device's speed in PyTorch's estimates, which would ask Triton. Imported after
torch.utils._runtime_estimation."""

import torch

from .._patches import wrap
from ..openreg._utils import is_ours

# Roughly the numbers of one core of a CPU. Estimates are only compared with each other: with them a
# compiled backward pass chooses where it frees memory that another stream uses.
_GIGABYTES_PER_SECOND = 10
_TERAFLOPS = 0.1


def _or_ours(ours):
    def of_accelerator(known, *args, **named):
        accelerator = torch.accelerator.current_accelerator()
        here = accelerator is not None and is_ours(accelerator)
        return ours if here else known(*args, **named)

    return of_accelerator


_bandwidth = "get_gpu_dram_gbps" if torch.__version__ < "2.15" else "get_device_dram_gbps"
wrap(f"torch.utils._runtime_estimation.{_bandwidth}", _or_ours(_GIGABYTES_PER_SECOND))
wrap("torch.utils._runtime_estimation.get_device_tflops", _or_ours(_TERAFLOPS))
