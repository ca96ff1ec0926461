"""``torch.openreg.sanitizer``: what is wrong is reported, and in its right form it is not."""

import datetime
import inspect
import re
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

openreg = torch.openreg
sanitizer = openreg.sanitizer
ROOT = Path(__file__).resolve().parent.parent
DEVICE = "openreg"


@pytest.fixture(autouse=True)
def watching():
    """Reports are kept and said nothing of, unless the test enables another mode."""
    before = sanitizer.is_enabled()
    for index in range(openreg.device_count()):
        openreg.synchronize(index)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sanitizer.enable("warn")
        yield
        sanitizer.disable()
        sanitizer.clear()
        if before:
            sanitizer.enable("warn")


def found(function, *arguments):
    """The reports that a function makes, as "later operator / earlier operator"."""
    sanitizer.clear()
    function(*arguments)
    return [f"{r.later.operator} / {r.earlier.operator}" for r in sanitizer.reports()]


def both_forms(function, *operators):
    """`function(orders)` is reported without the order, with these operators, and not with it."""
    assert found(function, True) == []
    openreg.synchronize()
    reports = found(function, False)
    assert reports, "nothing was reported"
    for name in operators:
        assert any(name in report for report in reports), reports


def stream_pair():
    return openreg.current_stream(), openreg.Stream()


# ---- What the issue asks for ----


def test_a_missing_wait_stream():
    def scale(orders):
        here, side = stream_pair()
        a = torch.rand(100, device=DEVICE)
        if orders:
            side.wait_stream(here)
        with side:
            torch.mul(a, 5, out=a)
        here.wait_stream(side)

    both_forms(scale, "aten::mul.out")


def test_the_report_names_all_that_is_needed_to_find_it():
    sanitizer.enable("error")
    here, side = stream_pair()
    a = torch.ones(100, device=DEVICE)
    line = inspect.currentframe().f_lineno
    with pytest.raises(sanitizer.DataRaceError) as error, side:
        torch.mul(a, 5, out=a)
    (report,) = sanitizer.reports()
    assert report.later.operator == "aten::mul.out" and report.later.write
    assert report.later.stream == side.native_handle and not report.later.is_default
    assert report.earlier.operator.startswith("aten::") and report.earlier.write
    assert report.earlier.stream == here.native_handle and report.earlier.is_default
    assert report.earlier.device == report.later.device == 0
    assert (report.begin, report.end) == (a.data_ptr(), a.data_ptr() + a.nbytes)
    for access, at in ((report.earlier, line - 1), (report.later, line + 2)):
        ours = [frame for frame in access.stack if frame.filename == __file__]
        assert ours[0].line == at and ours[0].name == inspect.currentframe().f_code.co_name
    assert "wait_stream" in report.advice and "aten::mul.out" in report.advice
    text = str(error.value)
    assert text == str(report)
    for part in (
        "aten::mul.out",
        f"{side.native_handle:#x}",
        "default stream",
        __file__,
        "wait_stream",
    ):
        assert part in text
    # What raised was not queued, and the device is as usable as before.
    openreg.synchronize()
    assert a.tolist() == [1.0] * 100
    with sanitizer.enable("error"):
        assert (a + 1).sum().item() == 200


def test_a_host_read_of_an_unfinished_copy():
    def fetch(orders):
        host = torch.empty(100, pin_memory=True)
        host.copy_(torch.ones(100, device=DEVICE), non_blocking=True)
        if orders:
            openreg.current_stream().synchronize()
        host.sum()
        openreg.synchronize()

    both_forms(fetch, "aten::sum")
    (report,) = sanitizer.reports()
    assert report.later.stream is None and report.later.device is None
    assert not report.later.write and report.earlier.write and "pinned" in report.memory
    assert "the host" in str(report)


@pytest.mark.parametrize(
    "read",
    [
        lambda h: h[3].item(),
        lambda h: h.tolist(),
        lambda h: h.clone(),
        lambda h: h + 1,
        lambda h: torch.cat([h, h]),
        lambda h: h.view(10, 10)[:, 2].max(),
        lambda h: h.fill_(1),
        lambda h: h.copy_(torch.zeros(100)),
        lambda h: torch.empty(100).copy_(h),
        lambda h: torch.ones(1, device=DEVICE) * h[0],
    ],
)
def test_what_the_host_does_to_pinned_memory(read):
    host = torch.empty(100, pin_memory=True)

    def use(orders):
        host.copy_(torch.ones(100, device=DEVICE), non_blocking=True)
        if orders:
            openreg.current_stream().synchronize()
        read(host)
        openreg.synchronize()

    both_forms(use)


