"""Races between the programs of a grid"""

import triton
import triton.language as tl

from ._pairs import SIZE, empty, numbers, pair, zeros


@triton.jit
def rows_kernel(x_ptr, y_ptr, n_columns, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    mask = columns < n_columns
    x = tl.load(x_ptr + row * n_columns + columns, mask=mask, other=0.0)
    if MASKED:
        tl.store(y_ptr + row * n_columns + columns, x * 2, mask=mask)
    else:
        tl.store(y_ptr + row * n_columns + columns, x * 2)


@pair("grid", "columns, x * 2)")
def rows_without_a_mask(right):
    """Row-wise kernels: the store has no mask, so a row's tail is written into the next row."""
    x, y = numbers(8, 100), zeros(9, 100)  # the row behind the last takes the last one's tail
    rows_kernel[(8,)](x, y, 100, MASKED=right, BLOCK=128)
    return y[:8], x * 2


@triton.jit
def copy_kernel(x_ptr, y_ptr, n, step, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * step + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=mask), mask=mask)


@pair("grid", "tl.store(y_ptr + offsets, tl.load(x_ptr")
def tiles_by_a_wrong_stride(right):
    """Elementwise kernels: the tiles' distance is not their size."""
    x, y, block = numbers(SIZE), zeros(SIZE), 256
    copy_kernel[(triton.cdiv(SIZE, block),)](x, y, SIZE, block if right else 240, BLOCK=block)
    return y, x


@triton.jit
def smooth_kernel(x_ptr, y_ptr, n, HALO: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK + HALO)
    mask = (offsets > 0) & (offsets < n - 1)
    left = tl.load(x_ptr + offsets - 1, mask=mask, other=0.0)
    right = tl.load(x_ptr + offsets + 1, mask=mask, other=0.0)
    tl.store(y_ptr + offsets, left + right, mask=mask)


@pair("grid", "tl.store(y_ptr + offsets, left + right")
def tiles_with_their_halo(right):
    """Stencils: each program writes its halo, which is the next program's tile."""
    x, y = numbers(SIZE), zeros(SIZE)
    smooth_kernel[(triton.cdiv(SIZE, 128),)](x, y, SIZE, HALO=0 if right else 128, BLOCK=128)
    expected = zeros(SIZE)
    expected[1:-1] = x[:-2] + x[2:]
    return y, expected


@pair("grid", "left = tl.load(x_ptr + offsets - 1")
def stencil_in_place(right):
    """Stencils: the result replaces the input, which neighbours still read."""
    x = numbers(SIZE)
    expected = zeros(SIZE)
    expected[1:-1] = x[:-2] + x[2:]
    y = zeros(SIZE) if right else x
    smooth_kernel[(triton.cdiv(SIZE, 128),)](x, y, SIZE, HALO=0, BLOCK=128)
    return y, expected


@triton.jit
def sum_kernel(x_ptr, sum_ptr, n, ATOMIC: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(x_ptr + offsets, mask=offsets < n, other=0.0), axis=0)
    if ATOMIC:
        tl.atomic_add(sum_ptr, total)
    else:
        tl.store(sum_ptr, tl.load(sum_ptr) + total)


@pair("grid", "tl.store(sum_ptr, tl.load(sum_ptr) + total)")
def sum_without_atomics(right):
    """Reductions: each program adds its part by a load and a store."""
    x, total = numbers(SIZE), zeros(1)
    sum_kernel[(triton.cdiv(SIZE, 256),)](x, total, SIZE, ATOMIC=right, BLOCK=256)
    return total, x.sum().view(1)


