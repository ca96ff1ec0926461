"""Device memory: figures, limits, snapshots and the history of allocations.

What ``torch.cuda.memory`` has, under the same names. A dump is read by PyTorch's memory viewer
(https://pytorch.org/memory_viz) and by ``torch.cuda._memory_viz``.
"""

import collections
import os
import warnings

import torch
from typing_extensions import deprecated

from .. import _C
from ._lazy import _lazy_init, is_initialized
from ._memory_history import _allocation_traceback as _allocation_traceback
from ._memory_history import _annotate_tensor as _annotate_tensor
from ._memory_history import _dump_snapshot as _dump_snapshot
from ._memory_history import _get_memory_metadata as _get_memory_metadata
from ._memory_history import _record_memory_history as _record_memory_history
from ._memory_history import _record_memory_history_impl as _record_memory_history_impl
from ._memory_history import _record_memory_history_legacy as _record_memory_history_legacy
from ._memory_history import _save_memory_usage as _save_memory_usage
from ._memory_history import _save_segment_usage as _save_segment_usage
from ._memory_history import _set_memory_metadata as _set_memory_metadata
from ._memory_history import _snapshot as _snapshot
from ._memory_history import attach_out_of_memory_observer, memory_snapshot
from ._mempool import MemPool, use_mem_pool
from ._mempool import (
    _cuda_beginAllocateCurrentThreadToPool as _cuda_beginAllocateCurrentThreadToPool,
)
from ._mempool import _cuda_endAllocateToPool as _cuda_endAllocateToPool
from ._mempool import _cuda_releasePool as _cuda_releasePool
from ._utils import OWN_MODULE, OWN_NAME, borrowed, device_index, type_name

__all__ = [
    "MemPool",
    "attach_out_of_memory_observer",
    "caching_allocator_alloc",
    "caching_allocator_delete",
    "change_current_allocator",
    "device_memory_used",
    "empty_cache",
    "get_allocator_backend",
    "get_per_process_memory_fraction",
    "host_memory_stats",
    "host_memory_stats_as_nested_dict",
    "list_gpu_processes",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "memory_usage",
    "reset_accumulated_host_memory_stats",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_peak_host_memory_stats",
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
    "use_mem_pool",
]

# ---- Figures ----


def empty_cache(mempool_id=None):
    """Returns cached blocks that are not in use to their devices. May wait for these devices,
    because queued work must not access returned memory. Does nothing before the first use of a
    device.

    Args:
        mempool_id: the id of a private pool, for its blocks alone. A pool that is in use (a graph
            or a use_mem_pool scope holds it) raises RuntimeError. None: all but private pools,
            which keep theirs.
    """
    if mempool_id is None or tuple(mempool_id) == (0, 0):
        torch.accelerator.empty_cache()
    else:
        _C._memory_empty_pool(mempool_id)


def _flatten(stats, prefix=""):
    for key, value in stats.items():
        if isinstance(key, tuple):
            key = "_".join(map(str, key))
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def memory_stats_as_nested_dict(device=None):
    """The statistics of the allocator of `device`: figure, pool, metric. Empty before first use.

    Figures: ``allocation``, ``segment``, ``active``, ``inactive_split`` (counts) and
    ``allocated_bytes``, ``reserved_bytes``, ``active_bytes``, ``inactive_split_bytes``,
    ``requested_bytes``. Pools: ``all``, ``small_pool``, ``large_pool``. Metrics: ``current``,
    ``peak``, ``allocated``, ``freed``. Without pools: ``oversize_allocations``,
    ``oversize_segments``. Plain counts: ``num_alloc_retries``, ``num_ooms``,
    ``num_sync_all_streams``, ``num_device_alloc``, ``num_device_free``, ``max_split_size``.
    ``reserved_bytes_by_private_pools``: ``reserved_bytes`` of each private pool that has a holder,
    by its id; the other figures include them.
    """
    index = device_index(device)
    if not is_initialized():
        return {}
    stats = torch._C._accelerator_getDeviceStats(index)
    stats["reserved_bytes_by_private_pools"] = _C._memory_reserved_by_private_pools(index)
    return stats


