"""Device memory: the functions of torch.accelerator by their names on a device module."""

import torch

from .. import _C
from ._utils import device_index


def empty_cache():
    """Gives cached blocks that nothing uses back to the device. A no-op before first use."""
    torch.accelerator.empty_cache()


def memory_allocated(device=None):
    """Bytes in live tensors."""
    return torch.accelerator.memory_allocated(device_index(device))


def max_memory_allocated(device=None):
    """The most bytes in live tensors since the start or reset_peak_memory_stats."""
    return torch.accelerator.max_memory_allocated(device_index(device))


def memory_reserved(device=None):
    """Bytes the allocator holds, in use or cached."""
    return torch.accelerator.memory_reserved(device_index(device))


def max_memory_reserved(device=None):
    """The most bytes the allocator held since the start or reset_peak_memory_stats."""
    return torch.accelerator.max_memory_reserved(device_index(device))


def memory_stats(device=None):
    """The allocator's statistics, a flat dictionary; empty before first use."""
    return torch.accelerator.memory_stats(device_index(device))


def reset_peak_memory_stats(device=None):
    """Lets the peaks start from the present values."""
    torch.accelerator.reset_peak_memory_stats(device_index(device))


def reset_accumulated_memory_stats(device=None):
    """Sets the accumulated counts to zero."""
    torch.accelerator.reset_accumulated_memory_stats(device_index(device))


def mem_get_info(device=None):
    """(bytes free, bytes in all) of the device."""
    return _C._mem_get_info(device_index(device))
