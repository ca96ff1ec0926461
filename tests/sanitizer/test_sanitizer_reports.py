"""What the reports of the sanitizer say: lines, names of streams, backward passes, pictures."""

import inspect
import sys
import threading
import time
from xml.etree import ElementTree

import pytest
import torch
from race_pairs import DEVICE, openreg, sanitizer, stream_pair

pytestmark = [pytest.mark.usefixtures("watching"), pytest.mark.filterwarnings("ignore")]


def lineno():
    return inspect.currentframe().f_back.f_lineno


def race(side):
    x = torch.ones(100, device=DEVICE)
    with side:
        x.mul_(2)
    (report,) = sanitizer.reports()
    return report


# ---- stacks ----


def test_report_counts_frames_of_packages():
    side = openreg.Stream()
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4)).to(DEVICE)
    layer[0].weight.data.fill_(1)
    with side:
        layer(torch.ones(2, 4, device=DEVICE))
    report = next(r for r in sanitizer.reports() if r.later.operator == "aten::addmm")
    text = str(report.later)  # of report.details()
    assert "site-packages" not in str(report)
    assert "site-packages" not in text and "called from, through " in text
    assert text.splitlines()[0].endswith(" frames of torch")
    assert text.splitlines()[1].startswith(f'    File "{__file__}", line ')
    assert report.later.line.filename == __file__
    assert " frames of _pytest and pluggy" in text


def test_report_shows_frames_of_packages_if_there_are_no_others():
    report = race(openreg.Stream())
    inside = sanitizer.Frame(torch.nn.__file__, 7, "forward")
    assert str(inside) in str(report.later._replace(stack=(inside,)))


# ---- streams ----


def test_report_names_a_stream_by_the_line_that_made_it():
    side = openreg.Stream()
    line = lineno() - 1
    report = race(side)
    assert report.later.where.endswith(f"of openreg:0 (made at {__file__}:{line})")
    assert f"{side.native_handle:#x}" in report.later.where
    assert report.earlier.where == "the default stream of openreg:0"


def test_report_names_a_torch_stream_by_its_line():
    side = torch.Stream(device=DEVICE)
    assert race(side).later.where.endswith(f"(made at {__file__}:{lineno() - 1})")


def test_report_names_a_stream_by_its_name():
    report = race(openreg.Stream(name="copies"))
    assert report.later.where == 'stream "copies" of openreg:0'
    assert 's1 stream "copies" of openreg:0' in report.advice
    with pytest.raises(TypeError, match="name is a string, not 7"):
        openreg.Stream(name=7)


def test_report_does_not_name_a_stream_by_an_earlier_owner():
    first = openreg.Stream(name="copies")
    while openreg.Stream() != first:
        pass
    line = lineno() - 2
    assert race(first).later.where.endswith(f"(made at {__file__}:{line})")


# ---- backward passes ----


def test_report_of_a_backward_pass_has_the_forward_line():
    side = openreg.Stream()
    x = torch.ones(100, device=DEVICE, requires_grad=True)
    w = torch.ones(100, device=DEVICE)
    forward = lineno() + 1
    y = (x * w).sum()
    side.wait_stream(openreg.current_stream())
    with side:
        w.data.add_(1)
    y.backward()
    backward = lineno() - 1
    (report,) = sanitizer.reports()
    access = report.later
    assert access.operator == "aten::mul.Tensor" and access.node == "MulBackward0"
    assert (access.line.filename, access.line.line) == (__file__, forward)
    own = [frame for frame in access.stack if frame.filename == __file__]
    assert own[0].line == backward
    text = report.details()
    assert "in a backward pass as MulBackward0\n  of the forward's operator called from" in text
    assert f'"{__file__}", line {forward}' in text and f'"{__file__}", line {backward}' in text
    assert "no Python frames" not in text


def test_report_has_an_earlier_access_of_a_backward_pass():
    side = openreg.Stream()
    x = torch.ones(100, device=DEVICE, requires_grad=True)
    y = (x * 2).sum()
    y.backward()
    backward = lineno() - 1
    with side:
        x.grad.add_(1)
    (report,) = sanitizer.reports()
    assert report.earlier.node and report.later.node is None
    assert any(frame.line == backward for frame in report.earlier.stack)