def test_what_does_not_touch_pinned_memory():
    def look():
        host = torch.empty(100, pin_memory=True)
        host.copy_(torch.ones(100, device=DEVICE), non_blocking=True)
        view = host.view(10, 10).t()[1:].detach()
        assert view.is_pinned() and view.shape == (9, 10) and host.data_ptr() != 0
        torch.empty_like(host), host.new_zeros(3), host.numpy(), host.unsqueeze(0).expand(2, 100)
        host.to(DEVICE, non_blocking=True)
        other = torch.ones(100)
        other.add_(1)

    assert found(look) == []


def test_the_error_of_a_host_access_comes_at_once():
    sanitizer.enable("error")
    host = torch.empty(100, pin_memory=True)
    host.copy_(torch.ones(100, device=DEVICE), non_blocking=True)
    with pytest.raises(sanitizer.DataRaceError, match=r"aten::sum[.\w]* on the host reads"):
        host.sum()
        raise AssertionError("later than at the call")  # pragma: no cover
    openreg.synchronize()
    host.sum()


def test_a_block_reused_without_record_stream():
    def reuse(orders, view=False):
        here, side = stream_pair()
        x = torch.ones(1000, device=DEVICE)
        side.wait_stream(here)
        part = x[10:20] if view else x
        with side:
            part.sum()
        if orders:
            part.record_stream(side)
        del x, part
        torch.zeros(1000, device=DEVICE)  # the same block
        here.wait_stream(side)

    both_forms(reuse, "aten::zero_")
    assert any("record_stream" in str(report) for report in sanitizer.reports())
    assert found(reuse, True, True) == [] and found(reuse, False, True)


def test_overlapping_views():
    def run(first, second, other=None):
        here, side = stream_pair()
        x = torch.zeros(40, 40, device=DEVICE)
        side.wait_stream(here)
        with side:
            first(x).add_(1)
        second(x if other is None else other).mul_(2)
        here.wait_stream(side)

    def views(first, second):
        return found(run, first, second)

    assert views(lambda x: x[:21], lambda x: x[20:])
    assert views(lambda x: x[:, :21], lambda x: x[:, 20:])
    assert views(lambda x: x.t(), lambda x: x[3, 3:4])
    assert views(lambda x: x.view(-1)[::3], lambda x: x.view(-1)[::2])
    assert views(lambda x: x[:20], lambda x: x[20:]) == []
    assert views(lambda x: x[:, :20], lambda x: x[:, 20:]) == []
    assert views(lambda x: x[::2], lambda x: x[1::2]) == []
    assert views(lambda x: x.view(-1)[::2], lambda x: x.view(-1)[1::2]) == []
    assert views(lambda x: x.t()[:7], lambda x: x.t()[7:]) == []
    assert views(lambda x: x[::4, 1::4], lambda x: x[1::4, 1::4]) == []


def test_two_readers_are_no_race():
    def read(orders):
        here, side = stream_pair()
        x = torch.ones(100, device=DEVICE)
        side.wait_stream(here)
        with side:
            x.sum()
        if orders:
            return x.sum()
        return x.add_(1)

    both_forms(read)


def test_two_devices():
    def exchange(orders):
        there = openreg.Stream("openreg:1")
        here = openreg.current_stream(0)
        x = torch.ones(100, device="openreg:0")
        with there:
            y = torch.full((100,), 2.0, device="openreg:1")
        if orders:
            openreg.default_stream(1).wait_stream(there)
        x.copy_(y)  # reads y in the order of the default streams
        here.synchronize()
        y.record_stream(openreg.default_stream(1))

    both_forms(exchange, "aten::copy_")
    assert {report.memory for report in sanitizer.reports()} == {"openreg:1"}


def test_an_event_recorded_again():
    def run(orders):
        first, second = openreg.Stream(), openreg.Stream()
        x = torch.zeros(100, device=DEVICE)
        first.wait_stream(openreg.current_stream())
        second.wait_stream(openreg.current_stream())
        event = openreg.Event()
        with first:
            x.add_(1)
            event.record()
        if orders:
            openreg.current_stream().wait_event(event)
        with second:
            event.record()  # the wait below is for this one
        openreg.current_stream().wait_event(event)
        x.mul_(2)
        first.synchronize()

    both_forms(run, "aten::mul_", "aten::add_")


# ---- What is right is not reported ----


def test_a_producer_and_a_consumer():
    def run():
        producer, consumer = openreg.Stream(), openreg.Stream()
        total = torch.zeros(1, device=DEVICE)
        consumer.wait_stream(openreg.current_stream())
        for i in range(20):
            with producer:
                x = torch.full((1000,), float(i), device=DEVICE)
            consumer.wait_stream(producer)
            with consumer:
                total += x.sum()
            x.record_stream(consumer)
            del x
        openreg.current_stream().wait_stream(consumer)
        assert total.item() == 190_000

    assert found(run) == []


