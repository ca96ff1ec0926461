"""Captured steps, backward passes and layers that run beside each other"""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch.openreg import Event, Stream

from ._base import bug, full, here


def captured(step):
    """The graph of a step, and what it returns."""
    warm, graph = Stream(), torch.openreg.Graph()
    warm.wait_stream(here())
    with warm:
        step()
    here().wait_stream(warm)
    with torch.openreg.graph(graph):
        result = step()
    return graph, result


@bug(outside="the allocator")
def captured_length_assigned_anew(right):
    """Decoding by a captured step: the length grows by an assignment, and the graph reads the old
    one."""
    lengths = full(1)
    graph, scores = captured(lambda: lengths * 2)
    results = []
    for _ in range(3):
        graph.replay()
        results.append(scores.clone())
        if right:
            lengths.add_(1)
        else:
            lengths = lengths + 1
    return results


@bug
def states_of_a_graphed_cell(right):
    """Recurrent models with a graphed cell: the states of all calls are kept, which are one
    memory."""
    cell = torch.nn.Linear(8, 8, device="openreg").requires_grad_(False)
    torch.nn.init.constant_(cell.weight, 0.25)
    torch.nn.init.zeros_(cell.bias)
    x = torch.ones(8, 8, device="openreg")
    cell = torch.openreg.make_graphed_callables(cell, (x.clone(),))
    state, states = x, []
    for _ in range(3):
        state = cell(state)
        states.append(state.clone() if right else state)
    return torch.stack(states)


@bug
def captured_input_filled_by_copies(right):
    """Captured steps whose input is filled by a stream: the next batch comes in during the
    replay."""
    copies, x = Stream(), full(0)
    graph, y = captured(lambda: x * 3)
    copies.wait_stream(here())
    results = []
    for i in range(3):
        if right:
            copies.wait_stream(here())
        with copies:
            x.fill_(i)
        here().wait_stream(copies)
        graph.replay()
        results.append(y.clone())
    return results


class _Deferred(torch.autograd.Function):
    """A product whose weight gets its gradient on a stream."""

    @staticmethod
    def forward(ctx, x, total, stream):
        ctx.total, ctx.stream = total, stream
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        ctx.stream.wait_stream(here())
        with ctx.stream:
            ctx.total.add_(gradient)
        gradient.record_stream(ctx.stream)
        return gradient * 2, None, None


@bug
def weight_gradients_on_a_stream(right):
    """Deferred weight gradients (Megatron): a stream accumulates them, and the optimizer steps
    without waiting for it."""
    side, total, weight = Stream(), full(0), full(1)
    side.wait_stream(here())
    x = full(3).requires_grad_()
    for _ in range(2):
        _Deferred.apply(x, total, side).sum().backward()
    if right:
        here().wait_stream(side)
    return weight - total


@bug
def step_in_the_backward_pass(right):
    """Optimizers in hooks of the backward pass: the gradient is dropped while the step on its
    stream reads it."""
    side, weight = Stream(), full(1).requires_grad_()
    side.wait_stream(here())

    def step(parameter):
        side.wait_stream(here())
        with side, torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.5)
        if right:
            parameter.grad.record_stream(side)
        parameter.grad = None

    weight.register_post_accumulate_grad_hook(step)
    (weight * 2).sum().backward()
    other = full(7)
    here().wait_stream(side)
    return weight.detach() + other


@bug
def layer_waits_for_the_one_before(right):
    """Caches that are loaded layer by layer: a layer waits for the event of the one before it."""
    side, layers = Stream(), [full(0) for _ in range(3)]
    loaded = [Event() for _ in layers]
    side.wait_stream(here())
    for i, layer in enumerate(layers):
        with side:
            layer.fill_(i + 1)
            loaded[i].record()
    result = full(0)
    for i, layer in enumerate(layers):
        here().wait_event(loaded[i if right else max(i - 1, 0)])
        result = result + layer
    return result


@bug
def rows_fetched_before_their_update(right):
    """Embedding tables with a prefetch: rows of the next batch are fetched while this batch's are
    updated."""
    side, table = Stream(), torch.ones(16, 8, device="openreg")
    now, following = (torch.tensor(rows, device="openreg") for rows in ([1, 2, 3], [3, 4, 5]))
    side.wait_stream(here())
    table.index_add_(0, now, torch.ones(3, 8, device="openreg"))
    if right:
        side.wait_stream(here())
    with side:
        rows = table.index_select(0, following)
    here().wait_stream(side)
    rows.record_stream(here())
    return rows * 1


@bug
def experts_write_their_input(right):
    """Experts beside a shared one: the result of the routed experts takes the memory of the input,
    which the shared expert's stream reads."""
    side, x = Stream(), full(2)
    side.wait_stream(here())
    with side:
        shared = x + 1
    x.record_stream(side)
    routed = x * 3 if right else x.mul_(3)
    here().wait_stream(side)
    shared.record_stream(here())
    return routed + shared


@bug
def window_filled_during_its_flush(right):
    """Quantised caches: the window of new tokens is filled again while a stream still quantises
    it."""
    side, window = Stream(), full(100)
    side.wait_stream(here())
    with side:
        packed = (window / 2).to(torch.int8)
        flushed = side.record_event()
    if right:
        here().wait_event(flushed)
    window.fill_(20)
    here().wait_stream(side)
    packed.record_stream(here())
    return packed * 1, window


@bug(outside="a thread")
def workers_joined_by_the_last(right):
    """Servers with a pool of threads: each has a stream, and the event of the last result alone is
    waited for."""
    x = full(1)
    torch.openreg.synchronize()

    def run(i):
        with Stream() as stream:
            torch.openreg._sleep(1000)
            return x * i, stream.record_event()

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(run, range(3)))
    for result, done in results:
        result.record_stream(here())
        if right or result is results[-1][0]:
            here().wait_event(done)
    return torch.stack([result for result, _ in results])
