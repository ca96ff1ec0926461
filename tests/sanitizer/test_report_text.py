"""The text of a report: names from the program, places with their source, lines to paste."""

import ast
import io
import itertools
import linecache
import runpy
import textwrap
import weakref
from pathlib import Path

import pytest
import torch
from race_pairs import openreg, sanitizer
from torch import nn

from torch_openreg.openreg import _messages
from torch_openreg.openreg.sanitizer import _findings, _frames, _names, _parsing

pytestmark = [pytest.mark.usefixtures("watching"), pytest.mark.filterwarnings("ignore")]
_files = itertools.count()


@pytest.fixture
def reports_of(tmp_path, monkeypatch):
    """Runs a program of its own file, "p0.py" and so on, and returns its reports."""
    monkeypatch.chdir(tmp_path)

    def reports_of(code, name=None):
        openreg.synchronize()
        sanitizer.clear()
        path = tmp_path / (name or f"p{next(_files)}.py")
        path.write_text("import torch\n" + textwrap.dedent(code))
        runpy.run_path(str(path))
        return sanitizer.reports()

    return reports_of


def codes(report):
    return [[(h.where, h.line, h.code) for h in way] for way in report.helps]


def test_text_of_a_race_is_whole(reports_of):
    (report,) = reports_of(
        """
        x = torch.ones(1000, device="openreg")
        side = torch.Stream(device="openreg")
        with side:
            x *= 5
        """,
        "scale.py",
    )
    underline = "^" * 34
    text = f"""\
error: data race on openreg:0 over x, 4000 bytes of float32

  scale.py:3   x = torch.ones(1000, device="openreg")
                   {underline}
               the default stream writes x (fill_)
  scale.py:6   x *= 5
               stream side, made at scale.py:4, writes x (mul_)

  Nothing orders the second after the first.
  help: before scale.py:5 add
            side.wait_stream(torch.accelerator.current_stream())"""
    if report.later.line.columns is None:  # Python 3.10
        text = text.replace(f"                   {underline}\n", "")
    assert str(report) == text
    assert report.title == "data race on openreg:0 over x, 4000 bytes of float32"
    assert report.place == (report.later.line.filename, 5)
    assert report.summary() == (
        "scale.py:3 and scale.py:6: before scale.py:5 add "
        "side.wait_stream(torch.accelerator.current_stream())"
    )
    assert f"{report.begin:#x}" in report.details() and "aten::mul_.Tensor" in report.details()


def test_wait_that_does_not_order_the_accesses_is_told(reports_of):
    code = """
    x, side = torch.ones(9, device="openreg"), torch.Stream(device="openreg")
    other = torch.Stream(device="openreg")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        {}
        x.add_(1)
        {}
    torch.accelerator.current_stream().wait_event(done)
    x.add_(1)
    """
    record = "done = side.record_event()"
    note = "waits for an event of stream side that was recorded before the first"
    (report,) = reports_of(code.format(record, "pass"))
    assert note in " ".join(str(report).split())
    assert reports_of(code.format("pass", record)) == []
    (unwaited,) = reports_of(code.format(record, "pass").replace("wait_event(done)", "query()"))
    assert "In between" not in str(unwaited)
    for_another = code.format("pass", record).replace("torch.accelerator.current_stream().wait_e",
                                                      "other.wait_e")  # fmt: skip
    (unwaited,) = reports_of(for_another)
    note = "In between, stream other waits for it, but the default stream does not."
    assert note in " ".join(str(unwaited).split())


NAMES = {
    "an attribute": ("class A: pass\na = A()\na.s = torch.Stream(device='openreg')", "a.s"),
    "an element": ("s = [torch.Stream(device='openreg') for _ in range(2)]", "s[1]"),
    "a value": ("s = {'copy': torch.Stream(device='openreg')}", "s['copy']"),
}


@pytest.mark.parametrize("kind", NAMES)
def test_stream_is_named_by_what_holds_it(kind, reports_of):
    made, name = NAMES[kind]
    use = f"x = torch.ones(9, device='openreg')\nwith {name}:\n    x.add_(1)\n"
    (report,) = reports_of(f"{made}\n{use}")
    assert report.later.name == name and f"stream {name}, made at p" in str(report)
    assert report.help[0].code == f"{name}.wait_stream(torch.accelerator.current_stream())"


