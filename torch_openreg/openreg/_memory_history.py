"""Snapshots of device memory, the history of allocations, observers of failed ones.

Part of ``torch.openreg.memory``, which has the names.
"""

import collections
import inspect
import json
import pickle
import sys
import time

import torch
from torch.cuda._memory_viz import memory as _memory
from torch.cuda._memory_viz import segments as _segments

from .. import _C
from ._lazy import is_initialized
from ._utils import OWN_NAME, a_device, device_index, is_ours

_annotations = None  # (device, entry), while the history is recorded
_annotation_stacks = False


def memory_snapshot(mempool_id=None, include_traces=True):
    """A list of the segments of every device's allocator, each with its blocks.

    Args:
        mempool_id: the id of a private pool, for its segments alone; None and (0, 0): all.
        include_traces: ignored, as the history is no part of this list.
    """
    segments = _C._memory_snapshot(False)["segments"] if is_initialized() else []
    if mempool_id is None or tuple(mempool_id) == (0, 0):
        return segments
    return [s for s in segments if s["segment_pool_id"] == tuple(mempool_id)]


def _snapshot(device=None, augment_with_fx_traces=False):
    """The state of every device's allocator and its history, in the form of torch.cuda's.

    ``segments``: address, sizes, stream and the blocks of each, with the stack (``frames``) that
    requested a block if _record_memory_history() was on. ``device_traces``: for each device the
    actions, in order. ``host_segments``, ``host_traces`` (from PyTorch 2.14 on): the same of pinned
    memory, where each block is a segment. ``device`` is accepted for torch.cuda's sake; the result
    has all devices.
    """
    if device is not None:
        device_index(device)
    snapshot = _C._memory_snapshot(True)
    for index, entry in list(_annotations or ()):
        trace = snapshot["device_traces"][index]
        later = (at for at, other in enumerate(trace) if other["time_us"] > entry["time_us"])
        trace.insert(next(later, len(trace)), dict(entry))
    if augment_with_fx_traces:
        snapshot = torch._utils._augment_memory_snapshot_stack_traces(snapshot)
    return snapshot


def _dump_snapshot(filename="dump_snapshot.pickle", augment_with_fx_traces=False):
    """Writes _snapshot() to a file that PyTorch's memory viewer opens."""
    with open(filename, "wb") as file:
        pickle.dump(_snapshot(augment_with_fx_traces=augment_with_fx_traces), file)


def _record_memory_history_impl(
    enabled="all",
    context="all",
    stacks="all",
    max_entries=sys.maxsize,
    device=None,
    clear_history=False,
    compile_context=False,
    global_record_annotations=False,
    skip_actions=None,
    record_pinned_host_memory=False,
    record_cuda=True,
):
    """Records what the allocators of all devices do, and from where, for _snapshot().

    Args:
        enabled: None (off, and forgets what was recorded), "state" (the stacks of live blocks) or
            "all" (every action too).
        context: which stacks are kept: None, "state" (of live blocks), "alloc" (also in the history
            of allocations) or "all" (also where memory is freed).
        stacks: "python", or "all" for C++ frames as well.
        max_entries: of the history, for each device; the oldest give way.
        clear_history: forget what was recorded until now.
        skip_actions: names of actions that are not kept. Those of pinned memory always are.
        record_pinned_host_memory: records pinned memory, too (from PyTorch 2.14 on). Its actions
            are forgotten where max_entries changes.
        record_cuda: False leaves the devices' history as it is.

    What else torch.cuda's takes raises NotImplementedError if it is not the default.
    """
    if device is not None:
        device_index(device)
    if compile_context or global_record_annotations:
        raise NotImplementedError(
            f"{OWN_NAME}'s history has no compile_context and no global_record_annotations"
        )
    if max_entries < 0:
        raise ValueError(f"max_entries is 0 or more, got {max_entries}")
    _C._memory_record_history(
        enabled,
        context,
        stacks,
        max_entries,
        clear_history,
        list(skip_actions or ()),
        record_cuda,
        record_pinned_host_memory,
    )
    if not record_cuda:
        return
    global _annotations, _annotation_stacks
    kept = () if clear_history or _annotations is None else _annotations
    _annotations = collections.deque(kept, max_entries) if enabled == "all" else None
    _annotation_stacks = context in ("alloc", "all")


