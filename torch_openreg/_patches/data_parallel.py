"""The functions of ``torch._C`` with which ``torch.nn.parallel`` and ``torch.openreg.comm`` move
tensors between devices. PyTorch has them only when it is built for CUDA, and for CUDA's tensors
alone. Each is queued: as with CUDA's, the host waits for nothing but copies to pageable memory.
"""

import functools

import torch
import torch.cuda.nccl
from torch._utils import (
    _flatten_dense_tensors,
    _flatten_sparse_tensors,
    _reorder_tensors_as,
    _take_tensors,
    _unflatten_dense_tensors,
)

from ..openreg._utils import OWN_NAME, is_ours, type_name
from ..openreg.streams import StreamContext
from . import replace, wrap


def _device(index):
    if index < 0:
        raise RuntimeError(f"Expected non-negative device index, but got {index}")
    return torch.device(OWN_NAME, index)


def _check_outputs(outputs):
    for i, output in enumerate(outputs):
        if not is_ours(output.device):
            raise RuntimeError(
                f"Expected all output tensors to be {type_name()} tensors, but output tensor at "
                f"index {i} has device '{output.device}'"
            )


def _broadcast(tensor, devices):
    """`tensor`, or a copy, on each of the devices with these indices."""
    kind = {"dtype": tensor.dtype, "layout": tensor.layout}
    return [
        tensor
        if tensor.device == device
        else torch.empty(tensor.size(), device=device, **kind).copy_(tensor, non_blocking=True)
        for device in map(_device, devices)
    ]


def _broadcast_out(tensor, out):
    _check_outputs(out)
    for i, output in enumerate(out):
        if output.size() != tensor.size():
            raise RuntimeError(
                "Expected all output tensors to have same shape as the source tensor "
                f"{list(tensor.size())}, but output tensor at index {i} has shape "
                f"{list(output.size())}"
            )
    return [output.copy_(tensor, non_blocking=True) for output in out]


def _broadcast_coalesced(tensors, devices, buffer_size):
    """Returns a list for each device: the tensors themselves for the first one, copies for the
    others, which are sent in few buffers of about `buffer_size` bytes."""
    if any(t.get_device() != devices[0] for t in tensors):
        raise RuntimeError(f"All tensors must be on devices[0]: {devices[0]}")
    outputs = [list(tensors), *([] for _ in devices[1:])]
    for chunk in _take_tensors(tensors, buffer_size):
        copy = _copies_of_sparse if chunk[0].is_sparse else _copies_of_dense
        for device_outputs, copies in zip(outputs[1:], copy(chunk, devices[1:]), strict=True):
            # They share memory only: each has its own version counter.
            device_outputs.extend(t.data for t in copies)
    return [outputs[0], *(list(_reorder_tensors_as(own, tensors)) for own in outputs[1:])]


def _copies_of_dense(tensors, devices):
    flat = _flatten_dense_tensors(tensors)
    return [_unflatten_dense_tensors(copy, tensors) for copy in _broadcast(flat, devices)]


def _copies_of_sparse(tensors, devices):
    parts = [[t._indices() for t in tensors], [t._values() for t in tensors]]
    flat = [_broadcast(part, devices) for part in _flatten_sparse_tensors(tensors)]
    for copies in zip(*flat, strict=True):
        indices, values = map(_unflatten_dense_tensors, copies, parts)
        yield [
            # The tensors were valid, so their contents need no check.
            torch.sparse_coo_tensor(
                i, v, t.size(), is_coalesced=t.is_coalesced(), check_invariants=False
            )
            for i, v, t in zip(indices, values, tensors, strict=True)
        ]


def _on_stream(streams, i, index):
    """A context in which the stream for chunk `i` is current, if there is one."""
    stream = streams[i] if streams is not None and i < len(streams) else None
    context = StreamContext(stream)
    if stream is not None and stream.device_index != index:
        raise RuntimeError(
            f"Expected the device associated with the stream at index {i} (was "
            f"{stream.device_index}) to match the device supplied at that index (expected {index})"
        )
    return context


def _scatter(tensor, devices, chunk_sizes, dim, streams):
    """Splits `tensor` into chunks, each on its device."""
    if not devices:
        raise RuntimeError("Expected at least one device to scatter to")
    if chunk_sizes is None:
        chunks = list(tensor.chunk(len(devices), dim))
    elif len(chunk_sizes) == len(devices):
        chunks = list(tensor.split_with_sizes(list(chunk_sizes), dim))
    else:
        raise RuntimeError(
            "Expected devices and chunk_sizes to be of same length, but got len(devices) = "
            f"{len(devices)} and len(chunk_sizes) = {len(chunk_sizes)}"
        )
    for i, (chunk, index) in enumerate(zip(chunks, devices, strict=False)):
        if index != tensor.get_device():
            with _on_stream(streams, i, index):
                chunks[i] = chunk.to(_device(index), non_blocking=True)
    return chunks


def _scatter_out(tensor, out, dim, streams):
    if not out:
        raise RuntimeError("Expected at least one output tensor to scatter to")
    _check_outputs(out)
    dim = _wrapped(dim, tensor)
    for i, output in enumerate(out):
        if _without(dim, output) != _without(dim, tensor):
            raise RuntimeError(
                f"Output tensor at index {i} has incorrect shape: {list(output.size())}. Expected "
                f"same shape except for scatter dim {dim} as the source tensor: "
                f"{list(tensor.size())}"
            )
    sizes = [output.size(dim) for output in out]
    if sum(sizes) != tensor.size(dim):
        raise RuntimeError(
            f"Total size for output tensors along scatter dim {dim} does not match the source "
            f"tensor size at dim {dim}. Expected {tensor.size(dim)}, but got total size "
            f"{sum(sizes)}"
        )
    for i, chunk in enumerate(tensor.split_with_sizes(sizes, dim)):
        with _on_stream(streams, i, out[i].get_device()):
            out[i].copy_(chunk, non_blocking=True)
    return list(out)