def test_stream_without_a_variable_is_named_by_its_source(reports_of):
    code = """
    def run(x):
        with torch.Stream(device="openreg") as first:
            x.add_(1)
        with torch.Stream(device="openreg"):
            x.add_(1)
        with torch.openreg.Stream(name="copies"):
            x.add_(1)

    x = torch.ones(9, device="openreg")
    run(x)
    x.add_(1)
    """
    reports = reports_of(code)
    names = {report.later.who for report in reports} | {report.earlier.who for report in reports}
    assert {"stream first", 'stream "copies"', "the default stream"} <= names
    (unnamed,) = names - {"stream first", 'stream "copies"', "the default stream"}
    assert unnamed.startswith("a stream made at p") and unnamed.endswith(".py:6")


def test_streams_of_one_name_have_their_lines(reports_of):
    code = """
    def first(x):
        s = torch.Stream(device="openreg")
        with s:
            x.add_(1)

    def second(x):
        s = torch.Stream(device="openreg")
        with s:
            x.add_(1)

    x = torch.ones(9, device="openreg")
    torch.accelerator.synchronize()
    first(x)
    second(x)
    """
    text = str(reports_of(code)[-1])
    assert "stream s, made at" in text.split("second")[0]
    assert {line.split(", made at ")[1].split(":")[1][0] for line in text.splitlines()
            if ", made at " in line} == {"4", "9"}  # fmt: skip


def test_memory_of_a_missing_record_stream_is_the_tensor_that_was_freed(reports_of):
    (report,) = reports_of(
        """
        side = torch.Stream(device="openreg")
        a = torch.ones(1000, device="openreg")
        b = torch.ones(1000, device="openreg")
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            a.add_(b)
        b.record_stream(side)
        del a, b
        c = torch.zeros(1000, device="openreg")
        d = torch.zeros(1000, device="openreg")
        """
    )
    assert report.subject.name == "a" and report.subject.made.line == 4
    assert codes(report) == [[("after", 8, "a.record_stream(side)")]]
    assert "a is freed after the first, while stream side may still use it" in str(report)


def test_reports_of_one_missing_line_are_one_mistake(reports_of):
    loop = """
    x = torch.zeros(1000, device="openreg")
    y = torch.zeros(1000, device="openreg")
    for step in range(10):
        x.add_(1)
        y.add_(1)
        side = torch.Stream(device="openreg")
        with side:
            z = x * 2
            w = y + 1
        torch.accelerator.current_stream().wait_stream(side)
    """
    reports = reports_of(loop)
    assert len(reports) > 5 and len({report.mistake for report in reports}) == 1
    again = reports_of(loop.replace("range(10)", "range(2)"))
    assert len({hash(report.mistake) for report in again}) == 1
    both = reports_of(loop + "    torch.accelerator.synchronize()\n    with side:\n        z = 1\n"
                      "    x.add_(1)\n    with side:\n        x.add_(1)\n")  # fmt: skip
    assert len({report.mistake for report in both}) == 2


def test_forward_line_under_hooks_is_the_operators(reports_of):
    code = """
    import functools
    from torch.autograd.graph import saved_tensors_hooks

    def pack(t):
        return (t * 1).cpu()

    class Pack:
        def __call__(self, t):
            return pack(t)

    for hook in (pack, functools.partial(pack), Pack()):
        x = torch.ones(64, 64, device="openreg")
        w = torch.ones(64, 64, device="openreg", requires_grad=True)
        side = torch.Stream(device="openreg")
        with saved_tensors_hooks(hook, lambda t: t.to("openreg")):
            y = x @ w  # here
        y.backward(torch.ones_like(y))
        with side:
            w.grad.mul_(2)
        torch.accelerator.synchronize()
    """
    reports = reports_of(code)
    assert [report.earlier.line.line for report in reports] == [18] * 3
    text = " ".join(str(reports[0]).split())
    assert "in the backward pass of this line, MmBackward0, run by p" in text
    assert reports[0].subject.name == "w.grad"


def test_help_is_before_the_line_that_has_the_names(reports_of):
    code = """
    class Copier:
        def __init__(self):
            self.stream = torch.Stream(device="openreg")

        def fetch(self, host):
            with self.stream:
                return host.to("openreg", non_blocking=True)

    def use(batch):
        return batch * 2

    copier = Copier()
    batch = copier.fetch(torch.ones(9).pin_memory())
    use(
        batch
    )
    """
    (report,) = reports_of(code)
    wait = "torch.accelerator.current_stream().wait_stream(copier.stream)"
    assert codes(report) == [[("before", 16, wait)]]
    assert report.later.line.line == 12 and "called from p" in str(report)


