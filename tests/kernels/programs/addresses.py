"""Addresses that come from data"""

import torch
import triton
import triton.language as tl
from torch.openreg import Stream

from ._pairs import DEVICE, empty, here, integers, numbers, pair, zeros

COLUMNS = 40


@triton.jit
def scatter_kernel(x_ptr, index_ptr, y_ptr, columns, ATOMIC: tl.constexpr, B: tl.constexpr):
    row, offsets = tl.program_id(0), tl.arange(0, B)
    mask = offsets < columns
    place = tl.load(index_ptr + row)
    x = tl.load(x_ptr + row * columns + offsets, mask=mask)
    if ATOMIC:
        tl.atomic_add(y_ptr + place * columns + offsets, x, mask=mask)
    else:
        tl.store(y_ptr + place * columns + offsets, x, mask=mask)


def scatter(x, index, y, atomic=False):
    scatter_kernel[(len(index),)](x, index, y, COLUMNS, ATOMIC=atomic, B=64)


@pair("grid", "tl.store(y_ptr + place * columns + offsets, x")
def scatter_to_the_same_row(right):
    """Token routing: two tokens go to one slot, and the rows are stored."""
    x, y = numbers(5, COLUMNS), zeros(8, COLUMNS)
    index = integers([7, 2, 5, 0, 1 if right else 2])
    scatter(x, index, y)
    return y, zeros(8, COLUMNS).index_copy_(0, index.long(), x)


@pair("grid", "tl.store(y_ptr + place * columns + offsets, x")
def embedding_gradient_without_atomics(right):
    """Embeddings' backward: a token that occurs twice needs an atomic addition."""
    x, y = numbers(5, COLUMNS), zeros(8, COLUMNS)
    index = integers([3, 1, 3, 0, 2])
    scatter(x, index, y, atomic=right)
    return y, zeros(8, COLUMNS).index_add_(0, index.long(), x)


@triton.jit
def gather_kernel(table_ptr, index_ptr, y_ptr, columns, B: tl.constexpr):
    row, offsets = tl.program_id(0), tl.arange(0, B)
    mask = offsets < columns
    source = tl.load(index_ptr + row)
    x = tl.load(table_ptr + source * columns + offsets, mask=mask)
    tl.store(y_ptr + row * columns + offsets, x, mask=mask)


@pair("bounds", "x = tl.load(table_ptr")
def token_past_the_vocabulary(right):
    """Embeddings: a token equals the vocabulary's size."""
    table, y = numbers(8, COLUMNS), empty(4, COLUMNS)
    index = integers([3, 7, 7 if right else 8, 0])
    gather_kernel[(4,)](table, index, y, COLUMNS, B=64)
    return y, table[index] if right else table[:4]


@pair("race", "gather_kernel[")
def rows_gathered_while_written(right):
    """Mixture of experts: rows are gathered by indices while a copy writes rows of the same
    table."""
    side, table, y = Stream(), numbers(8, COLUMNS), empty(4, COLUMNS)
    index = integers([0, 3, 1, 2] if right else [0, 3, 4, 2])
    expected = table[index]
    side.wait_stream(here())
    with side:
        table[4:].mul_(0)
    gather_kernel[(4,)](table, index, y, COLUMNS, B=64)
    here().wait_stream(side)
    return y, expected


@triton.jit
def cross_entropy_kernel(
    logits_ptr, label_ptr, loss_ptr, V, IGNORED: tl.constexpr, B: tl.constexpr
):
    row, columns = tl.program_id(0), tl.arange(0, B)
    label = tl.load(label_ptr + row)
    x = tl.load(logits_ptr + row * V + columns, mask=columns < V, other=-float("inf"))
    top = tl.max(x, axis=0)
    total = tl.log(tl.sum(tl.exp(x - top), axis=0)) + top
    if IGNORED:
        chosen = tl.load(logits_ptr + row * V + label, mask=label >= 0, other=0.0)
        tl.store(loss_ptr + row, tl.where(label >= 0, total - chosen, 0.0))
    else:
        chosen = tl.load(logits_ptr + row * V + label)
        tl.store(loss_ptr + row, total - chosen)


@pair("bounds", "chosen = tl.load(logits_ptr + row * V + label)")
def ignored_label(right):
    """Cross entropy: the label -100, which stands for none, is used as an address."""
    logits, loss = numbers(4, 50), empty(4)
    labels = integers([-100, 3, 49, 0], dtype=torch.int64)
    cross_entropy_kernel[(4,)](logits, labels, loss, 50, IGNORED=right, B=64)
    return loss, torch.nn.functional.cross_entropy(logits, labels, reduction="none")


@triton.jit
def sequence_mean_kernel(x_ptr, bounds_ptr, y_ptr, columns, T: tl.constexpr, B: tl.constexpr):
    sequence, offsets = tl.program_id(0), tl.arange(0, B)
    first, last = tl.load(bounds_ptr + sequence), tl.load(bounds_ptr + sequence + 1)
    total = tl.zeros((B,), dtype=tl.float32)
    for start in range(first, last, T):
        rows = start + tl.arange(0, T)
        mask = (rows[:, None] < last) & (offsets[None, :] < columns)
        x = tl.load(x_ptr + rows[:, None] * columns + offsets[None, :], mask=mask, other=0.0)
        total += tl.sum(x, axis=0)
    tl.store(y_ptr + sequence * columns + offsets, total / (last - first), mask=offsets < columns)


