"""Races between streams"""

import torch
import triton
import triton.language as tl
from torch.openreg import Event, Stream

from ._pairs import SIZE, empty, here, numbers, pair, zeros

BLOCK = 256
HALF = 512


@triton.jit(do_not_specialize=["first", "n"])
def scale_kernel(x_ptr, y_ptr, first, n, factor, STEP: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    places = first + offsets * STEP
    x = tl.load(x_ptr + places, mask=mask)
    tl.store(y_ptr + places, x * factor, mask=mask)


@triton.jit
def column_kernel(x_ptr, y_ptr, column, stride_row, stride_column, N: tl.constexpr):
    rows = tl.arange(0, N)
    x = tl.load(x_ptr + rows * stride_row + column * stride_column)
    tl.store(y_ptr + rows, x + 1)


def scale(x, y, first=0, n=SIZE, factor=2.0, step=1):
    """Scales `n` elements from `first` on, each `step`-th."""
    scale_kernel[(triton.cdiv(n, BLOCK),)](x, y, first, n, factor, STEP=step, BLOCK=BLOCK)


@pair("race", "scale(x, y)")
def producer_on_a_side_stream(right):
    """Overlapped kernels: the consumer does not wait for the stream that produces."""
    side, x, y = Stream(), numbers(SIZE), zeros(SIZE)
    side.wait_stream(here())
    with side:
        scale(x, y)
    if right:
        here().wait_stream(side)
    return y + 1, x * 2 + 1


@pair("race", "scale(x, y, 0, HALF if right")
def halves_by_an_offset(right):
    """Split launches: two streams write two halves of one tensor, and the first is an element too
    long."""
    side, x, y = Stream(), numbers(SIZE), zeros(SIZE)
    side.wait_stream(here())
    with side:
        scale(x, y, HALF, SIZE - HALF)
    scale(x, y, 0, HALF if right else HALF + 1)
    here().wait_stream(side)
    return y, x * 2


@pair("race", "scale(x[start:], y[start:]")
def halves_by_views(right):
    """Split launches: the halves are views, and the second begins sixteen elements too early."""
    side, x, y = Stream(), numbers(SIZE), zeros(SIZE)
    side.wait_stream(here())
    scale(x[:HALF], y[:HALF], n=HALF)
    start = HALF if right else HALF - 16
    with side:
        scale(x[start:], y[start:], n=SIZE - start)
    here().wait_stream(side)
    return y, x * 2


@pair("race", "scale(x, y, 1 if right")
def interleaved_elements(right):
    """Interleaved layouts: one stream writes the even elements, the other the odd ones, or the
    even ones again."""
    side, x, y = Stream(), numbers(SIZE), zeros(SIZE)
    side.wait_stream(here())
    with side:
        scale(x, y, 0, SIZE // 2, step=2)
    scale(x, y, 1 if right else 0, SIZE // 2, step=2)
    here().wait_stream(side)
    return y, x * 2


@pair("race", "column_kernel[(1,)](matrix.t()")
def row_of_a_transposed_view(right):
    """Layout changes: a stream writes a column through the transpose, and it crosses the row that
    another stream's kernel reads."""
    side, matrix, y = Stream(), numbers(64, 64), zeros(64)
    expected = matrix[3] + 1
    side.wait_stream(here())
    with side:
        (matrix if right else matrix.t())[4].mul_(2)
    column_kernel[(1,)](matrix.t(), y, 3, *matrix.t().stride(), N=64)
    here().wait_stream(side)
    return y, expected


@pair("race", "scale(x, y)")
def event_recorded_too_early(right):
    """Pipelines: the event is recorded before the launch that it stands for."""
    side, done, x, y = Stream(), Event(), numbers(SIZE), zeros(SIZE)
    side.wait_stream(here())
    with side:
        if not right:
            done.record()
        scale(x, y)
        if right:
            done.record()
    here().wait_event(done)
    return y + 1, x * 2 + 1


@pair("race", "scale_kernel[(triton")
def memory_of_another_stream(right):
    """Prefetching: the tensor is freed while a side stream's kernel still reads it, and its memory
    is taken again."""
    side, y = Stream(), empty(SIZE)
    expected = numbers(SIZE) * 2
    x = numbers(SIZE)
    side.wait_stream(here())
    with side:
        scale(x, y)
    if right:
        x.record_stream(side)
    del x
    torch.full((SIZE,), 7.0, device=y.device)
    side.synchronize()
    return y, expected


@pair("race", "scale(x, y)")
def wait_the_wrong_way_round(right):
    """Overlapped kernels: the side stream waits for the main one, and not the other way."""
    side, x, y = Stream(), numbers(SIZE), zeros(SIZE)
    side.wait_stream(here())
    with side:
        scale(x, y)
    if right:
        here().wait_stream(side)
    else:
        side.wait_stream(here())
    scale(y, y, factor=3.0)
    return y, x * 6


@pair("race", "scale(buffer, y)")
def copy_into_a_buffer_in_use(right):
    """Double buffering: the next batch is copied into the buffer that a kernel still reads."""
    side, y = Stream(), zeros(SIZE)
    batches = [torch.full((SIZE,), float(value)).pin_memory() for value in (1, 2)]
    buffer = batches[0].to(y.device)
    side.wait_stream(here())
    scale(buffer, y)
    if right:
        side.wait_stream(here())
    with side:
        buffer.copy_(batches[1], non_blocking=True)
    here().wait_stream(side)
    torch.openreg.synchronize()
    return y, torch.full_like(y, 2)
