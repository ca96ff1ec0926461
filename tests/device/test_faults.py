"""``torch.openreg.testing.inject``: what is struck, how it looks, and that all works after."""

import gc
import threading

import pytest
import torch
from torch.openreg.testing import gate, inject, schedule
from torch.utils.data import DataLoader, TensorDataset

import torch_openreg  # noqa: F401

KINDS = ("out_of_memory", "copy_error", "kernel_error", "device_lost", "slow_stream")
FAILING = KINDS[:-1]
ERRORS = {
    "out_of_memory": torch.OutOfMemoryError,
    "copy_error": RuntimeError,
    "kernel_error": RuntimeError,
    "device_lost": torch.AcceleratorError,
}


SHORT = {"slow_stream": {"delay_ms": 0.1}}
struck = {}  # by test_injected_fault_is_the_same_under_every_schedule


def fails(kind):
    return pytest.raises(ERRORS[kind], match=f'injected fault "{kind}"')


def train(device, steps=1):
    """The loss of a small model after some steps; the same on every device."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    x, y = torch.randn(4, 8), torch.tensor([0, 1, 2, 0])
    model, x, y = model.to(device), x.to(device), y.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


def allocated(index):
    gc.collect()
    stats = torch.openreg.memory_stats(index)
    return {key: stats[f"{key}.all.current"] for key in ("allocation", "allocated_bytes", "active")}


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Whatever a test did: the next program runs, and no memory is lost."""
    for index in range(2):
        train(f"openreg:{index}")
        torch.openreg.synchronize(index)
    before = [allocated(index) for index in range(2)]
    yield
    for index in range(2):
        assert train(f"openreg:{index}", 2) == pytest.approx(train("cpu", 2))
        torch.openreg.synchronize(index)
        assert allocated(index) == before[index]


# ---- each kind ----


@pytest.mark.parametrize("kind", ["kernel_error", "device_lost"])
def test_injected_fault_leaves_a_waiting_operator_without_results(kind):
    x = torch.randn(8, device="openreg:0")
    with inject(kind, device=0):
        with fails(kind):
            x.nonzero()
        torch.openreg.reset(0)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize("kind", FAILING)
def test_injected_fault_fails_one_step_only(kind, after, index):
    other = torch.openreg.memory_stats(1 - index)
    with inject(kind, after=after, device=index) as fault:
        with fails(kind):
            train(f"openreg:{index}", 3)
            torch.openreg.synchronize(index)
        assert fault.fired == 1
        if kind == "device_lost":
            with fails(kind):
                torch.openreg.synchronize(index)
            torch.openreg.reset(index)
        assert train(f"openreg:{index}") == pytest.approx(train("cpu"))  # once
    assert fault.fired == 1
    assert torch.openreg.memory_stats(1 - index) == other
    torch.openreg.synchronize(1 - index)


def test_injected_fault_hits_the_operator_that_was_counted(runs_ahead):
    x = torch.ones(3, device="openreg")
    runs_ahead(lambda: (x.add_(1), x.mul_(2), x.neg_()))
    with inject("kernel_error", after=1) as fault:
        runs_ahead(lambda: (x.add_(1), x.mul_(2), x.neg_()))  # the error is kept for later
        assert fault.operation == "aten::mul_"
        with fails("kernel_error") as caught:
            torch.openreg.synchronize()
    assert "mul_ on openreg:0 failed" in str(caught.value)
    torch.openreg.synchronize()  # once
    assert x.tolist() == [3.0, 3.0, 3.0]  # as if there had been no mul_


def test_injected_fault_is_shown_at_no_line_of_another_thread():
    """A replay is struck, which is no operator of PyTorch, while this thread runs one."""
    x = torch.ones(3, device="openreg")
    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph):
        x.add_(1)

    @torch.library.custom_op("test_faults::replays", mutates_args=())
    def replays(y: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=graph.replay)
        thread.start()
        thread.join()
        return y.clone()

    with inject("kernel_error"), fails("kernel_error") as caught:
        replays(torch.ones(3))
        torch.openreg.synchronize()
    assert "the fault was injected here" not in str(caught.value)
    assert "OPENREG_LAUNCH_BLOCKING=1" in str(caught.value)


