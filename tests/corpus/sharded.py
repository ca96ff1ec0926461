"""Sharded training and collectives

Both ranks are in this process, one for each device: a group of the backend for each, in one store.
"""

import datetime
import functools
import threading

import torch
import torch.distributed as dist
from torch.openreg import Stream

from torch_openreg.openreg import distributed

from ._base import bug, full, here


@functools.cache
def pair(name="data"):
    """The groups of rank 0, on openreg:0, and of rank 1, on openreg:1."""
    store, groups = dist.HashStore(), [None, None]

    def connect(rank):
        options = dist.distributed_c10d._DistributedBackendOptions()
        options.store, options.group_rank, options.group_size = store, rank, 2
        options.timeout = datetime.timedelta(seconds=60)
        options.global_ranks_in_group, options.group_id = [0, 1], name
        groups[rank] = distributed._create(options, None)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return groups


def on_both(value, size=64):
    return [full(value + rank, size, f"openreg:{rank}") for rank in range(2)]


def all_reduce(tensors, name="data"):
    return [g.allreduce([t]) for g, t in zip(pair(name), tensors, strict=True)]


def all_gather(outputs, inputs):
    return [g._allgather_base(o, i) for g, o, i in zip(pair(), outputs, inputs, strict=True)]


def wait(works):
    for work in works:
        work.wait()


def finish(works, result):
    """The wrong forms end here: what nobody waited for is over before the next bug."""
    copies = [tensor.clone() for tensor in result]
    wait(works)
    torch.openreg.synchronize(0), torch.openreg.synchronize(1)
    return copies


@bug(outside="a peer")
def step_before_the_all_reduce(right):
    """DDP-like training: gradients are reduced with `async_op`, and the optimizer steps without
    waiting."""
    gradients, weights = on_both(1), on_both(0)
    works = all_reduce(gradients)
    if right:
        wait(works)
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.sub_(gradient)
    return finish(works, weights)


@bug(outside="a peer")
def divided_during_the_all_reduce(right):
    """DDP-like training: the gradient is divided by the number of ranks in place, behind the call
    and before its end."""
    gradients = on_both(1)
    works = all_reduce(gradients)
    if right:
        wait(works)
    for gradient in gradients:
        gradient.div_(2)
    return finish(works, gradients)


@bug(outside="a peer")
def gathered_weights_not_waited_for(right):
    """FSDP-like training: the layer computes with gathered weights when the gather was called."""
    shards, outputs = on_both(1), [full(0, 128, f"openreg:{i}") for i in range(2)]
    works = all_gather(outputs, shards)
    if right:
        wait(works)
    return finish(works, [output * 2 for output in outputs])


@bug(outside="a peer")
def only_the_last_handle(right):
    """Training with several groups (data and tensor parallel): in a loop the handle is kept in one
    variable, so that the last group's collective alone is waited for."""
    chunks = {"data": on_both(1), "tensor": on_both(5)}
    works = [all_reduce(chunk, name) for name, chunk in chunks.items()]
    for work in works if right else works[1:]:
        wait(work)
    result = [tensor * 1 for tensor in chunks["data"]]
    return finish(works[0], result)


@bug(outside="a peer")
def waited_on_the_communication_stream(right):
    """Communication streams (Megatron, DeepSpeed): `work.wait()` inside `with stream` orders that
    stream alone."""
    side, gradients = Stream(), on_both(1)
    works = all_reduce(gradients)
    works[1].wait()
    with side:
        works[0].wait()
    if right:
        here().wait_stream(side)
    return finish(works, [gradients[0] * 1])


@bug(outside="a peer")
def bucket_flattened_on_another_stream(right):
    """Bucketed reduction (DeepSpeed): the bucket is filled on the computing stream, and reduced on
    one that does not wait for it."""
    side, buckets = Stream(), on_both(0)
    side.wait_stream(here())
    buckets[0].add_(7)
    if right:
        side.wait_stream(here())
    with side:
        works = all_reduce(buckets)
        works[0].wait()
    works[1].wait()
    here().wait_stream(side)
    return finish(works, buckets)