def test_training():
    def train():
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(8, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.ReLU(),
            torch.nn.Linear(16, 2),
        ).to(DEVICE)
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(5):
            x, y = torch.randn(4, 8, device=DEVICE), torch.randint(0, 2, (4,), device=DEVICE)
            loss = torch.nn.functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()

    assert found(train) == []


def test_backward_of_a_side_stream():
    def train(orders):
        here, side = stream_pair()
        weight = torch.ones(8, 8, device=DEVICE, requires_grad=True)
        side.wait_stream(here)
        with side:
            loss = (weight @ weight).sum()
        with side:
            loss.backward()  # on the streams of the forward; ends before what this stream does next
        if orders:
            here.wait_stream(side)
        weight.grad.add_(1)
        openreg.synchronize()

    assert found(train, True) == []


def test_polling_an_event():
    def poll(orders):
        side = openreg.Stream()
        x = torch.zeros(100, device=DEVICE)
        side.wait_stream(openreg.current_stream())
        event = openreg.Event()
        with side:
            x.add_(1)
            event.record()
        while orders and not event.query():
            pass
        x.mul_(2)
        openreg.synchronize()

    both_forms(poll)


@pytest.mark.parametrize("held", [False, True])
def test_polling_a_stream(held):
    def use(orders):
        here, side = stream_pair()
        x = torch.zeros(100, device=DEVICE)
        side.wait_stream(here)
        gate = openreg.testing.gate()
        if held:
            gate.wait(side)
        with side:
            x.add_(1)
        if held:
            assert not side.query()  # which orders nothing
        if held and orders:
            gate.open()
        while orders and not side.query():
            pass
        x.mul_(2)
        gate.open()
        openreg.synchronize()

    both_forms(use, "aten::mul_")


def test_the_host_waits_in_other_ways():
    def run(wait):
        side = openreg.Stream()
        x = torch.zeros(100, device=DEVICE)
        side.wait_stream(openreg.current_stream())
        with side:
            x.add_(1)
            wait(side, x)
        x.mul_(2)
        openreg.synchronize()

    for wait in (
        lambda side, x: side.synchronize(),
        lambda side, x: openreg.synchronize(),
        lambda side, x: side.record_event().synchronize(),
        lambda side, x: x.sum().item(),
        lambda side, x: x.cpu(),
        lambda side, x: x.nonzero(),
    ):
        assert found(run, wait) == [], inspect.getsource(wait)
    assert found(run, lambda side, x: None)


FORGOTTEN = {None: "", "record_stream": "t.record_stream(s)", "wait_event": "s1.wait_stream(s0)"}


@pytest.mark.parametrize("call", FORGOTTEN)
def test_the_digits_example(call, run, tmp_path):
    """It fetches its batches on a side stream. That it is watched shows where it forgets a call."""
    text = (ROOT / "docs/examples/digits.py").read_text()
    lines = [line for line in text.splitlines() if call and f".{call}(" in line]
    for line in lines:
        text = text.replace(line, line[: -len(line.lstrip())] + "pass")
    (tmp_path / "digits.py").write_text(text)
    arguments = [str(tmp_path / "digits.py"), "--only", "--device=openreg:1", "--epochs=1"]
    done = run("", {"OPENREG_SANITIZER": "1"}, arguments=arguments)
    reported = "DataRaceError" in done.err and FORGOTTEN[call] in done.err
    assert (done.code, len(lines), reported) == ((1, 1, True) if call else (0, 0, False)), done.err


# ---- Every kind of operator tells what it touches ----


def rnn(x):
    cell = torch.nn.LSTM(4, 4).to(DEVICE)
    openreg.synchronize()
    return lambda: cell(x.view(4, 1, 4))


def custom(x):
    @torch.library.custom_op("sanitizer_tests::twice", mutates_args=(), device_types=DEVICE)
    def twice(y: torch.Tensor) -> torch.Tensor:
        return y * 2

    return lambda: twice(x)


def norm(x):
    mean, var = x.view(-1)[:4], torch.ones(4, device=DEVICE)
    data = torch.rand(3, 4, device=DEVICE)
    openreg.synchronize()
    return lambda: torch.batch_norm(data, None, None, mean, var, True, 0.1, 1e-5, False)


def sparse(x):
    indices = torch.tensor([[0, 1], [1, 0]], device=DEVICE)
    whole = torch.sparse_coo_tensor(indices, x.view(-1)[:2], (2, 2), check_invariants=False)
    other = torch.rand(2, 2, device=DEVICE)
    openreg.synchronize()
    return lambda: torch.sparse.mm(whole, other)


