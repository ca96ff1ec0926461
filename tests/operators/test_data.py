"""Data loading, other processes, activation checkpoints, PyTorch's tools for tests and timing."""

import collections
import copy

import pytest
import torch
import torch.multiprocessing
import torch.utils.benchmark
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader, Dataset, IterableDataset

DEVICE = "openreg:1"

# ---- DataLoader ----

Pair = collections.namedtuple("Pair", ["x", "note"])


class Nested(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        x = torch.full((3,), float(i))
        return {"pair": Pair(x, f"row {i}"), "list": [x + 1, {"deep": x * 2}], "number": i}


class Stream(IterableDataset):
    def __iter__(self):
        yield from (torch.tensor([float(i)]) for i in range(8))


class OnDevice(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.ones(2, device=DEVICE)


@pytest.mark.parametrize("context, workers", [("fork", 2), ("spawn", 1)])
def test_loader_workers_pin_nested_batches(context, workers):
    torch.ones(1, device=DEVICE)  # the device is in use before a worker is forked
    loader = DataLoader(
        Nested(),
        batch_size=4,
        num_workers=workers,
        pin_memory=True,
        persistent_workers=True,
        multiprocessing_context=context,
    )
    for _ in range(2):
        total = torch.zeros(3, device=DEVICE)
        for batch in loader:
            pair = batch["pair"]
            assert isinstance(pair, Pair) and pair.note[0].startswith("row")
            leaves = [pair.x, batch["list"][0], batch["list"][1]["deep"], batch["number"]]
            assert all(leaf.is_pinned() for leaf in leaves)
            for leaf in leaves[:3]:
                total += leaf.to(DEVICE, non_blocking=True).sum(0)
        assert total.tolist() == [4 * 120 + 16] * 3


def test_loader_pins_on_the_device_that_was_current():
    """It is the one that was current where the loader was made, and stays out of the way."""
    with torch.openreg.device(1):
        loader = DataLoader(Stream(), batch_size=2, num_workers=1, pin_memory=True)
        batches = [b.openreg(non_blocking=True) for b in loader]
    assert {b.device for b in batches} == {torch.device(DEVICE)}
    assert torch.cat(batches).flatten().tolist() == list(range(8))
    assert torch.openreg.current_device() == 0


def test_loader_batches_are_prefetched_on_a_side_stream():
    side, batches = torch.openreg.Stream(1), []
    for batch in DataLoader(Nested(), batch_size=4, pin_memory=True):
        with side:
            x = batch["pair"].x.to(DEVICE, non_blocking=True)
        batches.append((x, side.record_event()))
    current = torch.openreg.current_stream(1)
    for i, (x, ready) in enumerate(batches):
        current.wait_event(ready)
        x.record_stream(current)
        assert x.mean().item() == 4 * i + 1.5


def test_random_samplers_draw_from_the_host():
    orders = []
    for _ in range(2):
        torch.manual_seed(3)
        loader = DataLoader(torch.arange(32), batch_size=8, shuffle=True)
        orders.append(torch.cat(list(loader)).tolist())
        torch.rand(5, device=DEVICE)
    assert orders[0] == orders[1] != sorted(orders[0])


def test_forked_worker_that_uses_the_device_is_refused():
    torch.ones(1, device=DEVICE)
    loader = DataLoader(OnDevice(), num_workers=1, multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match=r"(?s)forked subprocess.*'spawn'\s+start method"):
        next(iter(loader))
    assert next(iter(DataLoader(OnDevice()))).device == torch.device(DEVICE)


@pytest.mark.slow
def test_loader_worker_sends_device_tensors():
    loader = DataLoader(OnDevice(), num_workers=1, multiprocessing_context="spawn")
    here = [batch.tolist() for batch in DataLoader(OnDevice())]
    assert [batch.tolist() for batch in loader] == here
    assert all(batch.device == torch.device(DEVICE) for batch in loader)


# ---- torch.multiprocessing ----


def work(rank, results, seed):
    torch.openreg.set_device(rank)
    torch.manual_seed(seed)
    x = torch.randn(4, 4, device="openreg")
    results.put((rank, str(x.device), (x @ x).tolist()))


def fail(rank):
    raise ValueError(f"rank {rank} on {torch.ones(1, device='openreg').device}")


@pytest.mark.slow
def test_spawned_processes_use_devices_of_their_own():
    torch.ones(1, device=DEVICE)
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    processes = torch.multiprocessing.spawn(work, (results, 7), nprocs=2, join=False)
    got = sorted(results.get() for _ in range(2))
    while not processes.join():  # returns as each one ends
        pass
    torch.manual_seed(7)
    x = torch.randn(4, 4, device="openreg")
    expected = (x @ x).tolist()  # a seed gives the same numbers on each device
    assert got == [(0, "openreg:0", expected), (1, "openreg:1", expected)]


def test_spawned_process_reports_its_error():
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="rank 0 on openreg:0"):
        torch.multiprocessing.spawn(fail, nprocs=1)


def double(x):
    return (x.to(DEVICE) * 2).cpu()


def there(x):
    return x.to(DEVICE)


def test_process_pool_takes_and_returns_tensors_of_any_device():
    with torch.multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(double, [torch.ones(2), torch.arange(2.0)])[1].tolist() == [0, 2]
        assert pool.map(double, [torch.ones(2, device=DEVICE)])[0].tolist() == [2, 2]
        (result,) = pool.map(there, [torch.ones(2)])
        assert result.device.type == "openreg" and result.tolist() == [1, 1]


def test_cpu_tensor_of_a_device_program_is_shared():
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    copy_ = torch.arange(3.0, device=DEVICE).cpu()
    queue.put(copy_)
    again = queue.get()
    again[0] = 5
    assert copy_[0] == 5  # one memory


# ---- torch.utils.checkpoint ----


class Noisy(torch.nn.Module):
    """Random numbers of two devices and of the host in one forward."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 8).to("openreg:0")
        self.second = torch.nn.Linear(8, 8).to("openreg:1")

    def forward(self, x, y):
        x = torch.nn.functional.dropout(self.first(x).relu(), 0.5)
        y = torch.nn.functional.dropout(self.second(y).relu(), 0.5)
        scale = torch.rand(())
        return x.sum() * scale + y.sum().to(x.device) * torch.rand((), device="openreg:0")


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("draws_between", [0, 3])
def test_checkpoint_preserves_random_states_of_all_devices(reentrant, draws_between):
    plain = Noisy()
    model = copy.deepcopy(plain)
    inputs = [torch.randn(4, 8, device=f"openreg:{i}", requires_grad=True) for i in range(2)]
    results = []
    for net, call in (
        (plain, lambda *args: plain(*args)),
        (model, lambda *args: checkpoint(model, *args, use_reentrant=reentrant)),
    ):
        torch.manual_seed(5)
        out = call(*inputs)
        for _ in range(draws_between):
            torch.rand(3, device=DEVICE), torch.rand(3, device="openreg:0"), torch.rand(1)
        out.backward()
        after = [torch.rand(2).tolist(), *(torch.rand(2, device=x.device).tolist() for x in inputs)]
        grads = [p.grad.cpu() for p in net.parameters()] + [x.grad.cpu() for x in inputs]
        for x in inputs:
            x.grad = None
        results.append((out.item(), grads, after))
    (out, grads, after), (again, grads_again, after_again) = results
    assert out == again and after == after_again
    for a, b in zip(grads, grads_again, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_restores_autocast_in_the_recomputation(reentrant):
    seen = []

    def forward(x):
        y = x @ x
        seen.append((y.dtype, torch.openreg.current_stream(1)))
        return y.float().square().sum()

    x = torch.rand(4, 4, device=DEVICE, requires_grad=True)
    side = torch.openreg.Stream(1)
    side.wait_stream(torch.openreg.current_stream(1))
    with torch.autocast("openreg", dtype=torch.bfloat16), side:
        out = checkpoint(forward, x, use_reentrant=reentrant)
    out.backward()
    assert [dtype for dtype, _ in seen] == [torch.bfloat16] * 2
    assert seen[0][1] == side
    side.synchronize()
    assert x.grad is not None


@pytest.mark.usefixtures("nothing_left")
def test_checkpoints_hold_less_memory():
    net = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(8))
    )
    net = net.to(DEVICE)
    x = torch.randn(4096, 64, device=DEVICE, requires_grad=True)
    held = []
    for forward in (net, lambda x: checkpoint_sequential(net, 4, x, use_reentrant=False)):
        before = torch.openreg.memory_allocated(1)
        out = forward(x).sum()
        held.append(torch.openreg.memory_allocated(1) - before)
        out.backward()
        del out
    assert held[1] < held[0] / 2


# ---- torch.testing, torch.utils.benchmark ----


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int16, torch.bfloat16, torch.complex128], ids=str
)
def test_make_tensor_makes_tensors_of_the_device(dtype):
    make = torch.testing.make_tensor
    x = make(3, 4, dtype=dtype, device=DEVICE, requires_grad=dtype.is_floating_point)
    assert x.device == torch.device(DEVICE) and x.dtype == dtype and x.shape == (3, 4)
    assert make((3, 4), dtype=dtype, device=DEVICE, noncontiguous=True).is_contiguous() is False
    if dtype == torch.int16:
        assert make(100, dtype=dtype, device=DEVICE, low=2, high=4).unique().tolist() == [2, 3]
    assert make(0, dtype=dtype, device=DEVICE).numel() == 0


def test_assert_close_compares_tensors_of_the_device():
    close = torch.testing.assert_close
    x = torch.arange(4.0, device=DEVICE)
    close(x, x.clone())
    close([x, {"a": x}], [x.clone(), {"a": x + 1e-7}])
    close(x, x.cpu(), check_device=False)
    close(x / 0, x / 0, equal_nan=True)
    with pytest.raises(AssertionError, match="'device' do not match: openreg:1 != cpu"):
        close(x, x.cpu())
    with pytest.raises(
        AssertionError, match=r"(?s)Mismatched elements: 1 / 4.*difference: 2\.0 at index \(3,\)"
    ):
        close(x, torch.tensor([0.0, 1, 2, 5], device=DEVICE))
    with pytest.raises(AssertionError, match="dtype"):
        close(x, x.double())


def test_benchmark_timer_waits_for_the_device():
    timer = torch.utils.benchmark.Timer(
        "torch.openreg._sleep(30_000_000)", globals={"torch": torch}
    )
    assert timer.timeit(3).mean >= 0.030
    measured = torch.utils.benchmark.Timer(
        "y = x + 1", globals={"x": torch.ones(8, device="openreg")}
    )
    assert measured.blocked_autorange(min_run_time=0.01).median > 0


def test_fork_rng_restores_random_states_of_devices():
    torch.manual_seed(1)
    before = torch.openreg.get_rng_state_all()
    with torch.random.fork_rng(devices=range(2), device_type="openreg"):
        torch.rand(3, device=DEVICE), torch.rand(3, device="openreg:0")
        torch.manual_seed(2)
    assert all(map(torch.equal, before, torch.openreg.get_rng_state_all()))
    with torch.random.fork_rng(devices=[0], device_type="openreg"):
        torch.rand(3, device=DEVICE)
    assert torch.equal(before[0], torch.openreg.get_rng_state(0))
    assert not torch.equal(before[1], torch.openreg.get_rng_state(1))