@bug(outside="a peer")
def bucket_filled_again(right):
    """Bucketed reduction (ZeRO): the next gradients go into the bucket whose reduction is under
    way."""
    buckets, sums = on_both(1), on_both(0)
    works = all_reduce(buckets)
    if right:
        wait(works)
        for total, bucket in zip(sums, buckets, strict=True):
            total.copy_(bucket)
    for bucket in buckets:
        bucket.fill_(9)
    wait(works)
    return finish(works, buckets)


@bug(outside="a peer")
def norm_during_the_last_reduction(right):
    """Gradient clipping: the norm is taken of all buckets while the last one's reduction is under
    way."""
    buckets = on_both(3)
    works = all_reduce(buckets)
    if right:
        wait(works)
    return finish(works, [bucket.norm() for bucket in buckets])


@bug(outside="a peer")
def shard_stepped_during_the_gather(right):
    """ZeRO-like optimizers: the shard is stepped for the next iteration while the gather of this
    one's still reads it."""
    shards, outputs = on_both(1), [full(0, 128, f"openreg:{i}") for i in range(2)]
    works = all_gather(outputs, shards)
    if right:
        wait(works)
    for shard in shards:
        shard.sub_(0.5)
    wait(works)
    return finish(works, outputs)


@bug(outside="a peer")
def received_without_a_wait(right):
    """Pipeline parallelism: `irecv` gives a handle, and the stage computes with the buffer at
    once."""
    value, buffer = on_both(4)
    first, second = pair()
    works = [first.send([value], 1, 0), second.recv([buffer], 0, 0)]
    if right:
        wait(works)
    return finish(works, [buffer * 2])


@bug(outside="a peer")
def sent_and_overwritten(right):
    """Pipeline parallelism: the next micro-batch is computed in the buffer of an `isend` that is
    under way."""
    value, buffer = on_both(4)
    first, second = pair()
    works = [first.send([value], 1, 0), second.recv([buffer], 0, 0)]
    if right:
        wait(works)
    value.fill_(0)
    wait(works)
    return finish(works, [buffer])


@bug(outside="a peer")
def bias_added_beside_the_reduction(right):
    """Tensor parallelism with overlap: the bias is added in place to the tensor that is being
    reduced."""
    partial, bias = on_both(1), on_both(10)
    works = all_reduce(partial)
    if right:
        wait(works)
    for part, added in zip(partial, bias, strict=True):
        part.add_(added)
    return finish(works, partial)


@bug(outside="a peer")
def buffers_broadcast_during_the_forward(right):
    """DDP-like training: buffers are broadcast at the begin of a step without a wait, and the
    forward reads them."""
    buffers = on_both(1)
    works = [group.broadcast([tensor]) for group, tensor in zip(pair(), buffers, strict=True)]
    if right:
        wait(works)
    return finish(works, [buffer * 3 for buffer in buffers])


@bug(outside="a peer")
def splits_read_on_the_host(right):
    """torchrec-like exchanges: the sizes of the exchange come by a collective, and the host reads
    them from a pinned copy without waiting for it."""
    sizes = on_both(2, 1)
    works = all_reduce(sizes)
    wait(works)
    host = torch.zeros(1, pin_memory=True)
    host.copy_(sizes[0], non_blocking=True)
    if right:
        here().synchronize()
    rows = int(host[0])
    return finish(works, [torch.ones(rows)])


@bug(outside="a peer")
def result_used_on_a_third_stream(right):
    """FSDP-like prefetch: the computing stream has waited for the collective, and a side stream
    that casts the result has waited for nothing."""
    side, weights = Stream(), on_both(1)
    side.wait_stream(here())
    works = all_reduce(weights)
    wait(works)
    if right:
        side.wait_stream(here())
    with side:
        cast = weights[0].half()
    here().wait_stream(side)
    cast.record_stream(here())
    return finish(works, [cast])
