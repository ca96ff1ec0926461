"""How long collectives keep memory: until somebody waits for them, and not until they have run.

The functions that begin with `rank_` run on every rank.
"""

import contextlib
import threading

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn

SIZE = 2
DEVICE = "openreg:1"  # not the one that is current at the start
COUNT = 1 << 18  # elements: 1 MiB


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    ranks = Ranks(SIZE, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


def active():
    return torch.openreg.memory_stats(1)["active_bytes.all.current"]


def full(value, count=COUNT):
    return torch.full((count,), float(value), device=DEVICE)


def coalesced(rank):
    with dist._coalescing_manager(device=torch.device(DEVICE), async_ops=True) as manager:
        for _ in range(2):
            dist.all_reduce(full(1))
    manager.wait()


def exchange(rank):
    ops = [dist.P2POp(dist.isend, full(1), 1 - rank), dist.P2POp(dist.irecv, full(0), 1 - rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def functional(rank):
    from torch.distributed import _functional_collectives as functional

    functional.wait_tensor(functional.all_reduce(full(1), "sum", dist.group.WORLD))


CALLS = {
    "all_reduce": lambda rank: dist.all_reduce(full(1)),
    "asynchronous": lambda rank: dist.all_reduce(full(1), async_op=True).wait(),
    "synchronize": lambda rank: dist.all_reduce(full(1), async_op=True).synchronize(),
    "broadcast": lambda rank: dist.broadcast(full(1), 0),
    "all_gather": lambda rank: dist.all_gather([full(0), full(0)], full(1)),
    "all_gather_single": lambda rank: dist.all_gather_single(full(0, 2 * COUNT), full(1)),
    "reduce_scatter": lambda rank: dist.reduce_scatter(full(0), [full(1), full(1)]),
    "reduce_scatter_single": lambda rank: dist.reduce_scatter_single(full(0), full(1, 2 * COUNT)),
    "all_to_all_single": lambda rank: dist.all_to_all_single(full(0), full(1)),
    "coalesced": coalesced,
    "exchange": exchange,
    "functional": functional,
}


def rank_gives_back(rank, name):
    CALLS[name](rank)
    torch.openreg.synchronize(1)
    with torch.openreg.testing.gate(1) as gate:
        gate.wait()
        before = active()
        for _ in range(3):
            CALLS[name](rank)
        held = active() - before
    torch.openreg.synchronize(1)
    return held


@pytest.mark.parametrize("name", CALLS)
def test_collective_returns_memory_when_a_stream_waits(ranks, name):
    """Nothing has run: whatever the caller has let go of is there for what the stream does next."""
    assert ranks.run(rank_gives_back, name) == [0, 0]


def rank_keeps(rank):
    torch.openreg.synchronize(1)
    with torch.openreg.testing.gate(1) as gate:
        gate.wait()
        before = active()
        work = dist.all_gather_single(full(0, 2 * COUNT), full(1 + rank), async_op=True)
        unwaited = active() - before
        work.wait()
        waited = active() - before
        result = work.result()[0]
        again = work.result()[0]
        del work
        kept = active() - before
        assert again.data_ptr() == result.data_ptr()
    assert result.view(2, -1).mean(1).tolist() == [1, 2]
    return unwaited, waited, kept


def test_work_keeps_inputs_until_the_wait_and_outputs_as_long_as_it_lives(ranks):
    """As CUDA's: its inputs until a stream waits, its outputs as long as somebody has the work."""
    mebi = 4 * COUNT
    assert ranks.run(rank_keeps) == [(3 * mebi, 2 * mebi, 2 * mebi)] * 2


def rank_dropped(rank):
    torch.openreg.synchronize(1)
    before = active()
    with torch.openreg.testing.gate(1) as gate:
        gate.wait()
        dist.all_reduce(full(1), async_op=True)
        dropped = active() - before
    torch.openreg.synchronize(1)
    # Nobody can know that the queue's thread has let go of it but by asking for another one.
    while active() > before:
        dist.barrier()
    return dropped


def test_work_without_a_wait_keeps_memory_until_it_has_run(ranks):
    assert ranks.run(rank_dropped) == [4 * COUNT] * 2


def rank_reuses(rank):
    """The same memory again, over and over: the stream's order is enough."""
    got = []
    torch.openreg.synchronize(1)
    with torch.openreg.testing.gate(1) as gate:
        gate.wait()
        places = set()
        for step in range(20):
            x = full(step + rank)
            places.add(x.data_ptr())
            work = dist.all_reduce(x, async_op=True)
            work.wait()
            got.append(x.mean())
            del x, work
    assert [mean.item() for mean in got] == [2 * step + 1 for step in range(20)]
    return len(places)


def test_collective_may_reuse_the_memory_of_the_last(ranks):
    assert ranks.run(rank_reuses) == [1, 1]


# ---- FSDP2 --------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.outer(self.inner(x).relu())


def rank_peak(rank, gated):
    from torch.distributed.fsdp import fully_shard

    torch.openreg.set_device(1)
    try:
        before = active()
        model = nn.Sequential(*(Block(256) for _ in range(8))).to(DEVICE)
        block = sum(p.numel() for p in model[0].parameters()) * 4
        for module in model:
            fully_shard(module)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        x = torch.ones(2, 256, device=DEVICE)
        torch.openreg.synchronize()
        peaks = []
        for _ in range(3):
            torch.openreg.reset_peak_memory_stats()
            with torch.openreg.testing.gate(1) as gate:
                if gated:
                    gate.wait()
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            torch.openreg.synchronize()
            peak = torch.openreg.memory_stats()["active_bytes.all.peak"] - before
            peaks.append(peak / block)
        return peaks
    finally:
        torch.openreg.set_device(0)


@pytest.mark.parametrize("gated", [False, True], ids=["", "the host is ahead"])
def test_fsdp2_peak_memory_is_that_of_a_few_blocks(ranks, gated):
    """The shards and their gradients are 8 blocks, over two ranks. Beside them a block is gathered
    and copied out while the next one is gathered; in backward() its gradients come to these, and
    are copied to be reduced."""
    for peaks in ranks.run(rank_peak, gated):
        assert max(peaks) < 4 + 4 + 6.5, peaks


# ---- empty_cache() under a collective that its peer has yet to call ----


def rank_empties(rank, case, sanitized):
    store, stream = dist.distributed_c10d._get_default_store(), torch.openreg.current_stream(1)
    side = torch.openreg.Stream("openreg:1")
    go = f"go {case} {sanitized}"
    watched = torch.openreg.sanitizer.enable() if sanitized else contextlib.nullcontext()
    torch.openreg.synchronize(1)
    torch.openreg.empty_cache()
    with watched:
        with torch.openreg.stream(side if case == "recorded" else stream):
            x = full(rank + 1)
        stream.wait_stream(side)
        if rank:
            store.wait([go])
        work, y = dist.all_reduce(x, async_op=True), None
        if case != "unwaited":
            work.wait()
            y = x.mean()
        if case == "recorded":
            x.record_stream(stream)
        del x
        if case != "held":
            del work
        before = torch.openreg.memory_reserved(1)
        if rank == 0:
            threading.Timer(0.1 if y is not None else 1, store.set, (go, "")).start()
        torch.openreg.empty_cache()
        kept = torch.openreg.memory_reserved(1) >= before
        # What has gone back is not the collective's any more.
        # The sanitizer says "not ready" ten times at most, to a thread that nothing else orders.
        assert kept or any(stream.query() for _ in range(11))
        torch.openreg.synchronize(1)
        return y is None or y.item(), kept


@pytest.mark.parametrize("sanitized", [False, True])
@pytest.mark.parametrize("case", ["unwaited", "held", "waited", "recorded"])
def test_emptied_cache_keeps_what_a_collective_uses(ranks, case, sanitized):
    result = case == "unwaited" or 3.0
    (first, kept), (second, _) = ranks.run(rank_empties, case, sanitized)
    assert (first, second) == (result, result)
    assert kept or case in ("waited", "recorded")  # there it waits for the collective