def _wrapped(dim, tensor):
    """`dim` as a number that is not negative."""
    from torch._prims_common import canonicalize_dim

    return canonicalize_dim(tensor.dim(), dim)


def _without(dim, tensor):
    """The size without that dimension."""
    return [size for i, size in enumerate(tensor.size()) if i != dim], tensor.dim()


def _gathered_size(tensors, dim):
    """The size of gather's result, and that dimension as a number that is not negative."""
    if not tensors:
        raise RuntimeError("Expected at least one tensor to gather from")
    dim = _wrapped(dim, tensors[0])
    expected = list(tensors[0].size())
    for i, tensor in enumerate(tensors):
        if not is_ours(tensor.device):
            raise RuntimeError(
                f"Expected all input tensors to be {type_name()} tensors, but tensor at index {i} "
                f"has device '{tensor.device}'"
            )
        if tensor.dim() != len(expected):
            raise RuntimeError(
                "Expected all input tensors to have the same number of dimensions, but tensor at "
                f"index {i} has {tensor.dim()} dimensions, (expected {len(expected)})"
            )
        expected[dim : dim + 1] = tensor.size()[dim : dim + 1]
        if _without(dim, tensor) != _without(dim, tensors[0]):
            raise RuntimeError(
                f"Input tensor at index {i} has invalid shape {list(tensor.size())}, but expected "
                f"{expected}"
            )
    expected[dim] = sum(tensor.size(dim) for tensor in tensors)
    return expected, dim


def _gather_to(tensors, out, dim):
    chunks = out.split_with_sizes([tensor.size(dim) for tensor in tensors], dim)
    for chunk, tensor in zip(chunks, tensors, strict=True):
        # A copy to the host without a wait would be read too early.
        chunk.copy_(tensor, non_blocking=is_ours(out.device))
    return out


def _gather(tensors, dim, destination):
    """Joins the tensors on the device with that index: None is the current one, -1 the CPU."""
    size, dim = _gathered_size(tensors, dim)
    where = "cpu" if destination == -1 else OWN_NAME if destination is None else destination
    where = _device(where) if isinstance(where, int) else where
    out = torch.empty(size, dtype=tensors[0].dtype, device=where, memory_format=_format(tensors))
    return _gather_to(tensors, out, dim)


def _format(tensors):
    from torch._prims_common import suggest_memory_format

    formats = {suggest_memory_format(tensor) for tensor in tensors}
    return formats.pop() if len(formats) == 1 else torch.contiguous_format


def _gather_out(tensors, out, dim):
    size, dim = _gathered_size(tensors, dim)
    if list(out.size()) != size:
        raise RuntimeError(f"Expected out tensor to have shape {size}, but got {list(out.size())}")
    return _gather_to(tensors, out, dim)


_FUNCTIONS = (
    _broadcast,
    _broadcast_out,
    _broadcast_coalesced,
    _scatter,
    _scatter_out,
    _gather,
    _gather_out,
)


def _is_cudas(values):
    """Whether a call is CUDA's. It names devices by index, so a tensor on the CPU belongs to the
    kind of device that torch.nn.parallel chooses, which is CUDA wherever there is one."""
    tensors = []
    for value in values:
        tensors += value if isinstance(value, list | tuple) else [value]
    devices = [t.device for t in tensors if isinstance(t, torch.Tensor)]
    if any(map(is_ours, devices)):
        return False
    return any(d.type == "cuda" for d in devices) or torch.cuda.is_available()


def _ours_or(theirs, ours):
    @functools.wraps(ours)
    def choose(*args):
        return (theirs if _is_cudas(args) else ours)(*args)

    return choose


def _not_of_ours(is_available, tensors):
    return not any(is_ours(t.device) for t in tensors) and is_available(tensors)


def _taking_ours(apply, modules, inputs, kwargs_tup=None, devices=None):
    """Its threads have autocast's default dtype, as on CUDA."""
    if devices is not None:
        devices = [_index(device) for device in devices]
    if torch.is_autocast_enabled(type_name()):
        modules = [_in_autocast(module) for module in modules]
    return apply(modules, inputs, kwargs_tup, devices)


def _in_autocast(module):
    def forward(*args, **kwargs):
        with torch.autocast(type_name()):
            return module(*args, **kwargs)

    return forward


def _index(device):
    """Handles a device of ours; any other goes to the original."""
    named = torch.device(device) if isinstance(device, str) else device
    if isinstance(named, torch.device) and is_ours(named):
        return torch._utils._get_device_index(named, optional=True)
    return device


def install():
    for ours in _FUNCTIONS:
        theirs = getattr(torch._C, ours.__name__, None)
        replace(f"torch._C.{ours.__name__}", _ours_or(theirs, ours) if theirs else ours)
    wrap("torch.cuda.nccl.is_available", _not_of_ours)
    wrap("torch.nn.parallel.parallel_apply", _taking_ours)
    for module in ("parallel_apply", "data_parallel"):
        replace(f"torch.nn.parallel.{module}.parallel_apply", torch.nn.parallel.parallel_apply)
