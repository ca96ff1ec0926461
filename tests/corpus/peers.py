"""Several devices: model and pipeline parallelism"""

from torch.openreg import Stream

from ._base import bug, full, here, pinned


@bug
def activation_of_a_side_stream(right):
    """Pipeline parallelism: a stage computes on its own stream, and the copy to the next device
    waits for the current one."""
    stage = Stream()
    stage.wait_stream(here())
    x = full(2)
    stage.wait_stream(here())
    with stage:
        y = x * 3
    if right:
        here().wait_stream(stage)
    y.record_stream(here())
    return y.to("openreg:1")


@bug
def received_on_a_side_stream(right):
    """Pipeline parallelism: the next stage computes on its default stream, and the activation
    arrives on another of its device."""
    arrive, buffer = Stream("openreg:1"), full(0, device="openreg:1")
    arrive.wait_stream(here(1))
    x = full(4)
    arrive.wait_stream(here())
    with arrive:
        buffer.copy_(x, non_blocking=True)
    if right:
        here(1).wait_stream(arrive)
    result = buffer * 2
    here(1).wait_stream(arrive)
    return result


@bug
def send_buffer_of_the_next_micro_batch(right):
    """Pipeline parallelism: the next micro-batch is computed into the buffer that is being sent."""
    send, out, there = Stream(), full(0), []
    for i in range(2):
        out.fill_(i + 1)
        send.wait_stream(here())
        with send:
            there.append(out.to("openreg:1", non_blocking=True))
        if right:
            here().wait_stream(send)
    here().wait_stream(send)
    return there


@bug
def receive_buffer_still_read(right):
    """Pipeline parallelism: an activation arrives in a buffer that the stage still reads, as the
    sender's stream waits for its own device alone."""
    send, buffer, found = Stream(), full(0, device="openreg:1"), []
    send.wait_stream(here(1))
    values = [full(1), full(2)]
    send.wait_stream(here())
    reader = Stream("openreg:1")
    for value in values:
        with send:
            buffer.copy_(value, non_blocking=True)
        here(1).wait_stream(send)
        reader.wait_stream(here(1))
        reader.wait_stream(send)
        with reader:
            found.append(buffer * 2)
        if right:
            here(1).wait_stream(reader)
    here(1).wait_stream(reader)
    here().wait_stream(send)
    for tensor in found:
        tensor.record_stream(here(1))
    return [tensor + 0 for tensor in found]


@bug
def broadcast_from_the_first_device(right):
    """Replication by copies: replicas are taken on streams, while the first device already updates
    the weights."""
    weight, stream = full(1), Stream()
    stream.wait_stream(here())
    with stream:
        replica = weight.to("openreg:1", non_blocking=True)
    if right:
        here().wait_stream(stream)
    weight.add_(5)
    here().wait_stream(stream)
    return replica * 1, weight


@bug
def reduced_by_hand(right):
    """All-reduces written by hand with peer copies: parts of other devices are added before they
    have arrived."""
    fetch = Stream()
    mine, other = full(1), full(2, device="openreg:1")
    part = full(0)
    fetch.wait_stream(here())
    fetch.wait_stream(here(1))
    with fetch:
        part.copy_(other, non_blocking=True)
    if right:
        here().wait_stream(fetch)
    mine.add_(part)
    here().wait_stream(fetch)
    return mine


@bug
def peers_block_dropped(right):
    """Pipeline parallelism: a received block is dropped on its device while a peer's stream still
    copies into it."""
    side = Stream("openreg:1")
    source, batch = full(1), full(0, device="openreg:1")
    side.wait_stream(here(1))
    side.wait_stream(here())
    with side:
        batch.copy_(source, non_blocking=True)
    if right:
        batch.record_stream(side)
    del batch
    fresh = full(5, device="openreg:1")
    here().wait_stream(side)
    return fresh


@bug
def host_relay(right):
    """Transfers by way of the host: the second half reads the pinned relay before the first half
    has filled it, as each half waits for its own device."""
    out, relay = Stream(), pinned(0)
    value = full(6)
    out.wait_stream(here())
    with out:
        relay.copy_(value, non_blocking=True)
    there = Stream("openreg:1")
    if right:
        there.wait_stream(out)
    with there:
        received = relay.to("openreg:1", non_blocking=True)
    here(1).wait_stream(there)
    here().wait_stream(out)
    received.record_stream(here(1))
    return received * 1


@bug
def gradient_back_over_the_pipe(right):
    """Pipeline parallelism: the gradient comes back into the activation's memory while a
    recomputation reads it."""
    recompute, activation = Stream(), full(2)
    gradient = full(9, device="openreg:1")
    recompute.wait_stream(here())
    with recompute:
        again = activation * activation
    if right:
        here().wait_stream(recompute)
    activation.copy_(gradient, non_blocking=True)
    here().wait_stream(recompute)
    again.record_stream(here())
    return again + activation
