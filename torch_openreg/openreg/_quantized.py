"""torch.empty_quantized(size, other): the device is the other tensor's, where none is named.

PyTorch's binding passes the CPU then, which its kernels cannot tell from a CPU that is named, as in
`other.cpu()`.
"""

import functools

import torch

from ._utils import is_ours


def on_first_use():
    """What only matters once there can be a tensor of ours."""
    empty = torch.empty_quantized

    @functools.wraps(empty)
    def empty_quantized(size, qtensor, *, device=None, **options):
        if device is None and isinstance(qtensor, torch.Tensor) and is_ours(qtensor.device):
            device = qtensor.device
        return empty(size, qtensor, device=device, **options)

    torch.empty_quantized = empty_quantized
