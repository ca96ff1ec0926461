"""Triton is for the GPU's own instructions, whether it is installed or not."""

from torch.utils import _triton

_triton.has_triton = lambda *args, **kwargs: False