def test_report_has_the_caller_of_one_of_two_backward_passes():
    side, inside = openreg.Stream(), threading.Event()
    run = torch.autograd.graph._engine_run_backward.__code__

    def loss(x):
        return (x * 2).sum()

    def other():
        inside.wait(60)
        loss(torch.ones(100, device=DEVICE, requires_grad=True)).backward()

    def hold(grad):  # until both threads wait for their passes
        inside.set()
        while [frame.f_code for frame in sys._current_frames().values()].count(run) < 2:
            time.sleep(0.001)

    x = torch.ones(100, device=DEVICE, requires_grad=True)
    y = loss(x)
    y.register_hook(hold)
    thread = threading.Thread(target=other)
    thread.start()
    y.backward()
    backward = lineno() - 1
    thread.join()
    with side:
        x.grad.add_(1)
    (report,) = sanitizer.reports()
    assert next(f.line for f in report.earlier.stack if f.filename == __file__) == backward


def test_report_names_a_custom_functions_backward():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.w = w
            return x * w

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.w, None

    side = openreg.Stream()
    x = torch.ones(100, device=DEVICE, requires_grad=True)
    w = torch.ones(100, device=DEVICE)
    y = Twice.apply(x, w).sum()
    side.wait_stream(openreg.current_stream())
    with side:
        w.add_(1)
    y.backward()
    (report,) = sanitizer.reports()
    assert report.later.node == "TwiceBackward"
    assert any(f.name == "backward" and f.filename == __file__ for f in report.later.stack)


# ---- advice ----


def test_report_of_a_host_access_advises_both_waits():
    host = torch.empty(100, pin_memory=True)
    host.copy_(torch.ones(100, device=DEVICE), non_blocking=True)
    host.sum()
    (report,) = sanitizer.reports()
    assert report.advice.startswith("s.synchronize() before aten::sum")
    assert "or e = s.record_event() after aten::copy_ and e.synchronize() before" in report.advice


# ---- possible races ----


def rows(first, second):
    """A stream beside the current one, a cache of eight rows, indices of some of them, values."""
    here, side = stream_pair()
    cache = torch.zeros(8, 16, device=DEVICE)
    index = torch.tensor(first, device=DEVICE)
    other = torch.tensor(second, device=DEVICE)
    values = torch.ones(len(first), 16, device=DEVICE)
    openreg.synchronize()
    side.wait_stream(here)
    return side, cache, index, other, values


WRITES = {
    "index_copy_": lambda cache, index, values: cache.index_copy_(0, index, values),
    "index_put_": lambda cache, index, values: cache.__setitem__(index, values),
    "index_add_": lambda cache, index, values: cache.index_add_(0, index, values),
    "index_fill_": lambda cache, index, values: cache.index_fill_(0, index, 1),
    "scatter_": lambda cache, index, values: cache.scatter_(0, index, values),
}


@pytest.mark.parametrize("kind", WRITES)
def test_row_accesses_are_distinguished_by_their_indices(kind):
    def run(first, second):
        sanitizer.clear()
        side, cache, index, other, values = rows(first, second)
        if kind == "scatter_":
            index = index[:, None].expand(-1, 16).contiguous()
            other = other[:, None].expand(-1, 16).contiguous()
            openreg.synchronize()
        WRITES[kind](cache, index, values)
        with side:
            WRITES[kind](cache, other, values)
        openreg.synchronize()
        return [report.kind for report in sanitizer.reports()]

    assert run([0, 1], [4, 7]) == []
    assert run([0, 1], [1, 7]) == ["race"]


def test_row_reads_race_only_with_writes_of_their_rows():
    side, cache, index, other, values = rows([0, 1], [5, 6])
    cache.index_select(0, index)
    torch.nn.functional.embedding(index, cache)
    cache[index]
    with side:
        cache[4].fill_(1)
        cache.index_copy_(0, other, values)
    assert sanitizer.reports() == []
    with side:
        cache[1].fill_(1)
    assert [report.kind for report in sanitizer.reports()] == ["race"]


def test_race_by_a_mask_is_a_possible_one():
    side, cache, _, _, values = rows([0, 1], [5, 6])
    cache.index_put_((torch.arange(len(cache), device=DEVICE) > 5,), values[0, 0])
    with side:
        cache[4].fill_(1)
    (report,) = sanitizer.reports()
    assert report.kind == "possible race" and report.earlier.some and not report.later.some
    text = report.details()
    assert text.startswith("possible data race 1 on openreg:0") and "may share bytes" in text
    assert "writes some of" in text
    assert str(report).startswith("error: possible data race on openreg:0 over cache, 64 bytes of ")
    assert "the default stream writes some of cache" in str(report)
    assert "They may touch the same bytes: " in str(report)