def test_help_is_after_the_call_that_makes_the_earlier_access(reports_of):
    (report,) = reports_of("""
        side, other = torch.Stream(device="openreg"), torch.Stream(device="openreg")
        x = torch.zeros(9, device="openreg")
        torch.openreg.synchronize()
        def produce():
            with other:
                x.add_(1)
        def use():
            with side:
                produce()
                x.mul_(2)
        use()
        """)
    assert codes(report) == [[("before", 12, "side.wait_stream(other)")]]


def test_help_binds_no_name_that_the_program_has(reports_of):
    (report,) = reports_of("""
        class Pool:
            streams = {"k": {"a": {"b": {"c": torch.Stream(device="openreg")}}}}
            def next(self):
                return self.streams["k"]["a"]["b"]["c"]
        def work(pool):
            done = 0
            x = torch.zeros(9, device="openreg")
            torch.openreg.synchronize()
            with pool.next():
                x.add_(1)
            return x * 2
        work(Pool())
        """)
    assert [code for way in codes(report) for *_, code in way] == [
        "done2 = torch.accelerator.current_stream().record_event()",
        "torch.accelerator.current_stream().wait_event(done2)",
    ]


def test_help_has_no_name_of_a_comprehension(reports_of):
    (report, *_) = reports_of("""
        side = torch.Stream(device="openreg")
        def sums():
            batches = [torch.ones(100_000, device="openreg") for _ in range(2)]
            side.wait_stream(torch.accelerator.current_stream())
            with side:
                outs = [b.sum() for b in batches]
            del batches
            return outs, torch.zeros(100_000, device="openreg")
        sums()
        """)
    assert codes(report) == [[("after", 5, "for item in batches:\n    item.record_stream(side)")]]


def test_names_of_a_late_race_are_not_those_of_a_later_line(reports_of):
    (report,) = reports_of("""
        load, work = torch.Stream(device="openreg"), torch.Stream(device="openreg")
        here = torch.accelerator.current_stream()
        table, spare = (torch.zeros(8, 4, device="openreg") for _ in range(2))
        index = torch.tensor([0, 5], device="openreg").add_(0)
        load.wait_stream(here), work.wait_stream(here)
        with torch.openreg.testing.gate() as gate:
            gate.wait(load)
            with load:
                table.index_fill_(0, index, 1)
            with work:
                table.sum()
            load, work = work, load
            table, spare = spare, table
        torch.openreg.synchronize()
        """)
    assert report.subject.name == "table"
    assert (report.earlier.name, report.later.name) == ("load", "work")


def test_report_survives_objects_that_cannot_be_asked(reports_of):
    (report,) = reports_of("""
        import weakref
        gone = weakref.proxy(set())
        x = torch.zeros(9, device="openreg")
        with torch.Stream(device="openreg"):
            x.add_(1)
        """)
    assert report.subject.name == "x"


def test_report_is_not_lost_where_its_help_fails(reports_of, monkeypatch):
    monkeypatch.setattr(_findings, "advise", lambda *facts: 1 / 0)
    (report,) = reports_of("""
        x = torch.zeros(9, device="openreg")
        side = torch.Stream(device="openreg")
        with side:
            x.add_(1)
        """)
    assert report.help == () and "wait" in report.text()


def test_help_is_where_the_stream_has_its_name(reports_of):
    code = """
    class Source:
        def __init__(self, items):
            self.items, self.stream = items, torch.Stream(device="openreg")
            {first}

        def load(self):
            with self.stream:
                self.item = self.items.pop() + 1
            return self.item

        def __iter__(self):
            while self.items:
                {start}
                yield self.item
                {more}

    def use(source):
        for item in source:
            item.mul_(2)

    def one(items):
        source = Source(items)
        source.load()
        return [source.item]

    x = [torch.ones(9, device="openreg") for _ in range(3)]
    torch.accelerator.synchronize()
    {run}
    """
    wait = "torch.accelerator.current_stream().wait_stream(self.stream)"
    make, nothing = "use(iter(Source(x)))", {"first": "pass", "start": "pass", "more": "pass"}
    load = "self.load()"
    for loads in ({"start": load}, {"first": load, "more": load}):
        (report, *_) = reports_of(code.format(**{**nothing, **loads}, run=make))
        assert codes(report) == [[("before", 16, wait)]], loads
    turns = "[item.mul_(2) for item in Source(x)]"
    (report, *_) = reports_of(code.format(**{**nothing, "start": load}, run=turns))
    assert codes(report) == [[("before", 16, wait)]]
    # Its turn may come by either.
    several = {**nothing, "start": load, "more": "yield self.item"}
    (report, *_) = reports_of(code.format(**several, run=make))
    assert 16 not in [help.line for help in report.help]
    # What the function does last is for later: there is no place that loses nothing.
    last = {**nothing, "run": "use(one(x))"}
    (report,) = reports_of(code.format(**last))
    default = "torch.openreg.default_stream().wait_stream(self.stream)"
    assert codes(report) == [[("after", 10, default)]]
    (report,) = reports_of(code.format(**last).replace("return self.item", ""))
    assert codes(report) == []


