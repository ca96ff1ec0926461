"""The usual mistakes with graphs, each beside its right form.

A wrong form raises (what the mistake's `shown` matches), is reported by the sanitizer
(DataRaceError), or returns other values than a right one: `values`, then, is what it should return.
"""

import functools
import re
from typing import NamedTuple

import torch

DEVICE = "openreg"
MISTAKES = {}


class Mistake(NamedTuple):
    what: str
    shown: str  # matches the error; "" where values alone show it
    wrong: callable
    right: callable


def mistake(what, shown=""):
    """For two functions, wrong_* and right_*, of which the first is decorated."""

    def add(wrong):
        name = wrong.__name__.removeprefix("wrong_")
        MISTAKES[name] = [what, shown, wrong]
        return wrong

    return add


def right(function):
    name = function.__name__.removeprefix("right_")
    MISTAKES[name] = Mistake(*MISTAKES[name], function)
    return function


def outcome(function):
    """What a form returns, or the first line of its error."""
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    finally:
        torch.openreg.synchronize()


def is_shown(mistake):
    found = outcome(mistake.wrong)
    if mistake.shown:
        return isinstance(found, str) and re.search(mistake.shown, found) is not None
    return found != outcome(mistake.right)


@functools.cache
def capture_stream():
    """Of another pool than the side streams, from which it must differ."""
    return torch.openreg.Stream(priority=-1)


def captured(step, **options):
    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph, stream=capture_stream(), **options):
        result = step()
    return graph, result


def ones(*shape):
    return torch.ones(*shape, device=DEVICE)


# ---- Values that stay what they were ------------------------------------------------------------


@mistake("a new batch is another tensor, and the graph reads the old one's memory", "DataRaceError")
def wrong_stale_input():
    x = ones(4)
    graph, y = captured(lambda: x * 2)
    x = ones(4) * 3
    graph.replay()
    return y.tolist()


@right
def right_stale_input():
    x = ones(4)
    graph, y = captured(lambda: x * 2)
    x.copy_(ones(4) * 3)
    graph.replay()
    return y.tolist()


@mistake("an output is kept over the next replay, which writes the same memory")
def wrong_output_kept():
    x, kept = ones(1), []
    graph, y = captured(lambda: x.add_(1).clone())
    for _ in range(3):
        graph.replay()
        kept.append(y)
    return [y.item() for y in kept]


@right
def right_output_kept():
    x, kept = ones(1), []
    graph, y = captured(lambda: x.add_(1).clone())
    for _ in range(3):
        graph.replay()
        kept.append(y.clone())
    return [y.item() for y in kept]


@mistake("Python's state is frozen: a number counts once, in the capture")
def wrong_python_state():
    x, step = ones(1), 0

    def advance():
        nonlocal step
        step += 1
        x.mul_(step)

    advance()
    graph, _ = captured(advance)
    for _ in range(3):
        graph.replay()
    return x.item(), 24.0


@right
def right_python_state():
    x, step = ones(1), torch.zeros(1, device=DEVICE)

    def advance():
        step.add_(1)
        x.mul_(step)

    advance()
    graph, _ = captured(advance)
    for _ in range(3):
        graph.replay()
    return x.item(), 24.0


@mistake(
    "no warm-up: what the first step alone should do is captured, and happens at each replay",
    "DataRaceError",
)
def wrong_no_warm_up():
    return momentum(warmups=0)


@right
def right_no_warm_up():
    return momentum(warmups=1)


def momentum(warmups):
    """Four steps with a constant gradient."""
    weight = torch.zeros(1, device=DEVICE, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1, momentum=0.5)
    weight.grad = ones(1)
    side = torch.openreg.Stream()
    side.wait_stream(torch.openreg.current_stream())
    with torch.openreg.stream(side):
        for _ in range(warmups):
            optimizer.step()
    torch.openreg.current_stream().wait_stream(side)
    graph, _ = captured(optimizer.step)
    for _ in range(4 - warmups):
        graph.replay()
    return weight.item()


@mistake("a random number that is drawn on the host is the same in each replay")
def wrong_random_state():
    x = torch.zeros(1, device=DEVICE)
    graph, _ = captured(lambda: x.fill_(torch.rand(()).item()))
    seen = set()
    for _ in range(3):
        graph.replay()
        seen.add(x.item())
    return len(seen)


@right
def right_random_state():
    x = torch.zeros(1, device=DEVICE)
    graph, _ = captured(lambda: x.copy_(torch.rand(1, device=DEVICE)))
    seen = set()
    for _ in range(3):
        graph.replay()
        seen.add(x.item())
    return len(seen)


@mistake(
    "an input that was freed: its memory has another owner when the graph reads it", "DataRaceError"
)
def wrong_freed_input():
    x = ones(1000)
    graph, y = captured(lambda: x * 2)
    x = None
    others = [torch.full((1000,), 7.0, device=DEVICE) for _ in range(4)]
    graph.replay()
    return y[0].item(), len(others)


