"""What the host reads and writes"""

import torch
from torch.openreg import Event, Stream

from ._base import bug, full, here, pinned


@bug
def loss_for_the_log(right):
    """Trainers: the loss is copied to pinned memory without blocking and logged at once."""
    loss = (full(2) * 3).mean()
    logged = torch.zeros((), pin_memory=True)
    logged.copy_(loss, non_blocking=True)
    if right:
        here().synchronize()
    return logged + 0


@bug
def returned_by_to_cpu(right):
    """Metric libraries: `x.to("cpu", non_blocking=True)` is computed with before a
    synchronisation."""
    scores = (full(2) * 3).to("cpu", non_blocking=True)
    if right:
        torch.openreg.synchronize()
    return scores.mean()


@bug
def event_before_the_copy(right):
    """Asynchronous loggers: the event that the host waits for is recorded between the kernel and
    the copy."""
    value, host, done = full(2) * 3, pinned(0), Event()
    if not right:
        done.record()
    host.copy_(value, non_blocking=True)
    if right:
        done.record()
    done.synchronize()
    return host + 0


@bug
def wrong_stream_synchronised(right):
    """Loggers with a copy stream: the host synchronises the current stream, and not the one with
    the copy."""
    copies, host, value = Stream(), pinned(0), full(2)
    copies.wait_stream(here())
    with copies:
        host.copy_(value, non_blocking=True)
    (copies if right else here()).synchronize()
    result = host + 0
    here().wait_stream(copies)
    return result


@bug
def wrong_device_synchronised(right):
    """Programs of several devices: `synchronize()` without a device is of the current one."""
    host = pinned(0)
    host.copy_(full(2, device="openreg:1"), non_blocking=True)
    torch.openreg.synchronize(1 if right else 0)
    return host + 0


@bug
def event_of_the_last_step(right):
    """Asynchronous loggers with two events in turn: this step's values are read when last step's
    event is done."""
    host, events = pinned(0), []
    for step in range(2):
        host.copy_(full(step + 1), non_blocking=True)
        events.append(here().record_event())
        if step == 0:
            events[0].synchronize()
    events[1 if right else 0].synchronize()
    return host + 0


@bug
def overflow_flag(right):
    """Loss scalers: whether a gradient overflowed is fetched without blocking, and decides whether
    the optimizer steps."""
    gradient, weight = full(float("inf")), full(1)
    found = torch.zeros((), dtype=torch.bool).pin_memory()
    found.copy_(gradient.isinf().any(), non_blocking=True)
    if right:
        here().synchronize()
    if not found:
        weight.sub_(0.5)
    return weight


@bug
def learning_rate_in_pinned_memory(right):
    """Optimizers with a rate in pinned memory: the schedule writes the next rate while the copy of
    this one is queued."""
    rate, weight = torch.zeros((), pin_memory=True), full(0)
    for step in range(1, 3):
        rate.fill_(step)
        weight.add_(rate.to("openreg", non_blocking=True))
        if right:
            here().synchronize()
    return weight


@bug
def scalars_packed_in_one_buffer(right):
    """Trainers that log many scalars: each writes its element of a pinned buffer, and the event is
    of the first stream alone."""
    host, streams, values = pinned(0, 2), [Stream(), Stream()], full(3, 2)
    for i, stream in enumerate(streams):
        stream.wait_stream(here())
        with stream:
            host[i : i + 1].copy_(values[i : i + 1], non_blocking=True)
    for stream in streams if right else streams[:1]:
        stream.synchronize()
    result = host.sum()
    for stream in streams:
        here().wait_stream(stream)
    return result


@bug
def query_taken_for_a_wait(right):
    """Pollers: `event.query()` is called, and its answer is thrown away."""
    host = pinned(0)
    host.copy_(full(2) * 3, non_blocking=True)
    copied = here().record_event()
    if right:
        copied.synchronize()
    else:
        copied.query()
    return host + 0


@bug(luck="a query that says yes")
def limit_reached_after_a_few_polls(right):
    """Pollers: after a few polls the program goes on, as it has always been enough."""
    host = pinned(0)
    host.copy_(full(2) * 3, non_blocking=True)
    copied, polls = here().record_event(), 0
    while not copied.query():
        polls += 1
        if polls == 3 and not right:
            break
    return host + 0


@bug
def early_stop(right):
    """Training loops: the decision to stop is taken by a pinned flag of this step, and not of one
    that is known to be over."""
    flag, steps = torch.zeros(1, pin_memory=True), 0
    loss = full(4, 1)
    for _ in range(4):
        loss.sub_(1)
        flag.copy_((loss <= 1).float(), non_blocking=True)
        if right:
            here().record_event().synchronize()
        steps += 1
        if flag[0] == 1:
            break
    here().synchronize()
    return steps


@bug
def sizes_for_an_allocation(right):
    """Libraries with ragged results: the count of rows comes without blocking, and the result is
    allocated with it."""
    count = torch.zeros(1, dtype=torch.int64).pin_memory()
    count.copy_((full(1) > 0).sum().reshape(1), non_blocking=True)
    if right:
        here().synchronize()
    return torch.ones(count[0].item() + 1, device="openreg").sum()


@bug
def zeroed_for_the_next_step(right):
    """Trainers with a pinned accumulator: the host sets it to zero while its copy to the device is
    queued."""
    totals, seen = pinned(5), []
    seen.append(totals.to("openreg", non_blocking=True))
    if right:
        here().synchronize()
    totals.zero_()
    return seen
