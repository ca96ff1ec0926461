"""Automatic mixed precision."""

import torch


def get_amp_supported_dtype():
    """The dtypes torch.autocast may use on the device."""
    return [torch.float16, torch.bfloat16]