@right
def right_freed_input():
    x = ones(1000)
    graph, y = captured(lambda: x * 2)
    others = [torch.full((1000,), 7.0, device=DEVICE) for _ in range(4)]
    graph.replay()
    return y[0].item(), len(others)


# ---- Order --------------------------------------------------------------------------------------


@mistake("the next batch is written while the replay still reads the last one", "DataRaceError")
def wrong_input_written_early():
    x, side = ones(1000), torch.openreg.Stream()
    graph, y = captured(lambda: x * 2)
    side.wait_stream(torch.openreg.current_stream())
    with torch.openreg.stream(side):
        graph.replay()
    x.fill_(3)
    torch.openreg.current_stream().wait_stream(side)
    return y[0].item()


@right
def right_input_written_early():
    x, side = ones(1000), torch.openreg.Stream()
    graph, y = captured(lambda: x * 2)
    side.wait_stream(torch.openreg.current_stream())
    with torch.openreg.stream(side):
        graph.replay()
    torch.openreg.current_stream().wait_stream(side)
    x.fill_(3)
    return y[0].item()


@mistake("graphs that share a pool are replayed on two streams at once", "DataRaceError")
def wrong_shared_pool():
    return two_graphs(together=True)


@right
def right_shared_pool():
    return two_graphs(together=False)


def two_graphs(together):
    x, side = ones(1000), torch.openreg.Stream()
    first, y = captured(lambda: (x + 1).sum())
    second, z = captured(lambda: (x + 2).sum(), pool=first.pool())
    side.wait_stream(torch.openreg.current_stream())
    first.replay()
    if not together:
        side.wait_stream(torch.openreg.current_stream())
    with torch.openreg.stream(side):
        second.replay()
    torch.openreg.current_stream().wait_stream(side)
    return y.item(), z.item()


@mistake("a branch that is not joined", "orErrorStreamCaptureUnjoined")
def wrong_branch():
    return branch(joined=False)


@right
def right_branch():
    return branch(joined=True)


def branch(joined):
    x, side = ones(4), torch.openreg.Stream()

    def step():
        main = torch.openreg.current_stream()
        side.wait_stream(main)
        with torch.openreg.stream(side):
            y = x + 1
        if joined:
            main.wait_stream(side)
        return y

    graph, y = captured(step)
    graph.replay()
    return y.tolist()


@mistake("a wait for what was queued before the capture", "orErrorStreamCaptureIsolation")
def wrong_wait_for_outside():
    side = torch.openreg.Stream()
    with torch.openreg.stream(side):
        x = ones(4)
        done = side.record_event()

    def step():
        torch.openreg.current_stream().wait_event(done)
        return x * 2

    graph, y = captured(step)
    graph.replay()
    return y.tolist()


@right
def right_wait_for_outside():
    side = torch.openreg.Stream()
    with torch.openreg.stream(side):
        x = ones(4)
        done = side.record_event()
    torch.openreg.current_stream().wait_event(done)
    graph, y = captured(lambda: x * 2)
    graph.replay()
    return y.tolist()


# ---- What no graph can hold ---------------------------------------------------------------------


@mistake("a value is read in the capture, where nothing runs", r"_local_scalar_dense \(item\)")
def wrong_item():
    x = ones(4)
    graph, y = captured(lambda: x / x.sum().item())
    graph.replay()
    return y.tolist()


@right
def right_item():
    x = ones(4)
    graph, y = captured(lambda: x / x.sum())
    graph.replay()
    return y.tolist()


@mistake("a copy from memory that is not pinned", "from pageable host memory")
def wrong_pageable_copy():
    batch, x = torch.ones(4), torch.zeros(4, device=DEVICE)
    graph, _ = captured(lambda: x.copy_(batch))
    graph.replay()
    return x.tolist()


@right
def right_pageable_copy():
    batch, x = torch.ones(4).pin_memory(), torch.zeros(4, device=DEVICE)
    graph, _ = captured(lambda: x.copy_(batch, non_blocking=True))
    graph.replay()
    return x.tolist()


@mistake("an optimizer that counts its steps on the host", "capturable is False")
def wrong_optimizer():
    return adam(capturable=False)


@right
def right_optimizer():
    return adam(capturable=True)


def adam(capturable):
    weight = torch.zeros(1, device=DEVICE, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=0.5, capturable=capturable)
    weight.grad = ones(1)
    graph, _ = captured(optimizer.step)
    graph.replay()
    return round(weight.item(), 3)


@mistake("a capture on the default stream", "the default stream of device 0 cannot capture")
def wrong_default_stream():
    x, graph = ones(4), torch.accelerator.Graph()
    with graph:
        x += 1
    graph.replay()
    return x.tolist()


@right
def right_default_stream():
    x, graph = ones(4), torch.accelerator.Graph()
    with torch.openreg.Stream(), graph:
        x += 1
    graph.replay()
    return x.tolist()
