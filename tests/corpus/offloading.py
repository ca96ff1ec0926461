"""Offloading of parameters, activations and optimizer states"""

import torch
from torch.openreg import Event, Stream
from torch.utils.checkpoint import checkpoint

from ._base import bug, full, here, pinned


@bug
def activation_leaves_before_it_is_made(right):
    """Activation offloading: the copy stream takes an activation out without waiting for its
    kernel."""
    out, host = Stream(), pinned(0)
    activation = full(2) * 3
    if right:
        out.wait_stream(here())
    with out:
        host.copy_(activation, non_blocking=True)
    activation.record_stream(out)
    out.synchronize()
    return host + 0


@bug
def activation_freed_on_its_way_out(right):
    """Activation offloading: the activation is dropped when its copy is queued, and the next layer
    gets its memory."""
    out, hosts = Stream(), [pinned(0), pinned(0)]
    for i, host in enumerate(hosts):
        activation = full(i + 1)
        out.wait_stream(here())
        with out:
            host.copy_(activation, non_blocking=True)
        if right:
            activation.record_stream(out)
        del activation
    out.synchronize()
    return [host + 0 for host in hosts]


@bug
def fetched_for_backward(right):
    """Activation offloading: backward uses a tensor that is still on its way back."""
    back, host = Stream(), pinned(3)
    with back:
        activation = host.to("openreg", non_blocking=True)
    if right:
        here().wait_stream(back)
    activation.record_stream(here())
    return (activation * full(2)).sum()


@bug
def saved_tensor_hooks(right):
    """Activation offloading by hooks of saved tensors: what `unpack` fetches on its stream,
    autograd reads on another."""
    stream, kept = Stream(), []

    def pack(tensor):
        return tensor.detach().to("cpu").pin_memory()

    def unpack(host):
        with stream:
            tensor = host.to("openreg", non_blocking=True)
        kept.append(tensor)
        tensor.record_stream(here())
        if right:
            here().wait_stream(stream)
        return tensor

    x = full(3).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = (x * x).sum()
    loss.backward()
    return x.grad


@bug
def host_optimizer_reads_too_early(right):
    """ZeRO-Offload-like optimizers: the CPU's step begins before the gradient has arrived."""
    weight, gradient = pinned(1), pinned(0)
    gradient.copy_(full(2) * 2, non_blocking=True)
    if right:
        here().synchronize()
    weight.sub_(gradient, alpha=0.5)
    return weight + 0


@bug
def host_optimizer_writes_too_early(right):
    """ZeRO-Offload-like optimizers: the CPU's step writes the weights that are being copied to the
    device."""
    weight, there = pinned(1), []
    for _ in range(2):
        there.append(weight.to("openreg", non_blocking=True))
        if right:
            here().synchronize()
        weight.add_(1)
    return there


@bug
def gradient_accumulated_in_one_buffer(right):
    """ZeRO-Offload-like accumulation: the second micro-batch's gradient comes into the buffer from
    which the host still has to add the first, as the event is taken of the wrong copy."""
    copies, buffer, total = Stream(), pinned(0), torch.zeros(64)
    gradients = [full(1), full(2)]
    copies.wait_stream(here())
    for gradient in gradients:
        with copies:
            buffer.copy_(gradient, non_blocking=True)
            copied = copies.record_event()
        if right or gradient is gradients[0]:
            copied.synchronize()
        total.add_(buffer)
    copies.synchronize()
    return total


@bug
def next_layer_into_the_slot_in_use(right):
    """Offloading by layers (diffusers, accelerate): the next layer's weights are fetched into the
    slot that the present layer computes with."""
    fetch, slot, x = Stream(), full(0), full(1)
    fetch.wait_stream(here())
    for weight in [pinned(2), pinned(3)]:
        if right:
            fetch.wait_stream(here())
        with fetch:
            slot.copy_(weight, non_blocking=True)
        here().wait_stream(fetch)
        x = x * slot
    return x