def test_name_with_an_index_is_known_in_its_function_alone(tmp_path):
    path = str(tmp_path / "p.py")
    Path(path).write_text("class A:\n  def f(self, i):\n    pass\n  def g(self):\n    pass\n")
    lines = [_frames.Frame(path, line, name) for line, name in ((3, "f"), (5, "g"))]
    known = {
        name: _names.is_known_at(name, *lines) for name in ("self.s", "self.s[0]", "self.s[i]")
    }
    assert known == {"self.s": True, "self.s[0]": True, "self.s[i]": False}
    assert _names.is_known_at("self.s[i]", lines[0], lines[0])


def test_items_of_a_list_are_recorded_where_it_is_made(reports_of):
    code = """
    def load(side):
        with side:
            items = [torch.ones(size, device="openreg") for size in (99, 99)]
        torch.accelerator.current_stream().wait_stream(side)
        return items

    side = torch.Stream(device="openreg")
    torch.stack(load(side)).sum()
    with side:
        other = torch.ones(99, device="openreg")
    torch.accelerator.synchronize()
    """
    record = "for item in items:\n    item.record_stream(torch.openreg.default_stream())"
    (report, *_) = reports_of(code)
    assert codes(report) == [[("after", 5, record)]]


def test_help_for_the_host_has_both_waits(reports_of):
    reports = reports_of(
        """
        copies = torch.Stream(device="openreg:1")
        with copies:
            x = torch.ones(9, device="openreg:1")
            host = x.to("cpu", non_blocking=True)
            y = x * 2
        total = host.numpy().sum()
        """
    )
    assert codes(reports[0]) == [
        [
            ("after", 6, "copied = torch.accelerator.current_stream(1).record_event()"),
            ("before", 8, "copied.synchronize()"),
        ],
        [("before", 8, "copies.synchronize()")],
    ]
    assert reports[0].title == "data race on pinned host memory over host, 36 bytes of float32"


def test_help_has_no_name_that_its_line_does_not_know(reports_of):
    code = """
    class Inner:
        def run(self, x):
            x.add_(1)

    class Outer:
        def __init__(self):
            self.stream = torch.Stream(device="openreg")

        def use(self, x):
            with self.stream:
                x.add_(1)
            return Inner().{run}(x)

        def run(self, x):
            with self.stream:
                return x.mul_(2)

    def keep(x, outer):
        outer.run(x)
        del outer
        return x

    x = torch.ones(9, device="openreg")
    outer = Outer()
    torch.accelerator.synchronize()
    {use}
    """
    wait = "torch.accelerator.current_stream().wait_stream(self.stream)"
    (report,) = reports_of(code.format(run="run", use="outer.use(x)"))
    assert codes(report) == [[("before", 14, wait)]]  # `self` of line 5 has no stream
    (report,) = reports_of(code.format(run="run", use="keep(x, Outer()).sub_(1)"))
    assert codes(report) == []  # no line has a name for both
    said = ":18, and let the default stream wait for it before the second."
    assert said in " ".join(str(report).split()) and report.summary().endswith(said)


def test_event_of_a_help_is_recorded_and_waited_for_in_one_function(reports_of):
    code = """
    def pair(x, streams):
        for stream in streams:
            with stream():
                y = x + 1
            {}
            del stream
        return y.add_(1)

    x = torch.ones(9, device="openreg")
    torch.accelerator.synchronize()
    pair(x, [lambda: torch.Stream(device="openreg")])
    """
    (report,) = reports_of(code.format("y.add_(1)"))
    assert codes(report) == [[
        ("after", 6, "done = torch.accelerator.current_stream().record_event()"),
        ("before", 7, "torch.accelerator.current_stream().wait_event(done)"),
    ]]  # fmt: skip
    (report,) = reports_of(code.format("pass"))
    assert codes(report) == []  # in a loop that is over: the event is the last stream's