def memory_stats(device=None):
    """memory_stats_as_nested_dict of `device` as a flat dictionary, with keys such as
    ``"allocated_bytes.all.peak"``, or ``"reserved_bytes_by_private_pools.0_1.all.peak"`` for the
    pool (0, 1)."""
    return collections.OrderedDict(sorted(_flatten(memory_stats_as_nested_dict(device))))


def memory_allocated(device=None):
    """Bytes in live tensors on `device`."""
    return memory_stats(device).get("allocated_bytes.all.current", 0)


def max_memory_allocated(device=None):
    """The peak of bytes in live tensors on `device` since the start, or since
    reset_peak_memory_stats."""
    return memory_stats(device).get("allocated_bytes.all.peak", 0)


def memory_reserved(device=None):
    """Bytes of `device` that the allocator holds, in use or cached."""
    return memory_stats(device).get("reserved_bytes.all.current", 0)


def max_memory_reserved(device=None):
    """The peak of bytes of `device` that the allocator held since the start, or since
    reset_peak_memory_stats."""
    return memory_stats(device).get("reserved_bytes.all.peak", 0)


def reset_peak_memory_stats(device=None):
    """Resets the peaks of `device` to the present values."""
    torch.accelerator.reset_peak_memory_stats(device_index(device))


def reset_accumulated_memory_stats(device=None):
    """Sets the accumulated counts of `device` (``allocated``, ``freed``, ``num_...``) to zero."""
    torch.accelerator.reset_accumulated_memory_stats(device_index(device))


@deprecated(
    f"`{OWN_MODULE}.memory_cached` has been renamed to `{OWN_MODULE}.memory_reserved`",
    category=FutureWarning,
)
def memory_cached(device=None):
    """An old name of memory_reserved, of `device`; it warns (FutureWarning)."""
    return memory_reserved(device)


@deprecated(
    f"`{OWN_MODULE}.max_memory_cached` has been renamed to `{OWN_MODULE}.max_memory_reserved`",
    category=FutureWarning,
)
def max_memory_cached(device=None):
    """An old name of max_memory_reserved, of `device`; it warns (FutureWarning)."""
    return max_memory_reserved(device)


def _reset_peaks_by_old_name(name, device):
    warnings.warn(
        f"{OWN_MODULE}.{name} now calls {OWN_MODULE}.reset_peak_memory_stats, "
        "which resets /all/ peak memory stats.",
        FutureWarning,
        stacklevel=3,
    )
    reset_peak_memory_stats(device)


def reset_max_memory_allocated(device=None):
    """An old name of reset_peak_memory_stats, of `device`; it warns (FutureWarning)."""
    _reset_peaks_by_old_name("reset_max_memory_allocated", device)


def reset_max_memory_cached(device=None):
    """An old name of reset_peak_memory_stats, of `device`; it warns (FutureWarning)."""
    _reset_peaks_by_old_name("reset_max_memory_cached", device)


def host_memory_stats_as_nested_dict():
    """Statistics of the pinned host memory. Empty before the first use of a device."""
    return _C._memory_host_stats() if is_initialized() else {}


def host_memory_stats():
    """host_memory_stats_as_nested_dict as a flat dictionary, with keys such as
    ``"active_bytes.current"``."""
    return collections.OrderedDict(sorted(_flatten(host_memory_stats_as_nested_dict())))


def reset_accumulated_host_memory_stats():
    """Sets the accumulated counts of the pinned host memory to zero."""
    _C._memory_reset_accumulated_host_stats()


def reset_peak_host_memory_stats():
    """Resets the peaks of the pinned host memory to the present values."""
    _C._memory_reset_peak_host_stats()


# ---- The device ----


def mem_get_info(device=None):
    """(bytes free, bytes in total) of `device`. Memory that the allocator caches is not free."""
    return _C._mem_get_info(device_index(device))


def device_memory_used(device=None):
    """Bytes of `device` that are not free: tensors, and the allocator's cache."""
    free, total = mem_get_info(device)
    return total - free


