"""Triton generates a GPU's own instructions, so it is unusable here even if it is installed."""

from .._patches import replace

replace("torch.utils._triton.has_triton", lambda *args, **kwargs: False)
