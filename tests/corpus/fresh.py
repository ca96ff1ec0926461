"""Memory that nothing has written"""

import torch
from torch.openreg import Stream

from ._base import bug, full, here, pinned


@bug
def accumulator_of_empty(right):
    """Metric libraries: a sum is accumulated into `torch.empty`."""
    total = torch.zeros(64, device="openreg") if right else torch.empty(64, device="openreg")
    for _ in range(3):
        total += full(1)
    return total


@bug
def padding_of_a_bucket(right):
    """Bucketed reduction: the bucket is rounded up, its padding is never written, and the norm is
    of the whole bucket."""
    bucket = torch.empty(64, device="openreg")
    bucket[:50].copy_(full(2, 50))
    if right:
        bucket[50:].zero_()
    return bucket.norm()


@bug
def attention_over_unwritten_slots(right):
    """KV caches: attention multiplies slots behind the sequence's end by zero, which is NaN if they
    hold NaN."""
    values = torch.empty(8, 16, device="openreg")
    values[:5].copy_(torch.ones(5, 16, device="openreg"))
    weights = torch.zeros(1, 8, device="openreg")
    weights[:, :5] = 0.2
    if right:
        return weights[:, :5] @ values[:5]
    return weights @ values


@bug
def momentum_of_empty_like(right):
    """Optimizers: a state is made by `empty_like` and multiplied by a decay of zero in the first
    step."""
    gradient = full(3)
    momentum = (torch.zeros_like if right else torch.empty_like)(gradient)
    return momentum.mul_(0.0).add_(gradient)


@bug
def rows_that_no_token_chose(right):
    """Experts: the output of `empty` is filled by the experts that were chosen; rows of dropped
    tokens stay as they are."""
    out = torch.zeros(4, 16, device="openreg") if right else torch.empty(4, 16, device="openreg")
    for row in (0, 1, 3):
        out[row].fill_(row)
    return out.sum(0)


@bug
def ragged_batch_in_an_empty_tensor(right):
    """Loaders that collate into `empty`: the tail of short samples is never written."""
    batch = torch.empty(2, 32, device="openreg")
    for row, length in zip(batch, (32, 20), strict=True):
        row[:length].copy_(pinned(1, length), non_blocking=True)
        if right:
            row[length:].zero_()
    here().synchronize()
    return batch.mean(1)


@bug
def read_on_a_stream_before_the_fill(right):
    """Workspaces: `empty` on the main stream, filled on a side stream, read by a third."""
    fill, read, x = Stream(), Stream(), torch.empty(64, device="openreg")
    for stream in (fill, read):
        stream.wait_stream(here())
    with fill:
        x.fill_(2)
    if right:
        read.wait_stream(fill)
    with read:
        y = x * 3
    for stream in (fill, read):
        here().wait_stream(stream)
    y.record_stream(here())
    return y + 0
