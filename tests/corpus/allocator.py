"""Memory that is used again"""

import torch
from torch.openreg import Stream

from ._base import bug, full, here


@bug
def temporary_of_a_cast(right):
    """Mixed precision on streams: the temporary of a cast is passed to a side stream and dropped by
    the caller."""
    side, found = Stream(), []
    for i in range(2):
        x = full(i)
        side.wait_stream(here())
        cast = (x + 1).half()
        side.wait_stream(here())
        with side:
            found.append(cast.float())
        if right:
            cast.record_stream(side)
        del cast
    here().wait_stream(side)
    for tensor in found:
        tensor.record_stream(here())
    return [tensor + 0 for tensor in found]


@bug
def recorded_on_the_wrong_stream(right):
    """Custom operators: `record_stream` names the stream that owns the memory, and not the one that
    uses it."""
    side, x = Stream(), full(3)
    side.wait_stream(here())
    with side:
        y = x * 2
    x.record_stream(side if right else here())
    del x
    full(8)
    here().wait_stream(side)
    y.record_stream(here())
    return y + 0


@bug
def recorded_of_a_copy(right):
    """Custom operators: `contiguous()` makes a copy for the side stream, and `record_stream` is
    called of the original."""
    side = Stream()
    x = torch.arange(64.0, device="openreg").reshape(8, 8).t()
    dense = x.contiguous()
    side.wait_stream(here())
    with side:
        y = dense * 2
    (dense if right else x).record_stream(side)
    del dense
    full(8)
    here().wait_stream(side)
    y.record_stream(here())
    return y + 0


@bug
def result_of_a_side_stream(right):
    """Overlapped branches: the side stream's result is read by the main one and dropped, and the
    side stream gets the memory for its next work."""
    side, found = Stream(), []
    for i in range(2):
        with side:
            y = full(i)
        here().wait_stream(side)
        found.append(y + 1)
        if right:
            y.record_stream(here())
        del y
    here().wait_stream(side)
    return found


@bug
def workspace_of_the_device(right):
    """Libraries with one workspace for each device (split-k, flash decoding): two streams use it at
    the same time."""
    streams, shared, found = [Stream(), Stream()], full(0), []
    workspaces = [shared, full(0) if right else shared]
    for i, (stream, workspace) in enumerate(zip(streams, workspaces, strict=True)):
        stream.wait_stream(here())
        with stream:
            workspace.fill_(i + 1)
            found.append(workspace.sum())
    for stream, tensor in zip(streams, found, strict=True):
        here().wait_stream(stream)
        tensor.record_stream(here())
    return [tensor + 0 for tensor in found]


@bug
def given_back_before_the_wait(right):
    """Arenas of one's own: a slice goes back to the free list when its work is queued, and a slice
    for another stream is cut from it."""
    arena, free, found = full(0), [slice(0, 32)], []
    done = None
    for i, stream in enumerate((Stream(), Stream())):
        part = free.pop()
        stream.wait_stream(here())
        if right and done is not None:
            stream.wait_event(done)
        with stream:
            arena[part].fill_(i + 1)
            found.append(arena[part].sum())
            done = stream.record_event()
        free.append(part)
    torch.openreg.synchronize()
    return found


@bug
def emptied_cache(right):
    """Programs that call `empty_cache()` when memory is short: it gives away blocks that a side
    stream writes and that were dropped."""
    side, x = Stream(), full(0)
    side.wait_stream(here())
    with side:
        x.add_(1)
    if right:
        x.record_stream(side)
    del x
    torch.openreg.empty_cache()
    fresh = full(7)
    here().wait_stream(side)
    return fresh


@bug
def rebound_in_a_loop(right):
    """Samplers and solvers: `x = f(x)` with the streams in turn drops the last x while its stream
    still reads it."""
    streams, x = [Stream(), Stream()], full(1)
    previous = here()
    for i in range(4):
        stream = streams[i % 2]
        stream.wait_stream(previous)
        with stream:
            new = x * 2
        if right:
            x.record_stream(stream)
        x, previous = new, stream
        del new
        if i < 3:
            with streams[1 - i % 2]:
                full(0)  # of the next step
    here().wait_stream(previous)
    x.record_stream(here())
    return x + 0


@bug
def resized_result(right):
    """`out=` results that grow: a result is resized on the main stream while a side stream reads
    its old memory."""
    side, out = Stream(), full(3)
    side.wait_stream(here())
    with side:
        y = out * 2
    if right:
        out.record_stream(side)
    out.resize_(4096)
    full(9)
    here().wait_stream(side)
    y.record_stream(here())
    return y + 0


@bug
def replaced_by_data(right):
    """Weight updates by `.data =`: the old weights' memory is free at once, and a generation on
    another stream still reads them."""
    side, weight = Stream(), torch.nn.Parameter(full(2), requires_grad=False)
    side.wait_stream(here())
    with side:
        y = weight * 3
    if right:
        weight.data.record_stream(side)
    weight.data = full(5)
    full(9)
    here().wait_stream(side)
    y.record_stream(here())
    return y + 0


@bug
def saved_for_backward_elsewhere(right):
    """Autograd functions that compute on a stream in backward: the saved tensor is freed when the
    node is done, and its work is still queued."""
    side = Stream()

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x * 2)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            (doubled,) = ctx.saved_tensors
            side.wait_stream(here())
            with side:
                result = doubled * 1
            if right:
                doubled.record_stream(side)
            Square.kept = result
            return gradient

    x = full(3).requires_grad_()
    Square.apply(x).sum().backward()
    full(9)
    here().wait_stream(side)
    Square.kept.record_stream(here())
    return Square.kept + 0


@bug
def evicted_entry(right):
    """Caches with a size limit: an entry is evicted while the stream of a request that hit it still
    reads it."""
    side, entries = Stream(), {"a": full(4)}
    side.wait_stream(here())
    with side:
        y = entries["a"] + 1
    if right:
        entries["a"].record_stream(side)
    entries.pop("a")
    entries["b"] = full(0)
    here().wait_stream(side)
    y.record_stream(here())
    return y + 0


@bug
def dropped_at_the_end(right):
    """Overlapped branches: the side stream's result is dropped while the main stream still reads
    it; who gets the memory next is not in this program."""
    side, x = Stream(), full(2)
    side.wait_stream(here())
    with side:
        y = x * 3
    here().wait_stream(side)
    if right:
        y.record_stream(here())
    return y + 1
