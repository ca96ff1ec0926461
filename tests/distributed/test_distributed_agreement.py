"""Ranks that call different things: each is told, and the group goes on. Who waits is named."""

import re
import time

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

DEVICE = "openreg:0"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    pair = Ranks(2, tmp_path_factory.mktemp("pair"), 60)
    yield pair
    pair.close()


def ones(count, dtype=torch.float32):
    return torch.ones(count, device=DEVICE, dtype=dtype)


def room(count):
    return [ones(count) for _ in range(2)]


def gather_both(*dtypes):
    with dist._coalescing_manager(device=torch.device(DEVICE)):
        for dtype in dtypes:
            dist.all_gather_into_tensor(ones(4, dtype), ones(2, dtype))


# What rank r calls, and what each is told that it says of ranks 0 and 1.
CALLS = {
    "sizes": (
        lambda r: dist.all_reduce(ones(4 + 2 * r)),
        "rank 0 calls all_reduce (SUM) of 4 elements of Float; "
        "rank 1 calls all_reduce (SUM) of 6 elements of Float",
    ),
    "large": (
        lambda r: dist.all_reduce(ones(100_000 + r)),
        "rank 0 calls all_reduce (SUM) of 100000 elements of Float; "
        "rank 1 calls all_reduce (SUM) of 100001 elements of Float",
    ),
    "dtypes": (
        lambda r: dist.all_reduce(ones(4, (torch.float32, torch.int32)[r])),
        "rank 0 calls all_reduce (SUM) of 4 elements of Float; "
        "rank 1 calls all_reduce (SUM) of 4 elements of Int",
    ),
    "reductions": (
        lambda r: dist.all_reduce(ones(4), (dist.ReduceOp.MAX, dist.ReduceOp.AVG)[r]),
        "rank 0 calls all_reduce (MAX) of 4 elements of Float; "
        "rank 1 calls all_reduce (AVG) of 4 elements of Float",
    ),
    "kinds": (
        lambda r: dist.all_reduce(ones(4)) if r else dist.broadcast(ones(4), 0),
        "rank 0 calls broadcast with rank 0 as the root of 4 elements of Float; "
        "rank 1 calls all_reduce (SUM) of 4 elements of Float",
    ),
    "roots": (
        lambda r: dist.broadcast(ones(4), r),
        "rank 0 calls broadcast with rank 0 as the root of 4 elements of Float; "
        "rank 1 calls broadcast with rank 1 as the root of 4 elements of Float",
    ),
    "broadcast": (lambda r: dist.broadcast(ones(4 + r), 0), "of 4 elements .* of 5 elements"),
    "reduce": (lambda r: dist.reduce(ones(4 + r), 0), "of 4 elements .* of 5 elements"),
    "gather": (
        lambda r: dist.gather(ones(4 + r), None if r else room(4)),
        "of 4 elements .* of 5 elements",
    ),
    "scatter": (
        lambda r: dist.scatter(ones(4 + r), None if r else room(4)),
        "of 4 elements .* of 5 elements",
    ),
    "all_gather": (
        lambda r: dist.all_gather(room(4 + r), ones(4 + r)),
        "of 4 elements .* of 5 elements",
    ),
    "reduce_scatter": (
        lambda r: dist.reduce_scatter_single(ones(4 + r), ones(8 + 2 * r)),
        "of 8 elements .* of 10 elements",
    ),
    "all_to_all": (
        lambda r: dist.all_to_all_single(ones(8 + 2 * r), ones(8 + 2 * r)),
        "rank 0 sends 16 bytes to rank 1, which expects 20",
    ),
    "sparse": (
        lambda r: dist.all_reduce(ones(4 + r).to_sparse()),
        "all_reduce of a sparse tensor .* of 4 elements .* of 5 elements",
    ),
    "dimensions of a sparse tensor": (
        lambda r: dist.all_reduce(ones(4).view(2, 2).to_sparse(1 + r)),
        r"sizes \[2, 2\], 1 sparse and 1 dense .* sizes \[2, 2\], 2 sparse and 0 dense",
    ),
    "all_gather of parts": (
        lambda r: dist.all_gather([ones(2), ones(3 + 2 * r)], ones((2, 5)[r])),
        "rank 1 sends 20 bytes to rank 0, which expects 12",
    ),
    "reduce_scatter of parts": (
        lambda r: dist.reduce_scatter(ones((2, 5)[r]), [ones(2), ones(3 + 2 * r)]),
        "rank 0 sends 12 bytes to rank 1, which expects 20",
    ),
    "the order of a list": (
        lambda r: dist.all_reduce_coalesced([ones(4 - 2 * r), ones(2 + 2 * r)]),
        "4 of Float, 2 of Float; .*: 2 of Float, 4 of Float",
    ),
    "dtypes of a list": (
        lambda r: gather_both(torch.float32, (torch.float32, torch.int32)[r]),
        "2 of Float, 2 of Float; .*: 2 of Float, 2 of Int",
    ),
    "barrier": (
        lambda r: dist.barrier(device_ids=[0]) if r else dist.all_reduce(ones(4)),
        "rank 0 calls all_reduce (SUM) of 4 elements of Float; rank 1 calls barrier",
    ),
}