def test_possible_races_can_be_switched_off():
    sanitizer.enable("warn", possible=False)
    side, cache, _, _, values = rows([0, 1], [5, 6])
    cache.index_put_((torch.arange(len(cache), device=DEVICE) > 5,), values[0, 0])
    with side:
        cache[4].fill_(1)
    assert sanitizer.reports() == []
    with side:
        values.fill_(1)
    assert [report.kind for report in sanitizer.reports()] == ["race"]


# ---- custom operators ----


def test_report_of_a_custom_operator_follows_its_schema():
    @torch.library.custom_op("sanitizer_reports::scale", mutates_args=("y",), device_types=DEVICE)
    def scale(x: torch.Tensor, y: torch.Tensor) -> None:
        y.copy_(x * 2)

    side = openreg.Stream()
    x = torch.ones(100, device=DEVICE)
    y = torch.ones(100, device=DEVICE)
    with side:
        scale(x, y)
    found = {(r.later.operator, r.later.write) for r in sanitizer.reports()}
    assert ("aten::copy_", True) in found and ("aten::mul.Tensor", False) in found


# ---- pictures ----


def picture(side):
    here = openreg.current_stream()
    side.wait_stream(here)
    x = torch.ones(100, device=DEVICE)
    with side:
        x.mul_(2)
    (report,) = sanitizer.reports()
    return report


def test_report_picture_as_text_has_streams_and_accesses():
    report = picture(openreg.Stream(name="side"))
    first, second, *rest = report.picture().splitlines()
    assert first.startswith("the default stream  ") and "1>" in first and "A" in first
    assert second.startswith('stream "side" ') and ">1" in second and "B" in second
    # The wait came too early: before the first access.
    assert first.index("1>") < second.index(">1") < first.rindex("A") < second.rindex("B")
    assert rest[0] == "1> is recorded, >1 waits for it"
    assert rest[1].startswith("A: the default stream writes x (")
    missing = " ".join(line.strip() for line in rest[3:])
    assert missing == f"A ..> B is missing: {report.help[0]}"


def test_report_picture_is_saved_as_text_and_svg(tmp_path):
    report = picture(openreg.Stream(name="<side>"))
    report.save(tmp_path / "race.txt")
    assert (tmp_path / "race.txt").read_text() == report.picture() + "\n"
    report.save(str(tmp_path / "race.svg"))
    root = ElementTree.parse(tmp_path / "race.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in root.iter(f"{space}text")]
    assert {'stream "<side>"', "A writes x", "B writes x"} <= set(texts)
    *waits, last = [path.get("class") for path in root.iter(f"{space}path")]
    assert set(waits) == {"event"} and last == "missing"
    (missing,) = root.iterfind(f".//{space}path[@class='missing']/../{space}title")
    assert missing.text == f"Missing: {report.help[0]}"
    with pytest.raises(ValueError, match=r"ends in .html, .svg or .txt, not '.png'"):
        report.save(str(tmp_path / "race.png"))


def test_report_picture_has_a_row_for_a_third_stream():
    third, side = openreg.Stream(name="third"), openreg.Stream(name="side")
    x = torch.ones(100, device=DEVICE)
    with third:
        torch.zeros(3, device=DEVICE)
    side.wait_stream(third)
    with side:
        x.mul_(2)
    (report,) = sanitizer.reports()
    assert report.picture().splitlines()[2].startswith('stream "third" ')


# ---- the first one ----


def test_first_report_imports_no_compiler(run):
    code = """
        import sys
        import torch

        x = torch.ones(100, device="openreg")
        with torch.openreg.Stream():
            x.mul_(2)
        assert "torch._inductor" not in sys.modules and "_inductor" not in vars(torch)
        import torch._inductor
        assert torch.openreg.sanitizer.reports()[0].later.stack
        assert vars(torch)["_inductor"] is torch._inductor
    """
    done = run(code, {"OPENREG_SANITIZER": "warn"}, fresh=True)
    assert done.code == 0 and "data race on" in done.err, done.err
