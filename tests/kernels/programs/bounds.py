"""Accesses out of bounds"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ._pairs import DEVICE, SIZE, empty, numbers, pair

BLOCK = 256


@triton.jit
def add_kernel(x_ptr, y_ptr, z_ptr, n, LOADS: tl.constexpr, STORES: tl.constexpr, B: tl.constexpr):
    offsets = tl.program_id(0) * B + tl.arange(0, B)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask) if LOADS else tl.load(y_ptr + offsets)
    if STORES:
        tl.store(z_ptr + offsets, x + y, mask=mask)
    else:
        tl.store(z_ptr + offsets, x + y)


def add(loads=True, stores=True):
    x, y, z = numbers(SIZE), numbers(SIZE), empty(SIZE)
    add_kernel[(triton.cdiv(SIZE, BLOCK),)](x, y, z, SIZE, LOADS=loads, STORES=stores, B=BLOCK)
    return z, x + y


@pair("bounds", "y = tl.load(y_ptr + offsets")
def load_without_a_mask(right):
    """Elementwise kernels: one of two loads has no mask."""
    return add(loads=right)


@pair("bounds", "tl.store(z_ptr + offsets, x + y)")
def store_without_a_mask(right):
    """Elementwise kernels: the store has no mask, and writes what lies behind."""
    return add(stores=right)


@triton.jit
def whole_blocks_kernel(x_ptr, y_ptr, B: tl.constexpr):
    offsets = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y_ptr + offsets, tl.exp2(tl.load(x_ptr + offsets)))


@pair("bounds", "tl.store(y_ptr + offsets, tl.exp2")
def one_block_too_many(right):
    """Kernels for whole blocks: the grid has n // BLOCK + 1 programs, also where BLOCK divides
    n."""
    x, y = torch.ones(1024, device=DEVICE), empty(1024)
    programs = triton.cdiv(1024, BLOCK) if right else 1024 // BLOCK + 1
    whole_blocks_kernel[(programs,)](x, y, B=BLOCK)
    return y, torch.exp2(x)


@triton.jit
def convolution_kernel(
    x_ptr, w_ptr, y_ptr, n, WIDTH: tl.constexpr, LEFT: tl.constexpr, B: tl.constexpr
):
    offsets = tl.program_id(0) * B + tl.arange(0, B)
    total = tl.zeros((B,), dtype=tl.float32)
    for tap in tl.static_range(WIDTH):
        places = offsets - (WIDTH - 1) + tap
        mask = places < n
        if LEFT:
            mask = mask & (places >= 0)
        total += tl.load(x_ptr + places, mask=mask, other=0.0) * tl.load(w_ptr + tap)
    tl.store(y_ptr + offsets, total, mask=offsets < n)


@pair("bounds", "total += tl.load(x_ptr + places")
def taps_before_the_start(right):
    """Causal convolutions: the first taps lie before the sequence, and only its end is masked."""
    x, w, y = numbers(SIZE), torch.ones(4, device=DEVICE), empty(SIZE)
    convolution_kernel[(triton.cdiv(SIZE, BLOCK),)](x, w, y, SIZE, WIDTH=4, LEFT=right, B=BLOCK)
    padded = torch.nn.functional.pad(x, (3, 0))
    return y, padded.unfold(0, 4, 1).sum(1)


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_bk, stride_cm,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * B + tl.arange(0, B)
    columns = tl.program_id(1) * B + tl.arange(0, B)
    inner = tl.arange(0, B)
    a_mask = (rows[:, None] < M) if ROWS else (rows[:, None] >= 0)
    total = tl.zeros((B, B), dtype=tl.float32)
    for k in range(0, K, B):
        depth = inner < K - k if DEPTH else inner < B
        a = tl.load(a_ptr + rows[:, None] * stride_am + (k + inner[None, :]),
                    mask=a_mask & depth[None, :], other=0.0)  # fmt: skip
        b = tl.load(b_ptr + (k + inner[:, None]) * stride_bk + columns[None, :],
                    mask=depth[:, None] & (columns[None, :] < N), other=0.0)  # fmt: skip
        total = tl.dot(a, b, total)
    mask = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(c_ptr + rows[:, None] * stride_cm + columns[None, :], total, mask=mask)


def matmul(m, k, rows=True, depth=True):
    a, b, c = numbers(m, k), numbers(k, 20), empty(m, 20)
    strides = a.stride(0), b.stride(0), c.stride(0)
    grid = triton.cdiv(m, 16), triton.cdiv(20, 16)
    matmul_kernel[grid](a, b, c, m, 20, k, *strides, ROWS=rows, DEPTH=depth, B=16)
    return c, a @ b


@pair("bounds", "a = tl.load(a_ptr + rows")
def rows_past_the_end(right):
    """Matrix products: the number of rows is no multiple of the tile, and the load of A has no mask
    for them."""
    return matmul(20, 36, rows=right)


@pair("bounds", "b = tl.load(b_ptr")
def depth_past_the_end(right):
    """Matrix products: the last step along K has no mask."""
    return matmul(20, 36, depth=right)


@triton.jit
def double_tile_kernel(x, y, B: tl.constexpr):
    row, column = tl.program_id(0) * B, tl.program_id(1) * B
    y.store([row, column], x.load([row, column]) * 2)


@pair("bounds", "y.store([row, column]")
def descriptor_larger_than_its_tensor(right):
    """Tensor descriptors: the shape is rounded up to whole tiles, and the tensor is not."""
    x, y = numbers(24, 32), empty(24, 32)
    shape = [24 if right else 32, 32]
    given = [TensorDescriptor(t, shape, [32, 1], [16, 16]) for t in (x, y)]
    double_tile_kernel[(2, 2)](*given, B=16)
    return y, x * 2


@triton.jit
def row_sum_kernel(x_ptr, y_ptr, n_columns, stride_row, stride_column, B: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, B)
    places = x_ptr + row * stride_row + columns * stride_column
    x = tl.load(places, mask=columns < n_columns, other=0.0)
    tl.store(y_ptr + row, tl.sum(x, axis=0))


@pair("bounds", "x = tl.load(places, mask=columns < n_columns")
def strides_of_another_tensor(right):
    """Wrappers of kernels: the strides are the transpose's, and the tensor is not."""
    x, y = numbers(10, 50), empty(10)
    strides = x.stride() if right else x.t().stride()
    row_sum_kernel[(10,)](x, y, 50, *strides, B=64)
    return y, x.sum(1)


@pair("bounds", "x = tl.load(places, mask=columns < n_columns")
def every_other_column(right):
    """Wrappers of kernels: a sliced tensor is passed with twice its number of columns."""
    x, y = numbers(10, 100)[:, 50:], empty(10)
    row_sum_kernel[(10,)](x, y, 50 if right else 64, *x.stride(), B=64)
    return y, x.sum(1)
