"""What a replay uses that the program has freed, and what it has not written yet."""

import inspect

import pytest
import torch

DEVICE = "openreg"
sanitizer = torch.openreg.sanitizer


@pytest.fixture(autouse=True)
def watching():
    with sanitizer.enable():
        yield
        torch.openreg.synchronize()


def line_of(text):
    """The line of this file, in the test that runs, that contains the text."""
    frame = inspect.currentframe().f_back
    lines, first = inspect.getsourcelines(frame.f_code)
    return first + next(i for i, line in enumerate(lines) if text in line)


def captured(step):
    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph):
        result = step()
    return graph, result


def ones(*shape):
    return torch.ones(*shape, device=DEVICE)


def report_of(call):
    with pytest.raises(sanitizer.DataRaceError) as error:
        call()
    report = error.value.report
    assert sanitizer.reports()[-1] == report
    return report


# ---- Freed inputs -------------------------------------------------------------------------------


@pytest.mark.racy
def test_input_that_was_reassigned_is_reported_at_each_replay():
    x = ones(1000)
    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph):
        y = x + 1
    x = torch.full((1000,), 5.0, device=DEVICE)
    report = report_of(graph.replay)
    assert report.kind == "freed input" and report.subject.name == "x"
    assert report.earlier.line.line == line_of("y = x + 1") and not report.earlier.write
    assert report.place == (__file__, line_of("x = torch.full("))
    (help,) = report.help
    assert (help.where, help.line) == ("in place of", report.place[1])
    assert help.code == "x.copy_(torch.full((1000,), 5.0, device=DEVICE))"
    text = " ".join(str(report).split())
    assert (
        f"test_graph_memory.py:{report.place[1]}; the graph still reads the old 3.906 KiB" in text
    )
    assert "x was re-assigned at " in text
    assert report_of(graph.replay) == report
    assert y.shape == x.shape


def replay_of_lines(graph, given):
    x = given.pop()
    x = torch.full(
        (1000,),
        5.0,
        device=DEVICE,
    )
    graph.replay()
    return x


def replay_of_pair(graph, given):
    x = given.pop()
    (x, y) = (ones(1000), 3)
    graph.replay()
    return x, y


def replay_of_loop(graph, given):
    x = given.pop()
    for x in (ones(1000) for _ in range(2)):
        x.add_(1)
        graph.replay()


FIXED = {
    replay_of_lines: "x.copy_(torch.full((1000,), 5.0, device=DEVICE))",
    replay_of_pair: "(new_x, y) = (ones(1000), 3)\nx.copy_(new_x)",
    replay_of_loop: "for new_x in (ones(1000) for _ in range(2)):\n    x.copy_(new_x)",
}


@pytest.mark.racy
@pytest.mark.parametrize("replay", FIXED)
def test_help_copies_into_an_input_whatever_re_assigned_it(replay):
    x, graph = ones(1000), torch.openreg.Graph()
    with torch.openreg.graph(graph):
        _ = x + 1
    given = [x]  # whoever calls a function may keep its arguments
    del x
    report = report_of(lambda: replay(graph, given))
    (help,) = report.help
    assert (help.where, help.code) == ("in place of", FIXED[replay])
    assert help.line == replay.__code__.co_firstlineno + 2


def build():
    x, graph = ones(1000), torch.openreg.Graph()
    with torch.openreg.graph(graph):
        _ = x + 1
    return graph


@pytest.mark.racy
def test_help_keeps_a_local_input_or_a_gradient():
    graph, x = build(), None  # another x
    assert x is None
    (help,) = report_of(graph.replay).help
    assert (help.where, help.code) == ("after", "graph.x = x")
    assert help.line == build.__code__.co_firstlineno + 3
    weight = ones(4).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=1)
    weight.sum().backward()
    graph, _ = captured(optimizer.step)
    optimizer.zero_grad()
    (help,) = report_of(graph.replay).help
    assert help.code == "optimizer.zero_grad(set_to_none=False)"
    assert sanitizer.reports()[-1].subject.name is None  # the line names no tensor


@pytest.mark.racy
@pytest.mark.parametrize("end", ["del", "resize", "data", "grad"])
def test_input_that_was_freed_is_reported(end):
    x = ones(1000).requires_grad_(end == "grad")
    if end == "grad":
        x.sum().backward()
    graph = captured(lambda: (x.grad if end == "grad" else x).mul_(2))[0]
    if end == "del":
        del x
    elif end == "resize":
        x.untyped_storage().resize_(0)
    elif end == "data":
        x.data = ones(10)
    else:
        x.grad = None
    report = report_of(graph.replay)
    assert report.kind == "freed input" and report.earlier.write
    assert report.place[0] == __file__