def test_host_wait_is_in_the_function_that_calls_both(reports_of):
    code = """
    def to_host(values):
        return [value.to("cpu", non_blocking=True) for value in values]

    def total(values):
        return sum(value.numpy().sum() for value in values)

    x = torch.ones(9, device="openreg")
    values = to_host([x])
    {}
    total(values)
    """
    (report,) = reports_of(code.format("x.add_(1)"))
    event = "copied = torch.accelerator.current_stream().record_event()"
    assert codes(report)[0] == [("after", 10, event), ("before", 12, "copied.synchronize()")]
    (report,) = reports_of(code.format(""))
    wait = "torch.accelerator.current_stream().synchronize()"
    assert codes(report) == [[("before", 12, wait)]]  # an event would wait for no less
    code = """
    def fill(buffer):
        buffer.add_(1)
        return buffer.to("openreg", non_blocking=True)

    buffer = torch.zeros(9, pin_memory=True)
    kept = fill(buffer)
    kept = fill(buffer)
    """
    (report,) = reports_of(code)  # other lines may call fill()
    assert codes(report) == [[("before", 4, wait)]]


def test_host_waits_for_the_event_that_the_program_records(reports_of):
    code = """
    class Settings:
        def __init__(self):
            self.host = torch.zeros(9, pin_memory=True)
            self.copied = torch.Event(device="openreg")

        def send(self):
            x = self.host.to("openreg", non_blocking=True)
            {}
            return x

        def change(self):
            self.host.add_(1)

    settings = Settings()
    x = settings.send()
    settings.change()
    """
    for record in (
        "self.copied.record()",
        "self.copied = torch.accelerator.current_stream().record_event()",
    ):
        (report,) = reports_of(code.format(record))
        assert codes(report)[0] == [("before", 14, "self.copied.synchronize()")]
    (report,) = reports_of(code.format("self.copied.record(torch.Stream(device='openreg'))"))
    assert "self.copied" not in report.summary()


def test_help_has_the_modules_name_of_a_stream(reports_of):
    code = """
    def change(x):
        x.add_(1)

    def use(x, stream):
        with stream:
            y = x * 2
        change(x)

    side = torch.Stream(device="openreg")
    {}
    x = torch.ones(9, device="openreg")
    side.wait_stream(torch.accelerator.current_stream())
    use(x, side)
    """
    wait = "torch.accelerator.current_stream().wait_stream({})"
    (report,) = reports_of(code.format("pass"))
    assert codes(report) == [[("before", 4, wait.format("side"))]]
    (report,) = reports_of(code.format("side = side"))  # it may hold another one at another time
    assert codes(report) == [[("before", 9, wait.format("stream"))]]


def test_tensor_to_record_has_the_name_of_the_line(reports_of):
    reports = reports_of(
        """
        class Unit:
            def make(self, size):
                self.weight = torch.ones(size, device="openreg")

        def use(x, unit, side):
            with side:
                return x @ unit.weight

        def copy(tensor, host, side):
            with side:
                host.copy_(tensor.detach(), non_blocking=True)

        unit, side = Unit(), torch.Stream(device="openreg")
        x = torch.ones(8, 8, device="openreg")
        model = torch.nn.Sequential(torch.nn.ReLU())
        unit.make((8, 8))
        side.wait_stream(torch.accelerator.current_stream())
        y = use(x, unit, side)
        unit.make((8, 8))
        copy(model(x), torch.empty(8, 8).pin_memory(), side)
        z = x + 1

        def load(linear):
            linear.weight.data = torch.ones(8, 8, device="openreg")

        linear = torch.nn.Linear(8, 8, device="openreg").requires_grad_(False)
        load(linear)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            linear(torch.ones(8, 8, device="openreg"))
        load(linear)
        load(linear)
        """
    )
    records = {r.help[0][2:]: r.subject.name for r in reports if r.missing.kind == "record"}
    assert list(records) == [
        (9, "unit.weight.record_stream(side)"),
        (13, "tensor.record_stream(side)"),
        (26, "linear.weight.data.record_stream(side)"),
    ]
    assert [*records.values()] == ["self.weight", "tensor", "linear.weight.data"]