def rank_disagrees(rank, names):
    for name in names:
        call, said = CALLS[name]
        with pytest.raises(dist.DistBackendError) as raised:
            call(rank)
            torch.openreg.synchronize()
        text = str(raised.value)
        assert f" failed on rank {rank} of 2: the ranks do not agree: " in text, text
        pattern = said if ".*" in said else re.escape(said)
        assert re.search(pattern, text), text
        torch.openreg.synchronize()
        x = ones(4)
        dist.all_reduce(x)
        assert x.tolist() == [2.0] * 4, name


def test_ranks_that_disagree_each_get_an_error_and_go_on(pair):
    pair.run(rank_disagrees, list(CALLS))


def rank_sends_another_size(rank):
    if rank:
        for x in (ones(6), ones(4, torch.int32), ones(4)):
            dist.send(x, 0)
        torch.openreg.synchronize()
        return
    for said in ("24 bytes of Float, this one expects 16", "16 bytes of Int, .* 16 of Float"):
        with pytest.raises(dist.DistBackendError, match=f"recv of .*rank 1 sends {said}"):
            dist.recv(ones(4), 1)
            torch.openreg.synchronize()
    x = torch.zeros(4, device=DEVICE)
    assert dist.recv(x) == 1
    assert x.tolist() == [1.0] * 4


def test_message_of_another_size_is_the_receivers_error(pair):
    pair.run(rank_sends_another_size)


def rank_drops(rank):
    """One device alone is reset: the other rank is told, and both go on in step."""
    store = dist.distributed_c10d._get_default_store()
    first, x = ones(4), ones(4)
    if rank:
        earlier = dist.all_reduce(first, async_op=True)
        torch.openreg.current_stream().synchronize()  # it is Gloo's, and waits for rank 0
        with torch.openreg.testing.gate() as gate:
            gate.wait()
            work = dist.all_reduce(x, async_op=True)
            torch.openreg.reset()
        with pytest.raises(dist.DistBackendError, match="its device was reset"):
            work.wait()  # at once, though no thread has come to it
        store.set("dropped", "")
        earlier.wait()
    else:
        store.wait(["dropped"])
        dist.all_reduce(first)
        with pytest.raises(dist.DistBackendError, match=r"rank 1 calls .*, whose inputs were drop"):
            dist.all_reduce(x)
            torch.openreg.synchronize()
    assert first.tolist() == [2.0] * 4
    y = ones(4)
    dist.all_reduce(y)
    assert y.tolist() == [2.0] * 4


def test_rank_without_inputs_fails_the_collective_on_all_ranks(pair):
    pair.run(rank_drops)


