"""torch.empty_quantized(size, other): uses the other tensor's device where none is named.

PyTorch's binding passes the CPU then, which its kernels cannot distinguish from a named CPU, as in
`other.cpu()`.
"""

import torch

from ..openreg._utils import is_ours
from . import wrap


def _on_the_others_device(empty, size, qtensor, *, device=None, **options):
    if device is None and isinstance(qtensor, torch.Tensor) and is_ours(qtensor.device):
        device = qtensor.device
    return empty(size, qtensor, device=device, **options)


def on_first_use():
    """Patches that matter only once there can be a tensor of ours."""
    wrap("torch.empty_quantized", _on_the_others_device)