def test_injected_fault_is_raised_by_an_operator_that_waits():
    x = torch.ones(3, device="openreg")
    with inject("kernel_error"), fails("kernel_error"):
        x.nonzero()
    assert x.nonzero().shape == (3, 1)


def test_injected_loss_has_the_text_of_a_lost_device():
    x = torch.ones(3, device="openreg:1")
    with inject("device_lost", device=1):
        x.add_(1)
        with pytest.raises(torch.AcceleratorError, match="openreg:1 is lost: add_ failed"):
            torch.openreg.synchronize(1)
    with pytest.raises(torch.AcceleratorError, match=r"torch.openreg.reset\(1\)"):
        x.add_(1)
    torch.openreg.reset(1)
    assert x.fill_(2).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.usefixtures("nothing_left")
def test_statistics_of_an_injected_out_of_memory_are_exact():
    kept = torch.ones(1000, device="openreg")
    cached = torch.empty(3 << 20, dtype=torch.uint8, device="openreg")
    del cached
    torch.openreg.synchronize()
    torch.openreg.reset_accumulated_memory_stats()
    torch.openreg.reset_peak_memory_stats()
    before = torch.openreg.memory_stats()
    assert before["num_ooms"] == before["num_alloc_retries"] == 0
    with inject("out_of_memory") as fault, fails("out_of_memory") as caught:
        torch.empty(5000, dtype=torch.uint8, device="openreg")
    after = torch.openreg.memory_stats()
    assert fault.operation == "allocation of 5000 bytes"
    assert "Tried to allocate 4.88 KiB on openreg:0" in str(caught.value)
    assert "reserved by PyTorch" in str(caught.value)
    assert (after["num_ooms"], after["num_alloc_retries"]) == (1, 1)
    assert after["num_sync_all_streams"] == before["num_sync_all_streams"] + 1
    assert after["allocated_bytes.all.current"] == before["allocated_bytes.all.current"]
    assert after["allocated_bytes.all.peak"] == before["allocated_bytes.all.peak"]
    assert after["allocation.all.allocated"] == 0
    assert after["segment.large_pool.current"] == 0  # the cache went back first
    assert kept.sum().item() == 1000