def test_python_in_a_backward_pass_is_shown_at_its_own_line(reports_of):
    (report,) = reports_of(
        """
        class Scale(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, total):
                ctx.total = total
                return x * 1  # forward

            @staticmethod
            def backward(ctx, grad):
                with side:
                    ctx.total.add_(1)
                return grad, None

        side = torch.Stream(device="openreg")
        total = torch.zeros(9, device="openreg")
        x = torch.ones(9, device="openreg", requires_grad=True)
        torch.accelerator.synchronize()
        Scale.apply(x, total).sum().backward()
        total.mul_(2)
        """
    )
    assert report.earlier.line.line == 12 and report.earlier.is_python
    assert "backward pass, ScaleBackward, of p" in " ".join(str(report).split())


def test_statements_around_a_line_of_a_long_file_are_those_of_the_whole():
    filename = nn.modules.module.__file__
    whole = _parsing.tree(filename)
    for line in range(1, len(linecache.getlines(filename)), 67):
        found, expected = _parsing.path(filename, line), _parsing._descend(whole, line)
        assert [(type(n), n.lineno) for n in found] == [(type(n), n.lineno) for n in expected], line
        ends = [ast.dump(path[-1]) for path in (found, expected) if path]
        assert len(set(ends)) < 2 or isinstance(found[-1], ast.ClassDef), line


def test_report_keeps_nothing_alive():
    def run(held):
        side, x, y = openreg.Stream(), torch.ones(9, device="openreg"), []
        seen = locals() if held else None
        with side:
            x.add_(1)
        openreg.synchronize()  # the task has let go of it
        kept = weakref.ref(x)
        del x
        assert held or kept() is None
        assert seen is None or seen["y"] is y

    run(held=False)
    run(held=True)
    assert [report.subject.name for report in sanitizer.reports()] == ["x", "x"]


def test_memory_of_a_captured_copy_and_of_a_gradient_has_words(reports_of):
    (report,) = reports_of(
        """
        x, host = torch.ones(9, device="openreg"), torch.ones(9, pin_memory=True)
        graph = torch.openreg.Graph()
        with torch.openreg.graph(graph):
            x.copy_(host, non_blocking=True)
        graph.replay()
        host.add_(1)
        """
    )
    assert "reads host (copy)" in str(report)
    reports = reports_of(
        """
        side, w = torch.Stream(device="openreg"), torch.ones(999, device="openreg")
        w.requires_grad_()

        def step(parameter):
            side.wait_stream(torch.accelerator.current_stream())
            with side:
                (parameter.grad * 2).record_stream(side)
            parameter.grad = None

        w.register_post_accumulate_grad_hook(step)
        (w * 2).sum().backward()
        kept = [torch.ones(999, device="openreg") for _ in range(4)]
        """
    )
    helps = {report.help[0].code for report in reports if report.subject.name == "parameter.grad"}
    assert helps == {"parameter.grad.record_stream(side)"}


# ---- layout ----


def test_message_is_within_a_hundred_columns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / ("d" * 30) / ("e" * 30) / "f.py"
    file.parent.mkdir(parents=True)
    file.write_text(f"x = [{', '.join('abcdefg' for _ in range(30))}]\n")
    assert _messages.short_path(str(file), 40) == f".../{'e' * 30}/f.py"
    assert _messages.short_path(str(tmp_path / "g.py")) == "g.py"
    frame = sanitizer.Frame(str(file), 1, "<module>")
    text = _messages.message("word " * 40, [_messages.Place(frame, "note " * 40)], ["text " * 40])
    assert max(map(len, text.splitlines())) <= _messages.WIDTH
    assert f"\n  {'d' * 30}/{'e' * 30}/f.py:1\n      x = [abcdefg, " in text
    assert text.count("abcdefg") == 30 and text.count("word") == text.count("note") == 40


def test_colour_follows_the_environment(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    assert not _messages.wants_colour(io.StringIO())
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert _messages.wants_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not _messages.wants_colour(io.StringIO())
    plain, coloured = (_messages.message("t", kind="error", colour=c) for c in (False, True))
    assert plain == "error: t" and coloured == "\033[1;31merror: \033[0m\033[1mt\033[0m"
    assert torch.openreg.sanitizer.reports() == []
