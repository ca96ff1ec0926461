"""Automatic mixed precision: torch.amp with the device filled in."""

import functools

import torch

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd", "get_amp_supported_dtype"]


def get_amp_supported_dtype():
    """The dtypes torch.autocast may use on the device."""
    return [torch.float16, torch.bfloat16]


class autocast(torch.autocast):
    """torch.autocast("openreg")."""

    def __init__(self, enabled=True, dtype=None, cache_enabled=None):
        super().__init__("openreg", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler("openreg")."""

    def __init__(self, *args, **kwargs):
        super().__init__("openreg", *args, **kwargs)


custom_fwd = functools.partial(torch.amp.custom_fwd, device_type="openreg")
custom_bwd = functools.partial(torch.amp.custom_bwd, device_type="openreg")