@triton.jit
def mean_kernel(x_ptr, sum_ptr, mean_ptr, n, FINISH: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(sum_ptr, tl.sum(tl.load(x_ptr + offsets, mask=offsets < n, other=0.0), axis=0))
    if FINISH and tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(mean_ptr, tl.load(sum_ptr) / n)


@pair("grid", "tl.store(mean_ptr, tl.load(sum_ptr) / n)")
def sum_read_by_the_last_program(right):
    """Reductions: the last program reads the sum to which others may still add."""
    x, total, mean, block = numbers(SIZE), zeros(1), zeros(1), 256
    mean_kernel[(triton.cdiv(SIZE, block),)](x, total, mean, SIZE, FINISH=not right, BLOCK=block)
    return total / SIZE if right else mean, x.sum().view(1) / SIZE


@triton.jit
def split_k_kernel(
    a_ptr, b_ptr, c_ptr, K, stride_a, SPLIT: tl.constexpr, ATOMIC: tl.constexpr, B: tl.constexpr
):
    part = tl.program_id(0)
    rows, inner = tl.arange(0, B), tl.arange(0, B)
    product = tl.zeros((B, B), dtype=tl.float32)
    for k in range(part * B, K, SPLIT * B):
        a = tl.load(a_ptr + rows[:, None] * stride_a + k + inner[None, :])
        b = tl.load(b_ptr + (k + inner[:, None]) * B + rows[None, :])
        product = tl.dot(a, b, product)
    places = c_ptr + rows[:, None] * B + rows[None, :]
    if ATOMIC:
        tl.atomic_add(places, product)
    else:
        tl.store(places, tl.load(places) + product)


@pair("grid", "tl.store(places, tl.load(places) + product)")
def split_k_without_a_lock(right):
    """Split-K products: the parts of K are added to the result without a lock."""
    a, b, c = numbers(16, 64), numbers(64, 16), zeros(16, 16)
    split_k_kernel[(2,)](a, b, c, 64, a.stride(0), SPLIT=2, ATOMIC=right, B=16)
    return c, a @ b


@triton.jit
def transpose_kernel(x_ptr, y_ptr, N, B: tl.constexpr):
    rows = tl.program_id(0) * B + tl.arange(0, B)[:, None]
    columns = tl.program_id(1) * B + tl.arange(0, B)[None, :]
    tile = tl.load(x_ptr + rows * N + columns)
    tl.store(y_ptr + columns * N + rows, tile)


@pair("grid", "tile")
def transpose_in_place(right):
    """Transposes: a program stores its tile where another's has not been read."""
    x = numbers(64, 64)
    expected = x.t().clone()
    y = empty(64, 64) if right else x
    transpose_kernel[(4, 4)](x, y, 64, B=16)
    return y, expected


@triton.jit
def weight_gradient_kernel(dy_ptr, x_ptr, dw_ptr, M, N, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    pid, columns = tl.program_id(0), tl.arange(0, BLOCK)
    mask = columns < N
    place = dw_ptr + (pid % GROUP) * N + columns
    for row in range(pid, M, tl.num_programs(0)):
        dy = tl.load(dy_ptr + row * N + columns, mask=mask, other=0.0)
        x = tl.load(x_ptr + row * N + columns, mask=mask, other=0.0)
        tl.store(place, tl.load(place, mask=mask) + dy * x, mask=mask)


@pair("grid", "tl.store(place, tl.load(place, mask=mask) + dy * x")
def weight_gradient_in_fewer_groups(right):
    """Layer norm's backward: programs add to partial sums, of which there are fewer than
    programs."""
    dy, x, dw = numbers(12, 100), numbers(12, 100), zeros(4, 100)
    weight_gradient_kernel[(4,)](dy, x, dw, 12, 100, GROUP=4 if right else 2, BLOCK=128)
    return dw.sum(0), (dy * x).sum(0)


@triton.jit
def tiles_kernel(x_ptr, y_ptr, N, AXIS: tl.constexpr, B: tl.constexpr):
    rows = tl.program_id(0) * B + tl.arange(0, B)[:, None]
    columns = tl.program_id(AXIS) * B + tl.arange(0, B)[None, :]
    tl.store(y_ptr + rows * N + columns, tl.load(x_ptr + rows * N + columns))


@pair("grid", "tl.store(y_ptr + rows * N + columns")
def one_axis_taken_twice(right):
    """Tiled kernels: both coordinates come from one axis of the grid, so programs along the other
    write the same tile."""
    x, y = numbers(32, 32), zeros(32, 32)
    tiles_kernel[(2, 2)](x, y, 32, AXIS=1 if right else 0, B=16)
    return y, x