def rank_hangs(rank):
    store = dist.distributed_c10d._get_default_store()
    group = dist.new_group(group_desc="two")
    x = ones(4)
    dist.all_reduce(x, group=group)
    torch.openreg.synchronize()
    if rank:
        store.wait(["seen"])
        dist.all_reduce(x, group=group)
        dist.broadcast(x, 0, group=group)
        torch.openreg.synchronize()
        return None
    dist.all_reduce(x, group=group)
    dist.broadcast(x, 0, group=group)
    limit, report = time.monotonic() + 30, ""
    while not ("to call it" in report and "which has not" in report) and time.monotonic() < limit:
        report = torch.openreg.hang_report()
        time.sleep(0.001)
    store.set("seen", "")
    torch.openreg.synchronize()
    assert "of group two" not in torch.openreg.hang_report()
    return report


def test_hang_report_names_collective_group_ranks_and_number(pair):
    report, _ = pair.run(rank_hangs)
    report = " ".join(report.split())
    line = r" {} of group two \([0-9a-f]+\) \(rank 0 of 2\) on openreg:0: called \d+\.\d s ago, {}"
    assert re.search(line.format("all_reduce 2", r"waits for rank 1 at \S+ to call it"), report)
    assert "waits for the collective all_reduce 2, which has not been signalled" in report, report
    assert re.search(line.format("broadcast 3", "has not begun: .*"), report), report


@pytest.mark.simulated_device("its tasks are split")
def test_schedule_decides_when_a_collective_begins_and_ends(run_ok):
    """By seeds and in a search, and each repeats; a program that waits has one result."""
    run_ok(
        """
    import torch, torch.distributed as dist
    explore, schedule = torch.openreg.testing.explore, torch.openreg.testing.schedule
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)

    def gather(waits):
        x = torch.ones(1, device="openreg")
        out = torch.zeros(1, device="openreg")
        work = dist.all_gather_single(out, x, async_op=True)
        if waits:
            work.wait()
        read = out + 0
        work.wait()
        return read.item()

    for how in ({"schedules": 24}, {"preemptions": 1}):
        found = explore(lambda: gather(False), **how)
        assert {result.value for result in found.results} == {0.0, 1.0}, found
        assert explore(lambda: gather(True), **how).ok
        for result in found.results:
            for _ in range(20):
                with schedule(result.seeds[-1]):
                    assert gather(False) == result.value
    def add_beside(waits):
        x = torch.ones(1, device="openreg")
        work = dist.all_reduce(x, async_op=True)
        if waits:
            work.wait()
        x.add_(1)  # else the collective may end after it, with what it has sent before
        work.wait()
        return x.item()

    found = explore(lambda: add_beside(False), preemptions=1)
    assert {result.value for result in found.results} == {1.0, 2.0}, found
    assert explore(lambda: add_beside(True), preemptions=1).ok
    (lost,) = [result.seeds[0] for result in found.results if result.value == 1.0]
    for _ in range(20):
        with schedule(lost):
            assert add_beside(False) == 1.0
    assert 1.0 in [result.value for result in explore(lambda: add_beside(False), 40).results]

    with schedule("late"):
        work = dist.all_reduce(torch.ones(1, device="openreg"), async_op=True)
        while not work.is_completed():  # no point: the collective sees to it
            pass
    dist.destroy_process_group()
    """,
        timeout=120,
    )


@pytest.mark.simulated_device("its tasks are split")
def test_reset_between_the_halves_of_a_collective_writes_nothing(run_ok):
    """Nothing is written then: the memory may be another tensor's by now."""
    run_ok(
        """
    import torch, torch.distributed as dist
    from torch.openreg.testing import explore
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)

    def reset_beside():
        x = torch.ones(1000, device="openreg")
        torch.openreg.synchronize()
        work = dist.all_reduce(x, async_op=True)
        torch.zeros(1, device="openreg").add_(1).add_(1)
        torch.openreg.reset(0)
        x.fill_(5)
        torch.openreg.synchronize()
        while not work.is_completed():
            pass
        try:
            work.wait()
            error = ""
        except dist.DistBackendError as dropped:
            error = str(dropped)
        return x.unique().tolist(), "failed before its second half was to run" in error

    found = explore(reset_beside, preemptions=2)
    values = [result.value for result in found.results]
    assert ([5.0], True) in values, found
    assert all(value == [5.0] for value, _ in values), found
    dist.destroy_process_group()
    """,
        timeout=120,
    )
