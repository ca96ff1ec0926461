"""Reads of memory that nothing has written"""

import torch
import triton
import triton.language as tl

from ._pairs import SIZE, empty, numbers, pair, zeros

BLOCK = 256


@triton.jit
def accumulate_kernel(x_ptr, y_ptr, n, ATOMIC: tl.constexpr, B: tl.constexpr):
    offsets = tl.program_id(0) * B + tl.arange(0, B)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    if ATOMIC:
        tl.atomic_add(y_ptr + offsets, x, mask=mask)
    else:
        tl.store(y_ptr + offsets, x + tl.load(y_ptr + offsets, mask=mask), mask=mask)


def accumulate(initialised, atomic):
    x = numbers(SIZE)
    y = zeros(SIZE) if initialised else empty(SIZE)
    accumulate_kernel[(triton.cdiv(SIZE, BLOCK),)](x, y, SIZE, ATOMIC=atomic, B=BLOCK)
    return y, x


@pair("unwritten", "accumulate_kernel[")
def accumulated_into_empty(right):
    """Gradient accumulation: the kernel adds to an output of `torch.empty`."""
    return accumulate(right, False)


@pair("unwritten", "accumulate_kernel[")
def atomics_into_empty(right):
    """Reductions: atomics add to an output of `torch.empty`."""
    return accumulate(right, True)


@triton.jit
def fill_kernel(x_ptr, y_ptr, n, B: tl.constexpr):
    offsets = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(y_ptr + offsets, x * 2, mask=offsets < n)


@pair("unwritten", "y + 1")
def last_tile_missing(right):
    """Wrappers of kernels: the grid has n // BLOCK programs, so the rest is not written."""
    x, y = numbers(SIZE), empty(SIZE)
    programs = triton.cdiv(SIZE, BLOCK) if right else SIZE // BLOCK
    fill_kernel[(programs,)](x, y, SIZE, B=BLOCK)
    return y + 1, x * 2 + 1


@triton.jit
def causal_kernel(x_ptr, y_ptr, N: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, N)
    mask = columns <= row
    x = tl.load(x_ptr + row * N + columns, mask=mask)
    tl.store(y_ptr + row * N + columns, x, mask=mask)


@pair("unwritten", "scores @ values")
def masked_region_read(right):
    """Causal attention: the kernel stores the lower triangle, and a product reads all."""
    x, values = numbers(32, 32), numbers(32, 4)
    scores = zeros(32, 32) if right else empty(32, 32)
    causal_kernel[(32,)](x, scores, N=32)
    return scores @ values, x.tril() @ values


@triton.jit
def partial_sums_kernel(x_ptr, partial_ptr, n, B: tl.constexpr):
    offsets = tl.program_id(0) * B + tl.arange(0, B)
    total = tl.sum(tl.load(x_ptr + offsets, mask=offsets < n, other=0.0), axis=0)
    tl.store(partial_ptr + tl.program_id(0), total)


@triton.jit
def final_sum_kernel(partial_ptr, y_ptr, N: tl.constexpr):
    tl.store(y_ptr, tl.sum(tl.load(partial_ptr + tl.arange(0, N)), axis=0))


@pair("unwritten", "final_sum_kernel[")
def partial_sums_of_too_few_programs(right):
    """Two-stage reductions: the second stage reads more partial sums than the first has written."""
    x, y = numbers(SIZE), empty(1)
    partial = empty(4)
    programs = 4 if right else 3
    partial_sums_kernel[(programs,)](x, partial, SIZE, B=BLOCK)
    final_sum_kernel[(1,)](partial, y, N=4)
    return y, x.sum().view(1)


@pair("unwritten", "torch.add(y, 1")
def tail_of_a_padded_buffer(right):
    """Padded buffers: a kernel fills the rows in use, and the padding is read, too."""
    x, y = numbers(SIZE), empty(1024)
    fill_kernel[(4,)](x, y, SIZE, B=BLOCK)
    if right:
        y[SIZE:].zero_()
    return torch.add(y, 1)[:SIZE], x * 2 + 1