def nested(x):
    return lambda: torch.nested.as_nested_tensor([x[0], x[1]])


OPERATORS = {
    "in place": lambda x: lambda: x.add_(1),
    "read": lambda x: lambda: x * 2,
    "a shape never seen": lambda x: lambda: torch.nn.functional.conv1d(
        x.view(1, 1, 16), x.view(1, 1, 16)[..., :5], padding=1
    ),
    "view, then read": lambda x: lambda: x.t()[1:].exp(),
    "list": lambda x: lambda: torch._foreach_mul([x[0], x[1]], 2.0),
    "list in place": lambda x: lambda: torch._foreach_add_([x[0], x[1]], 1.0),
    "cat": lambda x: lambda: torch.cat([x, x]),
    "indices": lambda x: lambda: torch.ones(9, device=DEVICE)[x.long().view(-1)[:2]],
    "index_put": lambda x: lambda: x.index_put_(
        (torch.tensor([1], device=DEVICE),), torch.ones(4, device=DEVICE)
    ),
    "waited": lambda x: lambda: x.nonzero(),
    "item": lambda x: lambda: x[0, 0].item(),
    "cpu": lambda x: lambda: x.cpu(),
    "cpu, strided": lambda x: lambda: x.t()[1:].cpu(),
    "cast": lambda x: lambda: x.half(),
    "from the host": lambda x: lambda: x.copy_(torch.ones(4, 4)),
    "from the host, strided": lambda x: lambda: x.copy_(torch.ones(4, 4).t().double()),
    "to another device": lambda x: lambda: x.to("openreg:1"),
    "fill": lambda x: lambda: x.zero_(),
    "random": lambda x: lambda: x.normal_(),
    "dropout": lambda x: lambda: torch.nn.functional.dropout(x),
    "attention": lambda x: lambda: torch.nn.functional.scaled_dot_product_attention(
        x.view(1, 1, 4, 4), x.view(1, 1, 4, 4), x.view(1, 1, 4, 4)
    ),
    "embedding": lambda x: lambda: torch.embedding(x, torch.tensor([1], device=DEVICE)),
    "rnn": rnn,
    "batch norm": norm,
    "sparse": sparse,
    "nested": nested,
    "custom": custom,
    "resize": lambda x: lambda: x.resize_(8, 8),
    "optimizer": lambda x: lambda: torch._fused_adam_(
        [x], [torch.ones(4, 4, device=DEVICE)], [torch.ones(4, 4, device=DEVICE)],
        [torch.ones(4, 4, device=DEVICE)], [], [torch.ones((), device=DEVICE)],
        lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize("time", ["first", "again"])
def test_operators(kind, time):
    """What was written on the default stream is used on another one."""

    def use(orders):
        here, side = stream_pair()
        x = torch.zeros(4, 4, device=DEVICE)
        call = OPERATORS[kind](x)
        if time == "again":
            call()
            openreg.synchronize()
        if x.untyped_storage().nbytes() == 64:  # it was not resized
            x.fill_(1)
        else:
            x = torch.ones(4, 4, device=DEVICE)
            call = OPERATORS[kind](x)
        if orders:
            side.wait_stream(here)
            openreg.default_stream(1).wait_stream(here)
        with side:
            call()
        openreg.synchronize()
        openreg.synchronize(1)

    both_forms(use)


def test_what_is_no_access():
    def look():
        side = openreg.Stream()
        x = torch.ones(4, 4, device=DEVICE)
        with side:
            y = x.t()[1:]
            torch.empty_like(x), torch.zeros_like(x), x.new_ones(3), x.detach(), y.expand(2, 3, 4)
            x.view_as(x).unsqueeze(0).squeeze_(0)
            assert x.shape == (4, 4) and not x.is_sparse

    assert found(look) == []


def test_results_are_written():
    def use(orders):
        here, side = stream_pair()
        x = torch.ones(8, device=DEVICE)
        side.wait_stream(here)
        for function in (lambda: x + 1, lambda: x.nonzero(), lambda: x.chunk(2)[0].clone()):
            with side:
                y = function()
            if orders:
                here.wait_stream(side)
            y.add_(1)
            y.record_stream(here)
        openreg.synchronize()

    both_forms(use, "aten::add_")


# ---- Collectives ----


def poll(work):
    while not work.is_completed():
        pass


WAITS = {
    "wait": lambda work: work.wait(),
    "with a time-out": lambda work: work.wait(datetime.timedelta(seconds=60)),
    "poll": poll,
    "future": lambda work: work.get_future().wait(),
    "result": lambda work: work.get_future_result().wait(),
}
NO_WAITS = {
    "none": lambda work: None,
    "while it ends": lambda work: time.sleep(0.02),  # or does not: it must not matter
    "of the device": lambda work: openreg.synchronize(),
}


def rank_collective(rank, wait):
    with warnings.catch_warnings(), sanitizer.enable("warn"):
        warnings.simplefilter("ignore")
        x = torch.ones(100, device=DEVICE)
        for _ in range(2):
            work = dist.all_reduce(x, async_op=True)
            {**WAITS, **NO_WAITS}[wait](work)
            x.add_(1)
            work.wait()
        openreg.synchronize()
        return [(r.later.operator, r.earlier.operator, r.advice) for r in sanitizer.reports()]


def rank_gated_collective(rank):
    """It cannot have begun when the stream goes on."""
    with warnings.catch_warnings(), sanitizer.enable("warn"):
        warnings.simplefilter("ignore")
        x = torch.ones(100, device=DEVICE)
        with openreg.testing.gate() as gate:
            gate.wait()
            work = dist.all_reduce(x, async_op=True)
            x.add_(1)
        work.wait()
        return [(r.later.operator, r.earlier.operator, r.advice) for r in sanitizer.reports()]


def rank_forgotten_collective(rank):
    """Nobody waits, and the memory is used again: it was free when the collective was over."""
    with warnings.catch_warnings(), sanitizer.enable("warn"):
        warnings.simplefilter("ignore")
        for size in range(1, 50):
            dist.all_reduce(torch.ones(size, device=DEVICE), async_op=True)
        dist.barrier()
        return [str(report) for report in sanitizer.reports()]


def rank_collective_error(rank):
    with sanitizer.enable("error"):
        x = torch.ones(100, device=DEVICE)
        work = dist.all_reduce(x, async_op=True)
        with pytest.raises(sanitizer.DataRaceError, match="all_reduce on stream"):
            x.add_(1)
        work.wait()
        return x.add_(1).sum().item()


def test_a_collective_is_beside_its_stream(tmp_path):
    ranks = Ranks(1, tmp_path)
    advice = "work.wait() before aten::add_.Tensor, work being what all_reduce returned"
    try:
        for wait in WAITS:
            assert ranks.run(rank_collective, wait) == [[]], wait
        for wait in NO_WAITS:
            (reports,) = ranks.run(rank_collective, wait)
            assert reports == [("aten::add_.Tensor", "all_reduce", advice)], wait
        (reports,) = ranks.run(rank_gated_collective)
        assert reports == [("aten::add_.Tensor", "all_reduce", advice)]
        assert ranks.run(rank_forgotten_collective) == [[]]
        assert ranks.run(rank_collective_error) == [200.0]
    finally:
        ranks.close()


# ---- Modes and the setting ----


def race():
    here, side = stream_pair()
    a = torch.ones(10, device=DEVICE)
    with side:
        a.add_(1)
    here.wait_stream(side)
    return a


def test_warnings():
    with warnings.catch_warnings(record=True) as calls:
        warnings.simplefilter("always")
        race()
    (warning,) = calls
    assert issubclass(warning.category, UserWarning) and warning.filename == __file__
    assert str(warning.message) == str(sanitizer.reports()[0])


def test_one_warning_of_a_pair():
    side = openreg.Stream()
    a = torch.ones(10, device=DEVICE)
    with warnings.catch_warnings(record=True) as calls:
        warnings.simplefilter("always")
        for _ in range(5):
            a.add_(1)
            with side:
                a.mul_(2)
    assert [report.number for report in sanitizer.reports()] == [1, 2]  # each after the other
    assert len(calls) == 2, calls


def test_an_error_each_time():
    sanitizer.enable("error")
    side = openreg.Stream()
    a = torch.ones(10, device=DEVICE)
    texts = set()
    for _ in range(3):
        with pytest.raises(sanitizer.DataRaceError, match=r"^data race 1 on") as error, side:
            a.mul_(5)
        texts.add(str(error.value))
    line = inspect.currentframe().f_lineno + 2
    with pytest.raises(sanitizer.DataRaceError, match=r"^data race 1 on") as error, side:
        a.mul_(5)
    assert len(texts) == 1 and f"line {line}, in test_an_error_each_time" in str(error.value)
    (report,) = sanitizer.reports()
    assert texts == {str(report)}
    host = torch.empty(100, pin_memory=True)
    for _ in range(3):
        host.copy_(torch.ones(100, device=DEVICE), non_blocking=True)
        with pytest.raises(sanitizer.DataRaceError, match="on the host reads"):
            host.sum()
        openreg.synchronize()
    side.wait_stream(openreg.current_stream())
    with side:
        a.mul_(5)
    openreg.synchronize()
    assert a.tolist() == [5.0] * 10 and len(sanitizer.reports()) == 2


def test_an_error_under_each_seed():
    sanitizer.enable("error")
    side = openreg.Stream()
    results = []

    def scale():
        a = torch.ones(1000, device=DEVICE)
        try:
            with side:
                a.mul_(5)
            results.append(None)
        except sanitizer.DataRaceError as error:
            results.append(type(error))
        return 0

    assert openreg.testing.explore(scale, 3).ok
    assert results == [sanitizer.DataRaceError] * len(results) and len(results) >= 4


def test_what_was_refused_is_forgotten():
    sanitizer.enable("error")
    side = openreg.Stream()
    a = torch.ones(1000, device=DEVICE)
    b = torch.ones(1000, device=DEVICE)
    side.wait_stream(openreg.current_stream())
    a.add_(1)
    with side, pytest.raises(sanitizer.DataRaceError):
        torch.add(b, 1, out=a)
    with side, pytest.raises(sanitizer.DataRaceError):
        torch._foreach_add_([b, a], 1.0)
    a.add_(1)
    b.add_(1)
    del a, b
    torch.zeros(1000, device=DEVICE).add_(1)
    assert len(sanitizer.reports()) == 2


def test_more_than_are_kept():
    side = openreg.Stream()
    a = torch.ones(1010, device=DEVICE)
    sanitizer.enable("error", stacks=False)
    a.add_(1)
    for i in range(1010):
        with side, pytest.raises(sanitizer.DataRaceError, match=f"^data race {i + 1} on openreg:0"):
            a[i : i + 1].add_(1)
    assert len(sanitizer.reports()) == 1000
    sanitizer.clear()
    sanitizer.enable("warn", stacks=False)
    a.add_(1)
    with warnings.catch_warnings(record=True) as calls, side:
        warnings.simplefilter("always")
        for i in range(1010):
            a[i : i + 1].add_(1)
    assert len(calls) == 1010 and str(calls[-1].message).startswith("data race 1010 on openreg:0")
    assert len(sanitizer.reports()) == 1000


def test_many_columns():
    here, side = stream_pair()
    x = torch.zeros(30, 500, device=DEVICE)
    side.wait_stream(here)
    with side:
        for i in range(499):
            x[:, i].add_(1)
    for column, reported in ((0, 1), (250, 2), (498, 3), (499, 3)):
        x[:, column].mul_(2)
        assert len(sanitizer.reports()) == reported, column
    here.wait_stream(side)


def test_modes():
    assert sanitizer.is_enabled()
    race()
    assert [report.number for report in sanitizer.reports()] == [1]
    sanitizer.disable()
    assert not sanitizer.is_enabled() and len(sanitizer.reports()) == 1
    race()
    assert len(sanitizer.reports()) == 1
    sanitizer.clear()
    assert sanitizer.reports() == []
    sanitizer.disable()
    with sanitizer.enable():
        with pytest.raises(sanitizer.DataRaceError):
            race()
    assert not sanitizer.is_enabled()
    with pytest.raises(ValueError, match=r"mode is 'loud'; allowed are 'error' and 'warn'"):
        sanitizer.enable("loud")
    assert issubclass(sanitizer.DataRaceError, RuntimeError)


def test_without_stacks():
    sanitizer.enable("warn", stacks=False)
    race()
    (report,) = sanitizer.reports()
    assert report.earlier.stack is None and "no Python stack" in str(report)


def test_of_another_thread():
    sanitizer.enable("error")
    caught = []

    def work():
        try:
            race()
        except sanitizer.DataRaceError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(caught) == 1 and "in work" in str(caught[0])
    torch.ones(3, device=DEVICE).sum().item()  # nothing is left for this one


def test_in_a_backward_thread():
    sanitizer.enable("error")
    side = openreg.Stream()

    class Race(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            copy = grad * 1
            with side:
                return copy.mul_(2)

    x = torch.ones(2, device=DEVICE, requires_grad=True)
    with pytest.raises(sanitizer.DataRaceError, match="aten::mul_"):
        Race.apply(x).sum().backward()


def test_the_setting(run):
    code = """
        import torch
        side = torch.openreg.Stream()
        a = torch.ones(10, device="openreg")
        with side:
            a.add_(1)
        """
    done = run(code, {"OPENREG_SANITIZER": "1"})
    assert done.code == 1 and "torch.openreg.sanitizer.DataRaceError: " in done.err
    assert re.search(r'File "<string>", line \d+, in <module>', done.err)
    done = run(code, {"OPENREG_SANITIZER": "warn"})
    assert done.code == 0 and "UserWarning: data race 1 on openreg:0" in done.err
    done = run(code, {"OPENREG_SANITIZER": "0"})
    assert (done.code, done.err) == (0, "")
    done = run(code, {"OPENREG_SANITIZER": "loud"})
    assert done.code == 0 and len(done.err.splitlines()) == 1 and "loud" in done.err


def test_memory_is_bounded(run_ok):
    """Of a loop that fetches batches on a side stream, and waits for the device now and then."""
    out = run_ok(
        """
        import torch

        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096

        def steps(count):
            for i in range(count):
                host = source[i % 7 :].pin_memory()
                with side:
                    batch = host.to("openreg", non_blocking=True)
                here.wait_stream(side)
                batch.record_stream(here)
                x.mul_(0.5).add_(1)
                y = batch @ x
                result.copy_(y.sum(), non_blocking=True)
                if i % 100 == 0:
                    here.synchronize()
                    result.item()

        with torch.openreg.sanitizer.enable():
            here, side = torch.openreg.current_stream(), torch.openreg.Stream()
            x = torch.ones(16, 16, device="openreg")
            source, result = torch.ones(64, 16), torch.empty((), pin_memory=True)
            steps(2000)
            before = resident()
            steps(10_000)
            print((resident() - before) >> 20)
        """
    )
    assert int(out) < 4


# ---- What the backend waits for itself orders nothing ----


def races_after(wait):
    """Whether nothing orders what was queued before this with what another stream does after it."""

    def use():
        x, y = torch.randn(7, 9, device=DEVICE), torch.zeros(5, device=DEVICE)
        openreg.synchronize()
        x.add_(1), y.add_(1)
        result = wait(x)
        with openreg.Stream():
            y.mul_(2)
        openreg.synchronize()
        openreg.synchronize(1)
        return result

    return any(report.startswith("aten::mul_") for report in found(use))


def prefetch(orders, gate=None):
    here, copies = stream_pair()
    total = torch.zeros(1000, device=DEVICE)

    def batch(i):
        host = torch.full((1000,), float(i)).pin_memory()
        with copies:
            if gate is not None:
                gate.wait()
            return host.to(DEVICE, non_blocking=True)

    following = batch(0)
    for i in range(1, 4):
        now, following = following, batch(i)
        now.record_stream(here)
        if orders:
            here.wait_stream(copies)
        total = total + now
    if gate is not None:
        gate.open()
    copies.synchronize()


@pytest.mark.parametrize("when", ["at once", "over", "held"])
def test_pinned_memory_for_the_next_batch_orders_nothing(when):
    """The allocator finds out by itself which of its blocks may be used again."""

    def run(orders):
        if when == "held":
            return found(prefetch, orders, openreg.testing.gate())
        if when == "at once":
            return found(prefetch, orders)
        with openreg.testing.schedule("early"):  # each copy is over when its call returns
            return found(prefetch, orders)

    for _ in range(20):
        assert any("aten::add" in report for report in run(False))
        openreg.synchronize()
        assert run(True) == []
        openreg.synchronize()


def test_a_pinned_block_is_handed_out_again(eventually):
    """Its former owner's accesses, waited for by the allocator, are not held against the next."""

    def reuse():
        source = torch.ones(1000, pin_memory=True)
        with openreg.Stream():
            source.to(DEVICE, non_blocking=True)
        address = source.data_ptr()
        del source
        others = []

        def comes_again():
            others.append(torch.empty(1000, pin_memory=True))
            return others[-1].data_ptr() == address

        eventually(comes_again)
        others[-1].fill_(2)

    for _ in range(5):
        assert found(reuse) == []
        openreg.synchronize()


LARGE = torch.arange(20_000.0)
WAITS_UNASKED = {
    "kthvalue": lambda x: x.kthvalue(2),
    "median": lambda x: x.median(0),
    "svd": lambda x: torch.linalg.svd(x),
    "histogram": lambda x: torch.histc(x),
    "recurrent": lambda x: torch.nn.LSTM(9, 3).to(DEVICE)(x.view(7, 1, 9)),
    "view": lambda x: x.unfold(0, 2, 1).diagonal().unsqueeze(0).squeeze_(0),
    "view of another type": lambda x: x.view(torch.int32),
    "nested": lambda x: torch.nested.as_nested_tensor([x[0], x[1]]) + 1,
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 10, torch.quint8).relu(),
    "large, pageable": lambda x: LARGE.to(DEVICE, non_blocking=True),
    "large, pageable, blocking": lambda x: LARGE.to(DEVICE),
    "large, pageable, cast": lambda x: torch.empty(20_000, device=DEVICE).copy_(LARGE.double()),
    "indices of the host": lambda x: x[torch.tensor([1, 2])],
    "pinned": lambda x: torch.ones(1000).pin_memory(),
    "caches": lambda x: (openreg.empty_cache(), torch.accelerator.empty_host_cache()),
    "statistics": lambda x: (openreg.memory_stats(), openreg.memory_allocated()),
    "generator": lambda x: openreg.set_rng_state(openreg.get_rng_state()),
    "another device": lambda x: x.to("openreg:1"),
    "a stream": lambda x: openreg.Stream(),
}
WAITS_EVERYWHERE = {
    "item": lambda x: x[0, 0].item(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "selection": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "comparison": lambda x: torch.equal(x, x),
    "sparse": lambda x: x.to_sparse(),
    "to the host": lambda x: x.cpu(),
    "to pageable memory": lambda x: torch.empty(7, 9).copy_(x, non_blocking=True),
    "to pinned memory": lambda x: torch.empty(7, 9, pin_memory=True).copy_(x),
    "query": lambda x: [True for _ in iter(openreg.current_stream().query, True)],
}


@pytest.mark.parametrize("kind", WAITS_UNASKED)
def test_what_only_this_backend_waits_for(kind):
    for _ in range(2):  # the first call of an operator waits where later ones do not
        assert races_after(WAITS_UNASKED[kind])


@pytest.mark.parametrize("kind", WAITS_EVERYWHERE)
def test_what_every_device_waits_for(kind):
    for _ in range(2):
        assert not races_after(WAITS_EVERYWHERE[kind])


def test_an_operator_is_told_at_its_first_call_too():
    """Outputs that get their memory from the operator are written by it."""

    def use(orders):
        here, side = stream_pair()
        for x in torch.rand(2, 5, 3 + orders, device=DEVICE):  # a shape never seen, and again
            side.wait_stream(here)
            with side:
                y = x.kthvalue(2)[0]
            if orders:
                here.wait_stream(side)
            y.mul_(2)
            openreg.synchronize()

    both_forms(use, "aten::mul_")
    assert len(sanitizer.reports()) == 2


def test_a_blocking_launch_orders_nothing(run_ok):
    code = """
        import warnings
        import torch
        warnings.simplefilter("ignore")
        side = torch.openreg.Stream()
        a = torch.ones(10, device="openreg")
        with side:
            a.add_(1)
        a.cpu()
        print(len(torch.openreg.sanitizer.reports()))
        """
    setting = {"OPENREG_SANITIZER": "warn", "OPENREG_LAUNCH_BLOCKING": "1"}
    assert int(run_ok(code, setting)) == 2


# ---- Pageable memory, and when errors come ----


def test_pageable_memory():
    """The call has read the source, or written the destination, when it returns."""

    def use(orders, size, dtype):
        here, side = stream_pair()
        source, x = torch.ones(size), torch.zeros(size, dtype=dtype, device=DEVICE)
        side.wait_stream(here)
        with side:
            x.copy_(source, non_blocking=True)
        source.fill_(2)
        if orders:
            here.wait_stream(side)
        target = torch.zeros(size, dtype=dtype)
        target.copy_(x, non_blocking=True)  # the host waits for it
        assert not orders or target.eq(1).all()
        target.add_(1)
        with side:
            x.add_(1)
        openreg.synchronize()

    for size in (10, 100_000):
        for dtype in (torch.float32, torch.float64):
            both_forms(lambda orders, s=size, d=dtype: use(orders, s, d), "aten::copy_")
            assert len(sanitizer.reports()) == 1


def test_a_host_access_is_raised_at_the_next_synchronisation_at_the_latest():
    sanitizer.enable("error")
    for synchronize in (openreg.synchronize, openreg.current_stream().synchronize):
        host = torch.empty(100, pin_memory=True)
        host.copy_(torch.ones(100, device=DEVICE), non_blocking=True)
        with pytest.raises(sanitizer.DataRaceError, match="on the host reads"):
            if host.sum() is not None:
                synchronize()
        openreg.synchronize()
        assert host.sum() == 100


def test_what_a_gate_decides_is_raised_when_it_opens():
    sanitizer.enable("error")
    here, side = stream_pair()
    x = torch.ones(10, device=DEVICE)
    gate = openreg.testing.gate()
    side.wait_stream(here)
    with side:
        gate.wait()
        x.add_(1)
    x.mul_(2)
    with pytest.raises(sanitizer.DataRaceError, match="aten::mul_"):
        gate.open()
    openreg.synchronize()