def _annotate_tensor(tensor, metadata):
    """Adds an entry ``"annotate"`` to the history of the device of `tensor`, with the address of
    its storage, the caller's stack and the text `metadata` as ``user_metadata``. Does nothing while
    no history is recorded. A tensor elsewhere raises ValueError."""
    if not is_ours(tensor.device):
        raise ValueError(f"expected a tensor on {a_device()}, got one on {tensor.device}")
    if _annotations is None:
        return
    storage, frames = tensor.untyped_storage(), []
    frame = sys._getframe(1) if _annotation_stacks else None
    while frame is not None:
        code = frame.f_code
        frames.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
        frame = frame.f_back
    entry = {
        "action": "annotate",
        "addr": storage.data_ptr(),
        "size": storage.nbytes(),
        "stream": torch.accelerator.current_stream(tensor.device).stream_id,
        "time_us": time.time_ns() // 1000,
        "compile_context": "",
        "user_metadata": metadata,
        "pool_id": (0, 0),
        "frames": frames,
    }
    _annotations.append((tensor.device.index, entry))


def _record_memory_history_legacy(
    enabled,
    record_context=True,
    trace_alloc_max_entries=1,
    trace_alloc_record_context=False,
    device=None,
    record_context_cpp=False,
    *others,
    **options,
):
    context = "alloc" if trace_alloc_record_context else "state" if record_context else None
    _record_memory_history_impl(
        "all" if enabled else None,
        context,
        "all" if record_context_cpp else "python",
        trace_alloc_max_entries,
        device,
        *others,
        **options,
    )


def _record_memory_history(enabled="all", *args, **kwargs):
    # As in torch.cuda, True and False select the arguments of older versions.
    legacy = isinstance(enabled, bool)
    record = _record_memory_history_legacy if legacy else _record_memory_history_impl
    record(enabled, *args, **kwargs)


_record_memory_history.__doc__ = _record_memory_history_impl.__doc__
_record_memory_history.__signature__ = inspect.signature(_record_memory_history_impl)


def _save_segment_usage(filename="output.svg", snapshot=None):
    """Writes a flame graph of the segments of `snapshot`, or of _snapshot(), as a picture."""
    _write(filename, _segments, snapshot)


def _save_memory_usage(filename="output.svg", snapshot=None):
    """Writes a flame graph of the allocated blocks of `snapshot`, or of _snapshot(), as a
    picture."""
    _write(filename, _memory, snapshot)


def _write(filename, draw, snapshot):
    picture = draw(_snapshot() if snapshot is None else snapshot)
    with open(filename, "w") as file:
        file.write(picture)


def _allocation_traceback(data_ptr):
    """The stack that requested the live block at `data_ptr`, or None."""
    return _C._memory_traceback(data_ptr)


def _set_memory_metadata(metadata):
    """Sets a text that each recorded action carries from now on (``user_metadata``). A dictionary
    is converted to JSON."""
    if isinstance(metadata, dict):
        metadata = json.dumps(metadata, separators=(",", ":"))
    _C._memory_set_metadata(metadata)


_get_memory_metadata = _C._memory_get_metadata


def attach_out_of_memory_observer(observer):
    """Registers `observer`, which is called wherever an allocation fails because device memory is
    short, before torch.OutOfMemoryError is raised.

    Args:
        observer: is called as ``observer(device, alloc, device_alloc, device_free)``: the device's
            index, and three numbers of bytes: those requested, those that the allocator may hold
            (the device's capacity, or the part that set_per_process_memory_fraction allows) and
            those that are free. It stays for the process's life, and is called on the thread that
            allocates, which may be one of the device's. An exception that it raises replaces
            torch.OutOfMemoryError. An object that cannot be called raises TypeError.
    """
    if not callable(observer):
        raise TypeError(f"an observer must be callable, got {observer!r}")
    _C._memory_attach_observer(observer)