@pytest.mark.racy
def test_input_that_is_freed_in_the_capture_or_while_the_sanitizer_is_off_is_reported():
    x = ones(1000)
    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph):
        y = x.clone()
        x = None
    assert report_of(graph.replay).kind == "freed input"
    graph, _ = captured(lambda: y.copy_(ones(1000)))
    other = torch.empty_like(y)
    second = captured(lambda: torch.exp(other, out=other))[0]
    sanitizer.disable()
    other = None
    sanitizer.enable()
    graph.replay()
    assert report_of(second.replay).kind == "freed input"


def test_inputs_that_live_are_not_reported():
    layer = torch.nn.Linear(8, 8).to(DEVICE)
    x, held = ones(4, 8), []
    graph, y = captured(lambda: layer(x).relu() + ones(8))
    second = torch.openreg.Graph()
    with torch.openreg.graph(second, pool=graph.pool()):
        z = y * 2  # of the first graph's pool, which keeps it
    for _ in range(3):
        x.copy_(torch.rand(4, 8))
        graph.replay()
        second.replay()
        held.append(z.clone())
    del y
    graph.replay()
    graph.reset()
    x = None
    captured(lambda: layer.weight.data.mul_(1))[0].replay()
    assert not sanitizer.reports()


# ---- Before the first replay --------------------------------------------------------------------


@pytest.mark.racy
@pytest.mark.parametrize("read", ["operator", "host", "graph"])
def test_read_before_the_first_replay_is_reported(read):
    x = ones(1000)
    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph):
        y = x + 1
    if read == "graph":
        use = captured(lambda: y[:10] * 2)[0].replay
    else:
        use = y.tolist if read == "host" else (lambda: y * 2)
    report = report_of(use)
    assert report.kind == "not replayed" and report.earlier.line.line == line_of("y = x + 1")
    assert report.place[0] == __file__ and report.help[0].code == "graph.replay()"
    graph.replay()
    assert y.tolist() == [2.0] * 1000


def test_reads_after_a_replay_or_another_write_are_not_reported():
    x = ones(1000)
    first, y = captured(lambda: x + 1)
    second = torch.openreg.Graph()
    with torch.openreg.graph(second, pool=first.pool()):
        buffer = torch.empty_like(x)
        z = (buffer + y).sum()
    y.fill_(3)
    assert y[0].item() == 3
    buffer.copy_(x)
    first.replay()
    second.replay()
    assert z.item() == 3000
    first.reset()
    second.reset()
    del y, z, buffer
    torch.openreg.empty_cache()
    assert ones(1000).sum().item() == 1000
    sanitizer.disable()
    with sanitizer.enable():
        graph, y = captured(lambda: x + 1)
    graph.replay()
    with sanitizer.enable():
        assert y[0].item() == 2
    sanitizer.enable()
    assert not sanitizer.reports()


def test_memory_that_a_graph_uses_twice_is_not_reported():
    x = ones(1100)
    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph):
        first, second = torch.empty(100, device=DEVICE), torch.empty(1000, device=DEVICE)
        second.mul_(0)  # reads and writes what a later node writes, too
        begin = first.data_ptr()
        del first, second
        y = x + 1
    assert y.data_ptr() == begin
    graph.replay()
    assert y.tolist() == [2.0] * 1100 and not sanitizer.reports()


# ---- check_input_liveness -----------------------------------------------------------------------


@pytest.mark.racy
def test_check_input_liveness_refuses_a_replay_without_the_sanitizer():
    sanitizer.disable()
    x, kept = ones(10).requires_grad_(), ones(10)
    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph, check_input_liveness=True):
        y = (x * kept).sum()
        (gradient,) = torch.autograd.grad(y, x)
        half = kept[5:].exp()
    graph.replay()
    assert y.item() == 10 and gradient.tolist() == [1.0] * 10 and half.shape == (5,)
    del kept
    freed = line_of("del kept")
    with pytest.raises(RuntimeError, match=rf"freed after the capture: 1\n.*\(10,\).*:{freed}\n"):
        graph.replay()
    graph.reset()
    with torch.openreg.graph(graph, check_input_liveness=True):
        y = ones(4) * 2
    graph.replay()
    assert y.tolist() == [2.0] * 4