def sequence_means(lengths, size):
    """Of packed sequences; `size` is that of the tensor of bounds."""
    x, y = numbers(12, COLUMNS), empty(3, COLUMNS)
    bounds = integers([0, *torch.tensor(lengths).cumsum(0).tolist()])[:size]
    sequence_mean_kernel[(3,)](x, bounds, y, COLUMNS, T=4, B=64)
    return y, torch.stack([part.mean(0) for part in x.split([2, 3, 7])])


@pair("bounds", "x = tl.load(x_ptr + rows")
def sequence_past_the_end(right):
    """Packed sequences: the last bound is of the padded batch."""
    return sequence_means([2, 3, 7 if right else 9], 4)


@pair("bounds", "tl.load(bounds_ptr + sequence + 1)")
def bounds_without_the_last(right):
    """Packed sequences: the kernel needs one bound more than there are sequences."""
    x, y = numbers(12, COLUMNS), empty(3, COLUMNS)
    bounds = integers([0, 2, 5, 12])
    bounds = bounds if right else bounds[:3].clone()
    sequence_mean_kernel[(3,)](x, bounds, y, COLUMNS, T=4, B=64)
    return y, torch.stack([part.mean(0) for part in x.split([2, 3, 7])])


PAGE = 4


@triton.jit
def paged_kernel(
    q_ptr, k_ptr, pages_ptr, length_ptr, y_ptr, most, P: tl.constexpr, D: tl.constexpr
):
    sequence = tl.program_id(0)
    length = tl.load(length_ptr + sequence)
    q = tl.load(q_ptr + sequence * D + tl.arange(0, D))
    for start in range(0, length, P):
        page = tl.load(pages_ptr + sequence * most + start // P)
        slots = page * P + tl.arange(0, P)
        k = tl.load(k_ptr + slots[:, None] * D + tl.arange(0, D)[None, :])
        positions = start + tl.arange(0, P)
        scores = tl.sum(k * q[None, :], axis=1)
        tl.store(y_ptr + sequence * most * P + positions, scores, mask=positions < length)


def attend(pages, lengths, k):
    q, y = numbers(2, 16), zeros(2, 3 * PAGE)
    tables = integers(pages)
    paged_kernel[(2,)](q, k, tables, integers(lengths), y, 3, P=PAGE, D=16)
    keys = k.view(-1, PAGE, 16)[tables.clamp(0, 5)].view(2, 3 * PAGE, 16)
    used = torch.arange(3 * PAGE, device=DEVICE) < integers(lengths)[:, None]
    return y, (keys @ q[:, :, None])[..., 0] * used


@pair("bounds", "k = tl.load(k_ptr + slots")
def stale_page(right):
    """Paged attention: a page table names a page of a larger pool."""
    return attend([[0, 2, 4], [1, 3 if right else 6, 0]], [9, 7], numbers(6 * PAGE, 16))


@pair("bounds", "k = tl.load(k_ptr + slots")
def unused_page_read(right):
    """Paged attention: the length is one page too long, so the filler -1 is used as a page."""
    return attend([[0, 2, 4], [1, 3, -1]], [9, 7 if right else 9], numbers(6 * PAGE, 16))


@triton.jit
def append_kernel(x_ptr, slots_ptr, cache_ptr, D: tl.constexpr):
    token, offsets = tl.program_id(0), tl.arange(0, D)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        tl.store(cache_ptr + slot * D + offsets, tl.load(x_ptr + token * D + offsets))


@pair("grid", "tl.store(cache_ptr + slot * D + offsets")
def two_sequences_in_one_slot(right):
    """Paged attention: two sequences were given the same slot of the cache."""
    x, cache = numbers(4, 16), zeros(24, 16)
    slots = integers([5, -1, 9, 10 if right else 5], dtype=torch.int64)
    append_kernel[(4,)](x, slots, cache, D=16)
    expected = zeros(24, 16)
    used = slots >= 0
    expected[slots[used]] = x[used]
    return cache, expected


@triton.jit
def histogram_kernel(x_ptr, y_ptr, n, ATOMIC: tl.constexpr, B: tl.constexpr):
    offsets = tl.program_id(0) * B + tl.arange(0, B)
    mask = offsets < n
    bins = y_ptr + tl.load(x_ptr + offsets, mask=mask, other=0)
    if ATOMIC:
        tl.atomic_add(bins, 1, mask=mask)
    else:
        tl.store(bins, tl.load(bins, mask=mask) + 1, mask=mask)


@pair("grid", "tl.store(bins, tl.load(bins")
def histogram_without_atomics(right):
    """Expert counts: the bins are counted by a load and a store."""
    x, y = numbers(300, dtype=torch.int32), zeros(61, dtype=torch.int32)
    histogram_kernel[(3,)](x, y, 300, ATOMIC=right, B=128)
    return y, torch.bincount(x, minlength=61).int()
