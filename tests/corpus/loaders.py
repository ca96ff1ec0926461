"""Loaders and prefetchers"""

import torch
from torch.openreg import Event, Stream

from ._base import bug, full, here, pinned


@bug
def batch_before_its_copy(right):
    """Prefetchers: `next()` hands out a batch whose copy runs on a stream of its own."""
    copies = Stream()
    with copies:
        batch = pinned(1).to("openreg", non_blocking=True)
    if right:
        here().wait_stream(copies)
    batch.record_stream(here())
    return batch * 2


@bug
def batch_without_record_stream(right):
    """Prefetchers: a batch of the copy stream's memory is dropped while the model still reads it,
    and the next batch is copied over it."""
    copies, found = Stream(), []
    hosts = [pinned(i) for i in range(3)]
    for host in hosts:
        with copies:
            batch = host.to("openreg", non_blocking=True)
        here().wait_stream(copies)
        found.append(batch + 1)
        if right:
            batch.record_stream(here())
        del batch
    return found


@bug
def slot_still_read(right):
    """DALI-like loaders: of two device buffers the older is filled again while a kernel reads it,
    as the loader's stream waits for nobody."""
    copies = Stream()
    slots, found = [full(0), full(0)], []
    copies.wait_stream(here())
    hosts = [pinned(i) for i in range(4)]
    for i, host in enumerate(hosts):
        with copies:
            slots[i % 2].copy_(host, non_blocking=True)
        here().wait_stream(copies)
        found.append(slots[i % 2] * 2)
        if right:
            copies.wait_stream(here())
    return found


@bug
def staging_refilled(right):
    """Loaders with a pinned staging buffer: it is filled with the next batch while the copy of the
    last one is queued."""
    staging, batches = pinned(0), []
    for i in range(3):
        staging.fill_(i)
        batches.append(staging.to("openreg", non_blocking=True))
        if right:
            here().synchronize()
    return batches


@bug
def event_of_an_older_round(right):
    """Loaders with a ring of pinned buffers: before a slot is filled, the event of the round before
    its last copy is waited for."""
    ring, events, batches = [pinned(0), pinned(0)], [], []
    for i in range(4):
        older = i - 2 if right else i - 4
        if older >= 0:
            events[older].synchronize()
        ring[i % 2].fill_(i)
        batches.append(ring[i % 2].to("openreg", non_blocking=True))
        events.append(here().record_event())
    return batches


@bug
def labels_on_another_stream(right):
    """Loaders with one stream for images and one for labels: the batch is ready when the images
    are."""
    images, labels = Stream(), Stream()
    with images:
        x = pinned(3).to("openreg", non_blocking=True)
    with labels:
        y = pinned(2).to("openreg", non_blocking=True)
    here().wait_stream(images)
    if right:
        here().wait_stream(labels)
    for tensor in (x, y):
        tensor.record_stream(here())
    return (x - y).square()


@bug
def augmented_after_the_event(right):
    """DALI-like pipelines: a stage that was added later works in place behind the "ready" event."""
    stage = Stream()
    with stage:
        batch = pinned(4).to("openreg", non_blocking=True)
        ready = None if right else stage.record_event()
        batch.sub_(1)
        ready = ready or stage.record_event()
    here().wait_event(ready)
    batch.record_stream(here())
    return batch * 2


@bug
def constants_made_elsewhere(right):
    """Loaders that normalise on their stream: mean and deviation are made at first use, on whatever
    stream was current then."""
    stage = Stream()
    mean = full(1) * 2
    if right:
        stage.wait_stream(here())
    with stage:
        batch = pinned(4).to("openreg", non_blocking=True) - mean
    mean.record_stream(stage)
    here().wait_stream(stage)
    batch.record_stream(here())
    return batch + 0


@bug
def crops_from_the_device(right):
    """Augmentation with random numbers of the device: offsets are fetched without blocking and used
    as a Python slice."""
    offset = (full(1, 1) * 8).int()
    fetched = torch.zeros(1, dtype=torch.int32).pin_memory()
    fetched.copy_(offset, non_blocking=True)
    if right:
        here().synchronize()
    begin = fetched[0].item()
    return torch.arange(64.0)[begin : begin + 8]


@bug
def permutation_of_the_next_epoch(right):
    """Datasets in device memory: the permutation is shuffled in place while a gather of the last
    epoch still reads it on the loader's stream."""
    data, order = torch.arange(64.0, device="openreg"), torch.arange(64, device="openreg")
    loader = Stream()
    loader.wait_stream(here())
    with loader:
        batch = data[order]
    if right:
        here().wait_stream(loader)
    order.copy_(63 - order)
    here().wait_stream(loader)
    batch.record_stream(here())
    return batch + order


@bug
def event_not_recorded_yet(right):
    """Pipelines of stages: the consumer waits for the batch's event before the producer has
    recorded it, which is no wait at all."""
    stage, ready, batch = Stream(), Event(), full(0)
    stage.wait_stream(here())
    if not right:
        here().wait_event(ready)
    with stage:
        batch.copy_(pinned(5), non_blocking=True)
        ready.record()
    if right:
        here().wait_event(ready)
    return batch * 2


@bug
def pool_takes_back_too_early(right):
    """Loaders with a pool of pinned buffers: a buffer goes back to the pool when its copy is
    queued, and another sample is decoded into it."""
    pool, batches = [pinned(0)], []
    for sample in range(2):
        buffer = pool.pop()
        buffer.copy_(torch.full((64,), float(sample)))
        batches.append(buffer.to("openreg", non_blocking=True))
        if right:
            here().record_event().synchronize()
        pool.append(buffer)
    return batches


@bug
def dropped_last_batch(right):
    """Prefetchers: at the end of an epoch the prefetched batch is thrown away, and the new epoch's
    copy goes into the same tensor on another stream."""
    old, new, batch = Stream(), Stream(), full(0)
    for stream in (old, new):
        stream.wait_stream(here())
    with old:
        batch.copy_(pinned(1), non_blocking=True)
    if right:
        new.wait_stream(old)
    with new:
        batch.copy_(pinned(2), non_blocking=True)
    here().wait_stream(new)
    result = batch * 1
    here().wait_stream(old)
    return result
