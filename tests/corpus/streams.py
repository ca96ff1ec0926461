"""Side streams, hooks and threads"""

import threading

import torch
from torch.openreg import Event, Stream

from ._base import bug, full, here


@bug
def side_work_not_ordered(right):
    """Overlapped heads: the side stream starts without waiting for what it reads."""
    side, x = Stream(), full(1)
    x.mul_(3)
    if right:
        side.wait_stream(here())
    with side:
        y = x + 1
    here().wait_stream(side)
    y.record_stream(here())
    return y * 1


@bug
def wait_the_wrong_way_round(right):
    """Overlapped heads: the side stream waits for the main one at the join, and not the other
    way."""
    side, x, y = Stream(), full(2), full(0)
    side.wait_stream(here())
    with side:
        torch.mul(x, 3, out=y)
    if right:
        here().wait_stream(side)
    else:
        side.wait_stream(here())
    return y + 1


@bug
def wait_before_the_work(right):
    """Pipelines of stages: the wait is called before the producer's work is queued, when there is
    nothing to wait for."""
    side, y = Stream(), full(0)
    side.wait_stream(here())
    if not right:
        here().wait_stream(side)
    with side:
        y.add_(5)
    if right:
        here().wait_stream(side)
    return y * 2


@bug
def default_stream_taken_for_a_barrier(right):
    """Code that relies on CUDA's legacy default stream: work of the default stream is taken to come
    after that of all streams."""
    one, other, x = Stream(), Stream(), full(0)
    one.wait_stream(here())
    with one:
        x.add_(1)
    if right:
        here().wait_stream(one)
    with torch.openreg.default_stream():
        y = x * 2
    other.wait_stream(here())
    other.wait_stream(one)
    return y


@bug
def experts_joined_by_the_last(right):
    """Experts in turn over a few streams: at the end the last expert's stream alone is waited
    for."""
    streams, out = [Stream() for _ in range(3)], torch.zeros(6, 8, device="openreg")
    for stream in streams:
        stream.wait_stream(here())
    for i in range(6):
        with streams[i % 3]:
            out[i].fill_(i)
    for stream in streams if right else streams[-1:]:
        here().wait_stream(stream)
    result = out.sum(0)
    for stream in streams:
        here().wait_stream(stream)
    return result


@bug
def hook_on_a_side_stream(right):
    """Gradient hooks that compress: a hook reads the gradient on a stream that does not wait for
    backward's."""
    side, weight, kept = Stream(), full(2).requires_grad_(), []

    def compress(parameter):
        if right:
            side.wait_stream(here())
        with side:
            kept.append(parameter.grad.half())

    weight.register_post_accumulate_grad_hook(compress)
    (weight * weight).sum().backward()
    here().wait_stream(side)
    kept[0].record_stream(here())
    return kept[0] + 0


@bug
def average_during_the_step(right):
    """Averaged weights (EMA) on a stream: the optimizer's next step writes the weights that are
    being averaged."""
    side, weight, average = Stream(), full(1), full(0)
    side.wait_stream(here())
    for _ in range(2):
        with side:
            average.lerp_(weight, 0.5)
        if right:
            here().wait_stream(side)
        weight.add_(1)
        side.wait_stream(here())
    here().wait_stream(side)
    return average


@bug
def metric_accumulated_beside(right):
    """Metric libraries: a sum is kept on a stream, and set to zero by the main one for the next
    epoch."""
    side, total = Stream(), full(0)
    side.wait_stream(here())
    with side:
        total.add_(3)
    if right:
        here().wait_stream(side)
    total.zero_()
    here().wait_stream(side)
    return total


@bug
def static_input_of_a_replay(right):
    """Graph-like replays: the static input is overwritten for the next replay while this one runs
    on its stream."""
    replay, static, out = Stream(), full(1), []
    for value in (2, 3):
        if right:
            here().wait_stream(replay)
        static.fill_(value)
        replay.wait_stream(here())
        with replay:
            out.append(static * 10)
    here().wait_stream(replay)
    for tensor in out:
        tensor.record_stream(here())
    return [tensor + 0 for tensor in out]


@bug
def worker_on_the_default_stream(right):
    """Thread pools: the current stream is each thread's own, so that a worker computes on the
    default stream whatever its maker had set."""
    side, x, found = Stream(), full(1), []
    side.wait_stream(here())
    with side:
        x.add_(4)
        stream = here() if right else None
        worker = threading.Thread(target=lambda: found.append(scale(x, stream)))
        worker.start()
        worker.join()
    here().wait_stream(side)
    found[0].record_stream(here())
    return found[0] * 1


def scale(x, stream):
    with torch.openreg.stream(stream):
        return x * 2


