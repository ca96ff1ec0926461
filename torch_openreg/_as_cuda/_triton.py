"""Triton is for the GPU's own instructions, whether it is installed or not."""

from .._patches import replace

replace("torch.utils._triton.has_triton", lambda *args, **kwargs: False)