def list_gpu_processes(device=None):
    """The processes that use `device` and the memory they take, in CUDA's words: this process, once
    it has used the device. Does not wait."""
    index = device_index(device)
    if not _C._is_active(index):
        return f"GPU:{index}\nno processes are running"
    used = device_memory_used(index) / 2**20
    return f"GPU:{index}\nprocess {os.getpid():>10d} uses {used:>12.3f} MB GPU memory"


def memory_usage(device=None):
    """Raises NotImplementedError: the memory traffic of `device` is not measured."""
    device_index(device)
    raise NotImplementedError(
        f"{OWN_NAME} does not measure how busy device memory is\n"
        "  help: mem_get_info() has how full it is"
    )


def set_per_process_memory_fraction(fraction, device=None):
    """Limits what the allocator may hold to a part of the capacity of `device`.

    Memory that it holds beyond the limit stays until it is freed. An allocation that would exceed
    the limit raises torch.OutOfMemoryError.

    Args:
        fraction: a float from 0.0 to 1.0. Another type raises TypeError, another value ValueError.
        device: the device.
    """
    if not isinstance(fraction, float):
        raise TypeError(f"a memory fraction is a float, got {fraction!r}")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid memory fraction: {fraction}. Allowed range: 0~1")
    _lazy_init()
    _C._memory_set_fraction(device_index(device), fraction)


def get_per_process_memory_fraction(device=None):
    """The part of the capacity of `device` that the allocator may hold: 1.0 until it is set."""
    _lazy_init()
    return _C._memory_get_fraction(device_index(device))


def get_allocator_backend():
    """The name of the allocator: "native", PyTorch's word for one that caches blocks itself."""
    return "native"


def caching_allocator_alloc(size, device=None, stream=None):
    """Allocates device memory and returns its address; caching_allocator_delete frees it.

    Args:
        size: in bytes. A negative one raises ValueError.
        device: the device.
        stream: its work will use the memory: a stream, its id, or None for the current one.
            Anything else raises TypeError.
    """
    _lazy_init()
    index = device_index(device)
    if stream is None:
        stream = torch.accelerator.current_stream(index)
    if isinstance(stream, torch.Stream):
        stream = stream.stream_id
    if not isinstance(stream, int):
        raise TypeError(f"expected a stream, its id or None, got {stream!r}")
    if size < 0:
        raise ValueError(f"a size is 0 or more, got {size}")
    return _C._memory_alloc(size, index, stream)


def caching_allocator_delete(mem_ptr):
    """Frees `mem_ptr`, an address that caching_allocator_alloc has returned. Another address raises
    RuntimeError."""
    _C._memory_free(mem_ptr)


@deprecated(
    f"{OWN_MODULE}._set_allocator_settings is deprecated. Use "
    "torch._C._accelerator_setAllocatorSettings instead.",
    category=FutureWarning,
)
def _set_allocator_settings(env):
    """Changes the settings: `env` has the format of PYTORCH_ALLOC_CONF."""
    torch._C._accelerator_setAllocatorSettings(env)


def change_current_allocator(allocator):
    """Raises NotImplementedError: the allocator is part of the device, and `allocator` cannot
    replace it."""
    raise NotImplementedError(f"{OWN_NAME}'s device allocator cannot be replaced")


# ---- A summary to print ----

_WORDS = {  # of the same width
    "   PyTorch CUDA": f"PyTorch {OWN_NAME}".rjust(15),
    "CUDA OOMs": "     OOMs",
    "cudaMalloc": "allocation",
    "GPU reserved memory  ": "Reserved memory      ",
    "GPU reserved segments": "Reserved segments    ",
    "Oversize GPU segments": "Oversize segments    ",
}
_SUMMARY = borrowed(torch.cuda.memory.memory_summary, memory_stats=memory_stats)


def memory_summary(device=None, abbreviated=False):
    """The statistics of `device` as a table to print, PyTorch's own with the device's name.
    `abbreviated` omits the two pools."""
    index = device_index(device)
    if not is_initialized():
        return f"{type_name()}:{index} has not been used"
    table = _SUMMARY(index, abbreviated)
    for theirs, ours in _WORDS.items():
        table = table.replace(theirs, ours)
    return table
