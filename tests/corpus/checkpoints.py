"""Checkpointing"""

import torch
from torch.openreg import Stream

from ._base import bug, full, here, pinned


@bug
def step_during_the_snapshot(right):
    """Asynchronous checkpoints: the optimizer steps while the snapshot's copies are queued on a
    stream of their own."""
    save, weight, host = Stream(), full(1), pinned(0)
    save.wait_stream(here())
    with save:
        host.copy_(weight, non_blocking=True)
    if right:
        here().wait_stream(save)
    weight.sub_(0.5)
    save.synchronize()
    return host + 0


@bug
def snapshot_before_the_step(right):
    """Asynchronous checkpoints: the snapshot's stream does not wait for the step that was
    queued."""
    save, weight, host = Stream(), full(1), pinned(0)
    save.wait_stream(here())
    weight.sub_(0.5)
    if right:
        save.wait_stream(here())
    with save:
        host.copy_(weight, non_blocking=True)
    save.synchronize()
    here().synchronize()
    return host + 0


@bug
def serialised_before_the_copies(right):
    """Asynchronous checkpoints: the state dict of `non_blocking` copies is serialised without a
    synchronisation."""
    state = {"a": full(1) * 2, "b": full(2) * 2}
    copies = {key: value.to("cpu", non_blocking=True) for key, value in state.items()}
    if right:
        torch.openreg.synchronize()
    return {key: value.clone() for key, value in copies.items()}


@bug
def staging_used_for_two_checkpoints(right):
    """Checkpoints with cached staging memory: the second snapshot comes into it while the host
    writes the first to the disk."""
    staging, weight = pinned(0), full(1)
    staging.copy_(weight)
    weight.add_(1)
    if not right:
        staging.copy_(weight, non_blocking=True)
    written = staging.clone()
    if right:
        staging.copy_(weight, non_blocking=True)
    here().synchronize()
    return written


@bug
def next_file_into_the_buffer(right):
    """Fast loaders of weights: the next shard is read from its file into the pinned buffer that the
    last one is being copied from."""
    buffer, weights = pinned(0), [full(0), full(0)]
    for shard, weight in enumerate(weights):
        torch.full((64,), shard + 1.0, out=buffer)
        weight.copy_(buffer, non_blocking=True)
        if right:
            here().synchronize()
    return weights


@bug
def averages_swapped_in(right):
    """Averaged weights (EMA): they are swapped in for a checkpoint and out again while its copies
    are queued."""
    save, host = Stream(), pinned(0)
    weight, average = full(1), full(9)
    weight.data, average.data = average.data, weight.data
    save.wait_stream(here())
    with save:
        host.copy_(weight, non_blocking=True)
    if right:
        here().wait_stream(save)
    weight.lerp_(average, 0.5)  # training goes on with what was swapped
    save.synchronize()
    return host + 0


@bug
def shards_on_several_streams(right):
    """Loading with resharding: slices of a weight come on several streams, and the last one alone
    is waited for."""
    weight, streams = full(0), [Stream() for _ in range(3)]
    for i, stream in enumerate(streams):
        stream.wait_stream(here())
        with stream:
            weight[i * 20 : i * 20 + 20].copy_(pinned(i + 1, 20), non_blocking=True)
    for stream in streams if right else streams[-1:]:
        here().wait_stream(stream)
    result = weight * 2
    for stream in streams:
        here().wait_stream(stream)
    return result


@bug
def gradients_cleared_during_a_dump(right):
    """Debug dumps: gradients are set to zero while a stream still copies them out."""
    dump, gradient, host = Stream(), full(6), pinned(0)
    dump.wait_stream(here())
    with dump:
        host.copy_(gradient, non_blocking=True)
    done = dump.record_event()
    if right:
        here().wait_event(done)
    gradient.zero_()
    done.synchronize()
    return host + 0


@bug
def checksum_beside_the_copy(right):
    """Checkpoints with checksums: the sum is taken on the device, on a stream that does not wait
    for the weights that are being loaded."""
    load, check, weight = Stream(), Stream(), full(0)
    load.wait_stream(here())
    check.wait_stream(here())
    with load:
        weight.copy_(pinned(1), non_blocking=True)
    if right:
        check.wait_stream(load)
    with check:
        checksum = weight.sum()
    for stream in (load, check):
        here().wait_stream(stream)
    checksum.record_stream(here())
    return checksum + 0


@bug
def dropped_with_the_state_dict(right):
    """Asynchronous checkpoints: the copy that was made for the snapshot is dropped while its way
    out is queued, and training gets the memory."""
    save, host, weight = Stream(), pinned(0), full(1)
    snapshot = weight.clone()
    save.wait_stream(here())
    with save:
        host.copy_(snapshot, non_blocking=True)
    if right:
        snapshot.record_stream(save)
    del snapshot
    gradient = weight * 7
    save.synchronize()
    return host + 0, gradient


@bug
def buffers_left_out_of_the_wait(right):
    """Asynchronous checkpoints: the event is recorded after the parameters' copies, and the
    buffers' come later."""
    state = [full(1), full(2)]
    hosts = [pinned(0), pinned(0)]
    done = None
    for value, host in zip(state, hosts, strict=True):
        host.copy_(value, non_blocking=True)
        done = here().record_event() if right or done is None else done
    done.synchronize()
    return [host.clone() for host in hosts]
