"""``sanitizer.enable(initcheck=True)``: reads of device memory that nothing has written."""

import inspect

import pytest
import torch
from race_pairs import DEVICE, openreg, sanitizer

pytestmark = pytest.mark.usefixtures("watching")


@pytest.fixture(autouse=True)
def initcheck(watching):
    sanitizer.enable("warn", initcheck=True)
    yield
    sanitizer.enable("warn", initcheck=False)


def uninitialized(function):
    """The operators that are reported."""
    sanitizer.clear()
    function()
    assert all(report.kind == "uninitialized" for report in sanitizer.reports())
    return [report.later.operator for report in sanitizer.reports()]


def empty(*shape, **options):
    return torch.empty(*shape, device=DEVICE, **options)


def ones(*shape, **options):
    return torch.ones(*shape, device=DEVICE, **options)


def part(x, index, value=1.0):
    x[index] = value
    return x


@pytest.mark.filterwarnings("ignore")
def test_initcheck_report_has_both_stacks():
    line = inspect.currentframe().f_lineno
    x = torch.empty(100, device=DEVICE)
    x + 1
    (report,) = sanitizer.reports()
    assert report.kind == "uninitialized" and report.later.operator == "aten::add.Tensor"
    assert report.earlier.operator == "allocation"
    assert (report.begin, report.end) == (x.data_ptr(), x.data_ptr() + 400)
    for access, at in ((report.earlier, line + 1), (report.later, line + 2)):
        assert (access.line.filename, access.line.line) == (__file__, at)
    text = str(report)
    assert text.startswith("error: read of memory that nothing has written, on openreg:0 over x, ")
    assert report.help[0][0::3] == ("in place of", "x = torch.zeros(100, device=DEVICE)")
    text = report.details()
    assert text.startswith("read 1 of memory that nothing has written, on openreg:0, ")
    assert "allocation on the default stream of openreg:0 handed out" in text
    assert "a write of these bytes before aten::add.Tensor" in text
    assert "A: the default stream allocates x" in report.picture()


READS = {
    "whole": lambda: empty(10).sum(),
    "part": lambda: part(empty(10), slice(0, 9)).sum(),
    "row": lambda: part(empty(4, 4), 1)[2].sum(),
    "column": lambda: part(empty(4, 4), (slice(None), 1))[:, 2].sum(),
    "step": lambda: part(empty(16), slice(0, None, 2))[1::2].sum(),
    "in place": lambda: empty(10).add_(1),
    "to the host": lambda: empty(10).cpu(),
    "argument of out": lambda: torch.add(empty(4), 1, out=empty(4)),
    "list": lambda: torch._foreach_add([torch.ones(3, device=DEVICE), empty(3)], 1),
    "rows of known indices": lambda: part(empty(4, 4), 1).index_select(
        0, torch.tensor([1, 2], device=DEVICE)
    ),
    "copy": lambda: part(empty(4, 4), 1).clone().sum(),
    "another dtype": lambda: empty(3).double(),
    "another device": lambda: empty(3).to("openreg:1").sum(),
    "gradient": lambda: torch.ones(3, device=DEVICE, requires_grad=True).mul(2).backward(empty(3)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", READS)
def test_initcheck_reports_a_read_of_unwritten_memory(kind):
    assert len(uninitialized(READS[kind])) >= 1


def rows():
    cache = empty(8, 4)
    index = torch.tensor([1, 5], device=DEVICE)
    openreg.synchronize()
    cache.index_copy_(0, index, torch.ones(2, 4, device=DEVICE))
    return cache.index_select(0, index), cache[5].clone()


def train():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.LazyLinear(5), torch.nn.Dropout(),
    ).to(DEVICE)  # fmt: skip
    data = torch.rand(2, 3, 8, 8, device=DEVICE)
    model(data)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(data).logsumexp(1).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
        optimizer.step()


def resized():
    x = torch.ones(3, device=DEVICE)
    x.resize_(2).add_(1)
    torch.add(x, 1, out=empty(0)).sum()


RIGHT = {
    "filled": lambda: empty(10).fill_(1).sum(),
    "zeroed": lambda: empty(10).zero_().sum(),
    "random": lambda: empty(10).normal_().uniform_().sum(),
    "copied": lambda: empty(10).copy_(torch.ones(10)).sum(),
    "copied later": lambda: empty(10).copy_(torch.ones(10).pin_memory(), non_blocking=True).sum(),
    "out": lambda: torch.add(torch.ones(4, device=DEVICE), 1, out=empty(4)).sum(),
    "out of another size": resized,
    "part": lambda: part(empty(10), slice(0, 9))[:9].sum(),
    "column": lambda: part(empty(4, 4), (slice(None), 1))[:, 1].clone(),
    "steps": lambda: part(part(empty(16), slice(0, None, 2)), slice(1, None, 2)).sum(),
    "turned": lambda: empty(4, 6).t().copy_(torch.ones(6, 4, device=DEVICE)).sum(),
    "expanded": lambda: empty(4, 1).fill_(1).expand(4, 5).sum(),
    "metadata": lambda: (empty(4).shape, torch.empty_like(empty(4)), torch.zeros_like(empty(4))),
    "padding": lambda: torch.ones(3, device=DEVICE, dtype=torch.uint8).sum(),
    "rows": rows,
    "gathered": lambda: part(empty(4, 4), 1).gather(0, ones(1, 4, dtype=torch.int64)),
    "copy": lambda: part(empty(4, 4), 1).clone()[1].sum(),
    "turned copy": lambda: part(empty(4, 4), 1).t().contiguous()[:, 1].sum(),
    "masked": lambda: empty(4).masked_fill_(ones(4, dtype=torch.bool), 1).sum(),
    "cat": lambda: torch.cat([torch.ones(3, device=DEVICE), torch.ones(2, device=DEVICE)]).sum(),
    "sizes by data": lambda: torch.ones(3, device=DEVICE).nonzero().sum(),
    "training": train,
    "handed out again": lambda: [torch.ones(100, device=DEVICE).sum() for _ in range(3)],
    "sort": lambda: [x.sum() for x in torch.rand(9, device=DEVICE).sort()],
    "nothing": lambda: empty(0).sum(),
    "complex": lambda: torch.view_as_real(empty(3, dtype=torch.complex64).fill_(1)).sum(),
}  # fmt: skip


@pytest.mark.parametrize("kind", RIGHT)
def test_initcheck_reports_nothing_of_right_programs(kind):
    assert uninitialized(RIGHT[kind]) == []


def test_initcheck_refuses_the_operator_in_mode_error():
    sanitizer.enable("error", initcheck=True)
    x = empty(10)
    for _ in range(2):
        with pytest.raises(sanitizer.DataRaceError, match=r"^read of memory that nothing") as error:
            x.sum()
        assert error.value.report.kind == "uninitialized"
    assert x.fill_(2).sum().item() == 20


@pytest.mark.filterwarnings("ignore")
def test_initcheck_is_off_unless_asked_for(run):
    with sanitizer.enable("warn", initcheck=False):
        assert uninitialized(lambda: empty(3).sum()) == []
    assert len(uninitialized(lambda: empty(3).sum())) == 1
    code = "import torch\ntorch.empty(3, device='openreg').sum()\nprint('end')"
    assert run(code, {"OPENREG_SANITIZER": "1"}).code == 0
    done = run(code, {"OPENREG_SANITIZER": "1", "OPENREG_INITCHECK": "1"})
    assert done.code == 1 and "DataRaceError: read of memory that nothing has written" in done.err
    assert run(code, {"OPENREG_INITCHECK": "1"}).code == 0