# ---- Replaced inputs ----------------------------------------------------------------------------


class Step:
    def __init__(self, x):
        self.x = x
        self.graph, self.y = captured(lambda: self.x + 1)


@pytest.mark.racy
@pytest.mark.parametrize("holder", ["local", "attribute"])
def test_input_that_lives_on_but_was_replaced_may_be_a_mistake(holder):
    batches = [ones(1000), ones(1000) * 2]
    x = batches[0]
    if holder == "local":
        graph = torch.openreg.Graph()
        with torch.openreg.graph(graph):
            _ = x + 1
        replay, name = graph.replay, "x"
    else:
        x = None
        step = Step(batches[0])
        replay, name = step.graph.replay, "self.x"
    replay()
    if holder == "local":
        x = batches[1]
    else:
        step.x = batches[1]
    report = report_of(replay)
    assert report.kind == "possible replaced input" and report.place[0] == __file__
    assert report.subject.name == name
    kept = name.replace("x", "graph_x")
    assert [h.code for h in report.help] == [f"{kept} = {name}", f"{kept}.copy_({name})"]
    batches[0].copy_(batches[1])
    replay()
    with sanitizer.enable(possible=False):
        replay()
    assert x is None or x.shape == (1000,)


def test_inputs_that_the_program_keeps_or_writes_are_not_reported():
    one, two, table = ones(10), ones(10) * 2, ones(10)
    graphs = []
    for x in (one, two):
        graph = torch.openreg.Graph()
        with torch.openreg.graph(graph):
            y = x + table
        graphs.append(graph)
    kept = ones(10)
    table = (table, kept)
    for _ in range(2):
        one, two = two, one
        for graph in graphs:
            graph.replay()
    graph, y = captured(lambda: kept * 2)
    static, kept = kept, ones(10)
    for _ in range(2):
        static.copy_(kept)
        graph.replay()
    assert y.tolist() == [2.0] * 10
    x = ones(10)
    lives = [x]
    graph, y = captured(lambda: lives[0] * 2)
    x = ones(5)  # of another shape, so it is no new value of the input
    graph.replay()
    assert x.shape != y.shape
    x = also = ones(10)
    graph, y = captured(lambda: also * 2)
    x = ones(10)  # the other variable still holds the input
    graph.replay()
    assert x.shape == y.shape and not sanitizer.reports()


@pytest.mark.racy
def test_variable_that_a_loop_has_left_counts_only_in_the_loop():
    caches, batches = [ones(10), ones(10)], [ones(10), ones(10)]
    for x in caches:
        x.zero_()
    graph, _ = captured(lambda: [cache.add_(1) for cache in caches])
    for x in batches:
        x.add_(1)
    graph.replay()
    assert not sanitizer.reports()
    graph = None
    with pytest.raises(sanitizer.DataRaceError, match="old input"):
        for x in batches:
            if graph is None:
                graph = torch.openreg.Graph()
                with torch.openreg.graph(graph):
                    _ = x + 1
            graph.replay()


# ---- Outputs of graphed callables ---------------------------------------------------------------


@pytest.mark.racy
@pytest.mark.parametrize("read", ["operator", "host", "item", "view"])
def test_output_of_an_earlier_call_is_reported_when_it_is_read(read):
    call = torch.openreg.make_graphed_callables(torch.sin, (ones(10),))
    first = call(ones(10))
    part = first[:1]
    assert part.item() > 0.8
    second = call(ones(10) * 2)
    line = line_of("second = call(")
    use = {
        "operator": lambda: first + 1,
        "host": lambda: [first.tolist()],
        "item": lambda: [part.item()],
    }
    report = report_of(use.get(read, lambda: part * 2))
    assert report.kind == "overwritten output" and report.earlier.line.line == line
    assert "the default stream writes " in str(report) and "(replay)" in str(report)
    name = "part" if read in ("item", "view") else "first"
    assert report.help[0].code == f"{name} = {name}.clone()" and report.help[0].line == line
    assert second.tolist() == torch.full((10,), 2.0).sin().tolist()


@pytest.mark.racy
def test_help_clones_what_a_loop_keeps():
    call, kept = torch.openreg.make_graphed_callables(torch.sin, (ones(10),)), []
    for i in range(2):
        kept.append(call(ones(10) * i))
    report = report_of(lambda: [output.sum() for output in kept])
    (help,) = report.help
    assert (help.where, help.line) == ("in place of", line_of("kept.append("))
    assert help.code == "kept.append(call(ones(10) * i).clone())"