@bug
def storage_given_up(right):
    """FSDP-like resharding: the storage of gathered weights is resized to nothing while another
    stream reads them."""
    side, weight = Stream(), full(2)
    side.wait_stream(here())
    with side:
        y = weight * 3
    if right:
        here().wait_stream(side)
    weight.untyped_storage().resize_(0)
    other = full(9)
    here().wait_stream(side)
    y.record_stream(here())
    return y + other


@bug
def buffer_lent_twice(right):
    """Activation offloading with a pool of pinned buffers: a buffer is lent again when its way back
    is queued, and not when it is over."""
    back, out, buffer = Stream(), Stream(), pinned(1)
    with back:
        first = buffer.to("openreg", non_blocking=True)
    second = full(7)
    out.wait_stream(here())
    if right:
        out.wait_stream(back)
    with out:
        buffer.copy_(second, non_blocking=True)
    second.record_stream(out)
    for stream in (out, back):
        stream.synchronize()
    return first, buffer + 0


@bug
def module_used_on_the_cpu(right):
    """Sequential offloading: weights go home without blocking, and the module is run on the CPU."""
    home = pinned(0)
    home.copy_(full(2) + 1, non_blocking=True)
    if right:
        here().synchronize()
    return home @ torch.ones(64)


@bug
def event_on_the_callers_stream(right):
    """Offloading hooks: `event.record()` outside `with stream` marks the caller's stream, and not
    the copy."""
    copies, done, host = Stream(), Event(), pinned(0)
    value = full(2)
    copies.wait_stream(here())
    with copies:
        host.copy_(value, non_blocking=True)
    done.record(copies if right else here())
    done.synchronize()
    result = host + 0
    here().wait_stream(copies)
    return result


@bug
def two_prefetches_of_one_weight(right):
    """Offloading with hooks before and after a layer: both fetch the weight, on two streams, and
    the second is the older version."""
    first, second, slot = Stream(), Stream(), full(0)
    first.wait_stream(here())
    second.wait_stream(here())
    with first:
        slot.copy_(pinned(1), non_blocking=True)
    if right:
        second.wait_stream(first)
    with second:
        slot.copy_(pinned(2), non_blocking=True)
    for stream in (first, second):
        here().wait_stream(stream)
    return slot * 1


@bug
def cast_on_the_way(right):
    """Offloading in half precision: the weight is cast on the computing stream after the copy's
    stream was waited for, but into the buffer that the copy reads."""
    out, master, half, host = Stream(), full(1), full(0).half(), pinned(0).half().pin_memory()
    half.copy_(master)
    out.wait_stream(here())
    with out:
        host.copy_(half, non_blocking=True)
    if right:
        here().wait_stream(out)
    half.copy_(master * 5)
    out.synchronize()
    return host + 0


@bug
def optimizer_state_swapped_in(right):
    """Optimizer offloading (bitsandbytes-like paging): momentum is fetched on a stream, updated and
    sent back, and the way back does not wait for the update."""
    swap, host = Stream(), pinned(2)
    with swap:
        momentum = host.to("openreg", non_blocking=True)
    here().wait_stream(swap)
    momentum.mul_(0.5)
    if right:
        swap.wait_stream(here())
    with swap:
        host.copy_(momentum, non_blocking=True)
    here().wait_stream(swap)
    swap.synchronize()
    return host + 0


@bug
def recomputed_with_other_weights(right):
    """Activation checkpointing with offloaded weights: the memory of a layer's weights gets the
    next layer's while the recomputation in backward reads it."""
    fetch, weight = Stream(), torch.ones(4, 4, device="openreg")
    x = torch.ones(2, 4, device="openreg", requires_grad=True)
    y = checkpoint(lambda x: (x @ weight).relu(), x, use_reentrant=False)
    y.sum().backward()
    if right:
        fetch.wait_stream(here())
    with fetch:
        weight.copy_(torch.full((4, 4), 9.0).pin_memory(), non_blocking=True)
    here().wait_stream(fetch)
    return x.grad * 1
