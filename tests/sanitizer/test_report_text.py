"""The text of a report: names from the program, places with their source, lines to paste."""

import io
import itertools
import runpy
import textwrap
import weakref

import pytest
import torch
from race_pairs import openreg, sanitizer

from torch_openreg.openreg import _messages

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
    assert "in the backward pass, MmBackward0, from p" in str(reports[0])
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


def test_help_for_the_host_has_both_waits(reports_of):
    reports = reports_of(
        """
        copies = torch.Stream(device="openreg:1")
        with copies:
            x = torch.ones(9, device="openreg:1")
            host = x.to("cpu", non_blocking=True)
        total = host.numpy().sum()
        """
    )
    assert codes(reports[0]) == [
        [("before", 7, "copies.synchronize()")],
        [
            ("after", 6, "copied = torch.accelerator.current_stream(1).record_event()"),
            ("before", 7, "copied.synchronize()"),
        ],
    ]
    assert reports[0].title == "data race on pinned host memory over host, 36 bytes of float32"


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
