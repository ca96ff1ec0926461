"""``torch.openreg.sanitizer``: what is wrong is reported, and in its right form it is not."""

import inspect
from pathlib import Path

import pytest
import torch
from race_pairs import DEVICE, both_forms, found, openreg, sanitizer, stream_pair

pytestmark = pytest.mark.usefixtures("watching")

ROOT = Path(__file__).resolve().parents[2]


# ---- What has to be found ----


def test_missing_wait_stream_is_reported():
    def scale(orders):
        here, side = stream_pair()
        a = torch.rand(100, device=DEVICE)
        if orders:
            side.wait_stream(here)
        with side:
            torch.mul(a, 5, out=a)
        here.wait_stream(side)

    both_forms(scale, "aten::mul.out")


def test_report_names_all_that_is_needed_to_find_the_race():
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
    assert f"error: {text}" == str(report)
    for part in (
        "aten::mul.out",
        f"{side.native_handle:#x}",
        "the default stream of openreg:0",
        __file__,
        "wait_stream",
    ):
        assert part in report.details()
    # What raised was not queued, and the device is as usable as before.
    openreg.synchronize()
    assert a.tolist() == [1.0] * 100
    with sanitizer.enable("error"):
        assert (a + 1).sum().item() == 200


def test_host_read_of_an_unfinished_copy_is_reported():
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
def test_host_access_to_pinned_memory_before_a_wait_is_reported(read):
    host = torch.empty(100, pin_memory=True)

    def use(orders):
        host.copy_(torch.ones(100, device=DEVICE), non_blocking=True)
        if orders:
            openreg.current_stream().synchronize()
        read(host)
        openreg.synchronize()

    both_forms(use)


@pytest.mark.parametrize("step, dtype", [(2, torch.float32), (1, torch.float64)])
def test_host_read_of_an_unfinished_strided_copy_is_reported(step, dtype):
    def read(orders):
        host = torch.zeros(100, dtype=dtype).pin_memory()
        host[::step].copy_(torch.ones(100, device=DEVICE)[::step], non_blocking=True)
        if orders:
            openreg.synchronize()
        host.sum()

    both_forms(read, "aten::sum", "aten::copy_")


def test_host_calls_that_touch_no_pinned_memory_are_not_reported():
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


def test_host_access_raises_at_the_call():
    sanitizer.enable("error")
    host = torch.empty(100, pin_memory=True)
    host.copy_(torch.ones(100, device=DEVICE), non_blocking=True)
    with pytest.raises(sanitizer.DataRaceError, match=r"the host reads \w+ \(sum\)"):
        host.sum()
        raise AssertionError("later than at the call")  # pragma: no cover
    openreg.synchronize()
    host.sum()


def test_block_reused_without_record_stream_is_reported():
    def reuse(orders, view=False):
        here, side = stream_pair()
        x = torch.ones(1000, device=DEVICE)
        side.wait_stream(here)
        part = x[10:20] if view else x
        with side:
            part.sum()
        if orders:
            part.record_stream(side)
        block = x.data_ptr()
        del x, part
        again = torch.zeros(1000, device=DEVICE)
        assert orders or again.data_ptr() == block
        here.wait_stream(side)

    both_forms(reuse, "aten::zero_")
    assert any("record_stream" in str(report) for report in sanitizer.reports())
    both_forms(lambda orders: reuse(orders, view=True))


def test_views_that_overlap_race_and_others_do_not():
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


def test_readers_on_two_streams_are_no_race():
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


def test_missing_wait_between_two_devices_is_reported():
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


def test_event_recorded_again_orders_its_newest_record():
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


def test_producer_and_consumer_with_waits_are_not_reported():
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


def test_training_on_one_stream_is_not_reported():
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


def test_backward_of_a_side_stream_needs_a_wait_afterwards():
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


def test_event_query_that_is_true_orders_the_caller():
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
def test_stream_query_that_is_true_orders_the_caller(held):
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


def test_host_waits_of_every_kind_order_the_caller():
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


FORGOTTEN = {None: "", "record_stream": ".record_stream(", "wait_event": ".wait_stream("}


@pytest.mark.slow
@pytest.mark.parametrize("call", FORGOTTEN)
def test_digits_example_is_reported_where_it_lacks_a_call(call, run, tmp_path):
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
def test_operator_on_another_stream_without_a_wait_is_reported(kind, time):
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


def test_calls_that_access_no_memory_are_not_reported():
    def look():
        side = openreg.Stream()
        x = torch.ones(4, 4, device=DEVICE)
        with side:
            y = x.t()[1:]
            torch.empty_like(x), torch.zeros_like(x), x.new_ones(3), x.detach(), y.expand(2, 3, 4)
            x.view_as(x).unsqueeze(0).squeeze_(0)
            assert x.shape == (4, 4) and not x.is_sparse

    assert found(look) == []


def test_results_of_operators_count_as_written():
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
