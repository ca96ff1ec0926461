"""What the backend waits for itself orders nothing; what every device waits for does."""

import pytest
import torch
from race_pairs import DEVICE, both_forms, found, openreg, sanitizer, stream_pair

pytestmark = pytest.mark.usefixtures("watching")


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


def test_pinned_block_handed_out_again_carries_no_earlier_access(eventually):
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
    "histogram": lambda x: torch.histc(x, min=0, max=1),
    "recurrent": lambda x: torch.nn.LSTM(9, 3, device=DEVICE)(x.view(7, 1, 9)),
    "view": lambda x: x.unfold(0, 2, 1).diagonal().unsqueeze(0).squeeze_(0),
    "view of another type": lambda x: x.view(torch.int32),
    "nested": lambda x: torch.nested.as_nested_tensor([x[0], x[1]]) + 1,
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 10, torch.quint8).relu(),
    "large, pageable": lambda x: LARGE.to(DEVICE, non_blocking=True),
    "large, pageable, cast": lambda x: LARGE.to(DEVICE, torch.float64, non_blocking=True),
    "pinned": lambda x: torch.ones(1000).pin_memory(),
    "caches": lambda x: (openreg.empty_cache(), torch.accelerator.empty_host_cache()),
    "statistics": lambda x: (openreg.memory_stats(), openreg.memory_allocated()),
    "generator": lambda x: openreg.set_rng_state(openreg.get_rng_state()),
    "another device": lambda x: x.to("openreg:1"),
    "a stream": lambda x: openreg.Stream(),
}
WAITS_EVERYWHERE = {
    "item": lambda x: x[0, 0].item(),
    "svd": lambda x: torch.linalg.svd(x),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "selection": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "histogram without bounds": lambda x: torch.histc(x),
    "comparison": lambda x: torch.equal(x, x),
    "sparse": lambda x: x.to_sparse(),
    "pageable": lambda x: torch.ones(4).to(DEVICE),
    "pageable, cast": lambda x: torch.ones(4).to(DEVICE, torch.float64),
    "large, pageable": lambda x: LARGE.to(DEVICE),
    "large, pageable, cast": lambda x: torch.empty(20_000, device=DEVICE).copy_(LARGE.double()),
    "pinned": lambda x: torch.ones(4).pin_memory().to(DEVICE),
    "values of the host": lambda x: torch.tensor([1.0], device=DEVICE),
    "indices of the host": lambda x: x[torch.tensor([1, 2])],
    "a module": lambda x: torch.nn.Linear(2, 2).to(DEVICE),
    "to the host": lambda x: x.cpu(),
    "to pageable memory": lambda x: torch.empty(7, 9).copy_(x, non_blocking=True),
    "to pinned memory": lambda x: torch.empty(7, 9, pin_memory=True).copy_(x),
    "query": lambda x: [True for _ in iter(openreg.current_stream().query, True)],
}


@pytest.mark.parametrize("kind", WAITS_UNASKED)
def test_wait_of_this_backend_alone_orders_nothing(kind):
    for _ in range(2):  # the first call of an operator waits where later ones do not
        assert races_after(WAITS_UNASKED[kind])


@pytest.mark.parametrize("kind", WAITS_EVERYWHERE)
def test_wait_of_every_device_orders_the_caller(kind):
    for _ in range(2):
        assert not races_after(WAITS_EVERYWHERE[kind])


def test_operator_is_reported_at_its_first_call():
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


def test_blocking_launch_orders_nothing(run_ok):
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


def test_pageable_copy_is_over_for_its_host_memory_on_return():
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


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("of", ["event", "stream"])
def test_query_orders_a_program_that_uses_its_answer(of, asks):
    def program():
        here, side = stream_pair()
        x = torch.ones(100, device=DEVICE)
        side.wait_stream(here)
        with side:
            x.mul_(2)
        query = side.record_event().query if of == "event" else side.query
        with sanitizer._without_order():
            side.synchronize()  # the device is done
        while not query() and asks:
            pass
        x.add_(1)

    assert bool(found(program)) != asks