@bug
def result_used_outside_the_block(right):
    """Models with a `with stream` block: what is computed inside is used behind it."""
    side, x = Stream(), full(2)
    side.wait_stream(here())
    with side:
        y = x.square()
    if right:
        here().wait_stream(side)
    y.record_stream(here())
    return x + y


@bug
def clipped_before_the_norm(right):
    """Gradient clipping with the norm on a stream: gradients are scaled while the norm is taken."""
    side, gradient = Stream(), full(2)
    side.wait_stream(here())
    with side:
        norm = gradient.norm()
    if right:
        here().wait_stream(side)
    gradient.mul_(0.5)
    here().wait_stream(side)
    norm.record_stream(here())
    return norm + 0


@bug
def event_shared_by_stages(right):
    """Pipelines with one event for a stage and all micro-batches: it is recorded again before the
    consumer of the first waits, on a stream that is not behind the first."""
    streams, events = [Stream(), Stream()], [Event(), Event()]
    x = torch.zeros(2, 32, device="openreg")
    for row, stream, event in zip(x, streams, events if right else [events[0]] * 2, strict=True):
        stream.wait_stream(here())
        with stream:
            row.add_(1)
            event.record()
    for event in events:
        here().wait_event(event)
    result = x.sum()
    for stream in streams:
        here().wait_stream(stream)
    return result


@bug
def columns_that_overlap(right):
    """Column-wise split work: two streams write parts of one output, which share a column by a
    wrong bound."""
    side, out = Stream(), torch.zeros(8, 8, device="openreg")
    side.wait_stream(here())
    with side:
        out[:, : 4 if right else 5].add_(1)
    out[:, 4:].mul_(2).add_(3)
    here().wait_stream(side)
    return out


@bug
def running_statistics(right):
    """Two branches with one batch norm on two streams: both update its running statistics."""
    norm, side = torch.nn.BatchNorm1d(4, affine=False).to("openreg"), Stream()
    x = torch.arange(32.0, device="openreg").reshape(8, 4)
    side.wait_stream(here())
    with side:
        norm(x)
    if right:
        here().wait_stream(side)
    norm(x * 3)
    here().wait_stream(side)
    return norm.running_mean * 1


@bug
def backward_on_a_side_stream(right):
    """Training steps on a stream: gradients are ready for the stream that called `backward()`, and
    read on another."""
    side, weight = Stream(), full(3).requires_grad_()
    side.wait_stream(here())
    with side:
        (weight * weight).sum().backward()
    if right:
        here().wait_stream(side)
    weight.grad.record_stream(here())
    return weight.grad * 1


@bug
def zero_grad_too_early(right):
    """Optimizers on a stream: gradients are set to zero in place on the main stream while the step
    reads them."""
    side, weight, gradient = Stream(), full(1), full(1)
    side.wait_stream(here())
    with side:
        weight.sub_(gradient)
    if right:
        here().wait_stream(side)
    gradient.zero_()
    here().wait_stream(side)
    return weight * 1


@bug
def lazy_constant(right):
    """Modules with a cached mask or position table: it is made on the stream of the first call, and
    taken from the cache on another."""
    cached, found = {}, []
    for stream in (Stream(), Stream()):
        with stream:
            if "table" not in cached:
                cached["table"] = full(1).cumsum(0)
                cached["made"] = stream.record_event()
            elif right:
                stream.wait_event(cached["made"])
            cached["table"].record_stream(stream)
            found.append((cached["table"] * 2, stream))
    for tensor, stream in found:
        here().wait_stream(stream)
        tensor.record_stream(here())
    return [tensor + 0 for tensor, _ in found]


@bug
def pair_of_events_exchanged(right):
    """Double-buffered stages: the consumer of buffer 0 waits for the event of buffer 1 and so
    on."""
    makers, buffers = [Stream(), Stream()], [full(0), full(0)]
    events = []
    for maker, buffer in zip(makers, buffers, strict=True):
        maker.wait_stream(here())
        with maker:
            buffer.add_(2)
            events.append(maker.record_event())
    users = [Stream(), Stream()]
    found = []
    for i, user in enumerate(users):
        user.wait_event(events[i if right else 1 - i])
        with user:
            found.append(buffers[i] * 3)
        here().wait_stream(user)
        found[-1].record_stream(here())
    for maker in makers:
        here().wait_stream(maker)
    return [tensor + 0 for tensor in found]


@bug
def counter_updated_from_two_streams(right):
    """Step counters in device memory: two streams read, add and write."""
    streams, count = [Stream(), Stream()], full(0, 1)
    for stream in streams:
        stream.wait_stream(here())
    for i, stream in enumerate(streams):
        if right and i:
            stream.wait_stream(streams[0])
        with stream:
            raised = count + 1
            count.copy_(raised)
    for stream in streams:
        here().wait_stream(stream)
    return count