@pytest.mark.parametrize("seed", ["early", "late", 0, 1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_injected_fault_is_the_same_under_every_schedule(kind, seed):
    """What is struck is the call's place, so it is the same under every order. Both devices are
    used and one fails; every current figure of its statistics comes back."""

    def figures():
        gc.collect()
        torch.openreg.empty_cache()
        stats = torch.openreg.memory_stats(1)
        return {key: value for key, value in stats.items() if key.endswith(".current")}

    with schedule(seed):
        train("openreg:1")
        before, expected = figures(), train("openreg:0", 2)
        after = {"out_of_memory": 3, "copy_error": 2}.get(kind, 6)
        with inject(kind, after=after, device=1, **SHORT.get(kind, {})) as fault:
            try:
                train("openreg:1", 2)
                torch.openreg.synchronize(1)
            except ERRORS.get(kind, ()):
                assert kind != "slow_stream"
            if kind == "device_lost":
                torch.openreg.reset(1)
            assert train("openreg:0", 2) == expected
        assert fault.fired >= 1
        struck.setdefault(kind, fault.operation)
        assert fault.operation == struck[kind]
        assert train("openreg:1", 2) == pytest.approx(train("cpu", 2))
        assert figures() == before


def test_injected_slow_streams_are_right_and_slow():
    x = torch.zeros(3, device="openreg")
    side = torch.Stream("openreg")
    torch.openreg.synchronize()
    with inject("slow_stream", after=1, delay_ms=20) as fault:
        x.add_(1)
        side.wait_stream(torch.accelerator.current_stream())
        start, end = (torch.openreg.Event(enable_timing=True) for _ in range(2))
        with side:
            x.mul_(5)
            start.record()
            x.add_(1)
            end.record()
        end.synchronize()
        assert start.elapsed_time(end) >= 20
        assert (fault.fired, fault.operation) == (2, "aten::mul_")
    torch.accelerator.current_stream().wait_stream(side)
    assert x.tolist() == [6.0] * 3
    with inject("slow_stream", delay_ms=0.5):
        assert train("openreg") == pytest.approx(train("cpu"))


# ---- where it strikes ----


def copies():
    here, there = torch.zeros(64, device="openreg:0"), torch.ones(64, device="openreg:0")
    far = torch.ones(64, device="openreg:1")
    pinned = torch.ones(64).pin_memory()
    yield "h2d", lambda: here.copy_(torch.ones(64)), here
    yield "h2d strided", lambda: here.copy_(torch.ones(128)[::2]), here
    yield "h2d cast", lambda: here.copy_(torch.ones(64, dtype=torch.int32)), here
    yield "h2d pinned", lambda: here.copy_(pinned, non_blocking=True), here
    yield "d2h", lambda: torch.empty(64).copy_(there), None
    yield "d2h pinned", lambda: pinned.copy_(there, non_blocking=True), pinned
    yield "item", lambda: there[0].item(), None
    yield "d2d", lambda: here.copy_(there), here
    yield "d2d strided", lambda: here.view(8, 8).t().copy_(there.view(8, 8)), here
    yield "p2p", lambda: far.copy_(there), far
    yield "p2p strided", lambda: far.view(8, 8).t().copy_(there.view(8, 8)), far
    yield "clone", lambda: there.clone(), None
    yield "to", lambda: there.to("cpu"), None


@pytest.mark.parametrize("name", [name for name, *_ in copies()])
def test_injected_copy_error_hits_copies_of_every_direction(name):
    ((copy, target),) = [(copy, target) for n, copy, target in copies() if n == name]
    torch.openreg.synchronize(0)
    torch.openreg.synchronize(1)
    with inject("copy_error", device=0) as fault:
        with fails("copy_error"):
            copy()
            torch.openreg.synchronize(0)
        assert fault.fired
        copy()
        torch.openreg.synchronize(0)
        torch.openreg.synchronize(1)
    if target is not None:
        assert target.cpu().tolist() == [1.0] * 64


@pytest.mark.parametrize("kind", FAILING)
def test_injected_fault_surfaces_in_backward(kind):
    layer = torch.nn.Linear(4, 4).to("openreg")
    # So that there is a copy in it.
    loss = layer(torch.ones(2, 4, device="openreg")).t().double().contiguous().sum()
    torch.openreg.synchronize()
    with inject(kind) as fault:
        with fails(kind):
            loss.backward()
            torch.openreg.synchronize()
        assert fault.fired
    if kind == "device_lost":
        torch.openreg.reset()
    layer.zero_grad()
    layer(torch.ones(2, 4, device="openreg")).sum().backward()
    assert layer.bias.grad.tolist() == [2.0] * 4


@pytest.mark.parametrize("kind", FAILING)
def test_injected_fault_surfaces_while_a_data_loader_pins(kind):
    data = TensorDataset(torch.arange(32.0).view(16, 2))
    loader = DataLoader(data, batch_size=2, num_workers=2, pin_memory=True)
    total = torch.zeros(2, device="openreg")

    def epoch():
        total.zero_()
        for (batch,) in loader:
            assert batch.is_pinned()
            total.add_(batch.to("openreg", non_blocking=True).sum(0))
        return total.tolist()

    assert epoch() == [240.0, 256.0]
    with inject(kind, after=5):
        with fails(kind):
            epoch()
        if kind == "device_lost":
            torch.openreg.reset()
    assert epoch() == [240.0, 256.0]


@pytest.mark.parametrize("kind", FAILING)
def test_injected_fault_is_raised_at_a_blocking_launch(kind, run_ok):
    said = run_ok(
        f"""
        import torch
        x = torch.ones(3, device="openreg")
        with torch.openreg.testing.inject({kind!r}):
            try:
                (x + 1).clone()
            except RuntimeError as error:
                print(type(error).__name__)
        torch.openreg.reset()
        assert torch.ones(3, device="openreg").sum().item() == 3
        """,
        {"OPENREG_LAUNCH_BLOCKING": "1"},
    )
    assert said.strip() == ERRORS[kind].__name__


def test_injected_fault_follows_the_order_of_calls():
    """The order is that of the calls, not of what runs."""
    side = torch.Stream("openreg")
    names = set()
    for hold_side in (True, False):
        x, y = torch.ones(3, device="openreg"), torch.ones(3, device="openreg")
        torch.openreg.synchronize()
        with inject("kernel_error", after=2) as fault:
            with gate() as held:
                held.wait(side if hold_side else torch.accelerator.current_stream())
                x.add_(1)
                with side:
                    y.mul_(2)
                    y.neg_()
                x.sub_(1)
            with fails("kernel_error"):
                torch.openreg.synchronize()
        names.add(fault.operation)
    assert names == {"aten::neg_"}


# ---- the context ----


def test_injected_fault_that_has_not_fired_is_disarmed():
    for kind in FAILING:
        with inject(kind, after=1000) as fault:
            train("openreg")
        assert (fault.fired, fault.operation) == (0, None)
        assert "injected into nothing" in repr(fault)
    for _ in range(40):
        train("openreg")


def test_injections_of_two_kinds_nest_independently():
    x = torch.ones(3, device="openreg")
    with inject("kernel_error", after=1) as kernel, inject("copy_error") as copy:
        with inject("out_of_memory", after=1) as memory, inject("kernel_error", device=1) as far:
            x + 1
            with fails("out_of_memory"):
                x + 1
            with fails("copy_error"):
                x.tolist()
            x.add_(1)
            with fails("kernel_error"):
                torch.openreg.synchronize()
            assert (kernel.fired, copy.fired, memory.fired, far.fired) == (1, 1, 1, 0)


def test_injection_of_the_same_kind_twice_is_refused():
    x = torch.ones(3, device="openreg:1")
    with inject("kernel_error", after=1, device=1) as fault:
        with pytest.raises(RuntimeError, match='"kernel_error" is armed on openreg:1 already'):
            with inject("kernel_error", device=1):
                pass
        x.add_(1)
        assert not fault.fired
        x.mul_(1)
        assert fault.operation == "aten::mul_"
        with fails("kernel_error"):
            torch.openreg.synchronize(1)
    with inject("kernel_error", device=1):
        pass  # there is none any more


def test_injection_ends_with_an_exception():
    with pytest.raises(KeyError):
        with inject("kernel_error"):
            raise KeyError
    with inject("kernel_error"):
        pass


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ({"kind": "oom"}, ValueError, "unknown fault 'oom'; known are\n  " + ", ".join(KINDS)),
        ({"kind": 3}, ValueError, "unknown fault 3"),
        ({"after": -1}, ValueError, r"after must be 0 to 2\*\*64 - 1, got -1"),
        ({"after": 2**64}, ValueError, rf"after must be 0 to 2\*\*64 - 1, got {2**64}"),
        ({"after": 1.5}, TypeError, "after must be a whole number, got 1.5"),
        ({"device": 2}, RuntimeError, "device index 2"),
        ({"device": -1}, RuntimeError, "-1"),
        ({"device": "cpu"}, ValueError, "expected an openreg device, got 'cpu'"),
        ({"delay_ms": 5}, ValueError, "delay_ms is for 'slow_stream'"),
        ({"kind": "slow_stream", "delay_ms": -1}, ValueError, "0 to 10000, got -1"),
        ({"kind": "slow_stream", "delay_ms": 10001}, ValueError, "0 to 10000, got 10001"),
        ({"kind": "slow_stream", "delay_ms": float("nan")}, ValueError, "0 to 10000, got nan"),
        ({"kind": "slow_stream", "delay_ms": "5"}, TypeError, "must be a number, got '5'"),
    ],
    ids=str,
)
def test_injection_refuses_bad_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        inject(**{"kind": "copy_error", **arguments})


def test_injection_initializes_no_device(run_ok):
    run_ok(
        """
        import torch
        with torch.openreg.testing.inject("kernel_error", device="openreg:1"):
            assert not torch.openreg.is_initialized()
        """
    )


def test_injected_fault_fires_once_for_threads_that_share_a_device():
    """Each thread's error is the device's; what is struck is struck once."""
    x = torch.ones(3, device="openreg")
    torch.openreg.synchronize()
    errors = []

    def work():
        try:
            for _ in range(50):
                x.sum().item()
        except RuntimeError as error:
            errors.append(error)

    with inject("kernel_error", after=60) as fault:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (fault.fired, len(errors)) == (1, 1)