def test_outputs_that_are_read_in_time_are_not_reported():
    layer = torch.nn.Linear(4, 4).to(DEVICE)
    graphed = torch.openreg.make_graphed_callables(torch.nn.Linear(4, 4).to(DEVICE), (ones(2, 4),))
    kept, x = [], ones(2, 4)
    for _ in range(3):
        y = graphed(x)
        kept.append(y.detach().clone())
        layer(y).sum().backward()
    assert torch.equal(kept[0], kept[2])
    again = torch.openreg.make_graphed_callables(torch.sin, (ones(10),))
    twice = again(again(ones(10)))
    expected = torch.ones(10).sin().sin()
    assert torch.allclose(twice.cpu(), expected) and not sanitizer.reports()


def two_calls(function, late):
    call = torch.openreg.make_graphed_callables(function, (ones(10).requires_grad_(),))
    inputs, found = [(ones(10) * i).requires_grad_() for i in (1, 3)], []

    def backward(loss, x):
        loss.backward()
        found.append(x.grad[0].item())  # before the next one, which writes the same memory

    first = call(inputs[0]).sum()
    if not late:
        backward(first, inputs[0])
    second = call(inputs[1]).sum()
    if late:
        backward(first, inputs[0])
    backward(second, inputs[1])
    return found


@pytest.mark.racy
def test_backward_of_an_earlier_call_is_reported_where_it_reads_what_calls_write():
    for function in (lambda x: x * x, torch.exp):  # an argument, and what the forward pass made
        report = report_of(lambda: two_calls(function, late=True))  # noqa: B023
        assert report.kind == "overwritten output" and "backward pass" in report.title
        call = two_calls.__code__.co_firstlineno + 11
        assert report.earlier.line.line == call and report.later.call.name == "backward"
        assert (report.help[0].where, report.help[0].line) == ("before", call)


def test_backward_passes_of_calls_that_keep_what_they_need_are_not_reported():
    assert two_calls(lambda x: x * x, late=False) == [2, 6]
    assert two_calls(lambda x: x * 2 + 1, late=True) == [2, 2]
    frozen = torch.nn.Linear(10, 10, bias=False, device=DEVICE).requires_grad_(False)
    frozen.weight.copy_(torch.arange(100.0).view(10, 10))  # whole numbers have exact sums
    # Its gradient reads the weight, which no call writes.
    assert two_calls(frozen, late=True) == [450, 450]
    assert not sanitizer.reports()


# ---- First calls --------------------------------------------------------------------------------


def steps(optimizer_type, warmups):
    weight = torch.zeros(1, device=DEVICE, requires_grad=True)
    options = {"momentum": 0.5} if optimizer_type is torch.optim.SGD else {"capturable": True}
    optimizer = optimizer_type([weight], lr=1, **options)
    weight.grad = ones(1)
    for _ in range(warmups):
        optimizer.step()
    return captured(optimizer.step)[0], optimizer, weight


@pytest.mark.racy
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_first_step_of_an_optimizer_in_a_capture_may_be_a_mistake(optimizer):
    kept = steps(optimizer, 0), steps(optimizer, 1)
    kept[0][0].replay()
    report = report_of(kept[0][0].replay)
    assert report.kind == "possible first call"
    assert report.earlier.operator == f"{optimizer.__name__}.step"
    assert report.help[0].code == "result = step()"  # before the capture
    count = len(sanitizer.reports())
    for _ in range(2):  # the first one may make what it makes
        kept[1][0].replay()
    with sanitizer.enable(possible=False):
        kept[0][0].replay()
    assert len(sanitizer.reports()) == count


@pytest.mark.racy
def test_lazy_parameters_that_a_capture_makes_may_be_a_mistake():
    x = ones(2, 4)
    layer = torch.nn.LazyLinear(3, device=DEVICE)
    graph, _ = captured(lambda: layer(x))
    graph.replay()
    assert report_of(graph.replay).kind == "possible first call"
    layer = torch.nn.LazyLinear(3, device=DEVICE)
    layer(x)
    count = len(sanitizer.reports())
    graph, y = captured(lambda: layer(x))
    for _ in range(2):
        graph.replay()
    assert torch.equal(y, layer(x)) and len(sanitizer.reports()) == count
