"""Peers that do not come or die, groups that end early, forks: who is told what."""

import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

DEVICE = "openreg:0"
TIMEOUT = 5  # seconds


@pytest.fixture
def pair(tmp_path):
    pair = Ranks(2, tmp_path, TIMEOUT)
    yield pair
    pair.close()


NAMES = r"{} of group default_pg \(0\) failed on rank {} of 2: .*\(peer: rank {} at \[[0-9a-f.:]+\]:\d+\)$"


def rank_alone(rank):
    x = torch.ones(4, device=DEVICE)
    dist.all_reduce(x)
    torch.openreg.synchronize()
    began = time.monotonic()
    work = dist.all_reduce(x, async_op=True)
    work.wait()  # nothing is known yet
    y = x + 1
    with pytest.raises(dist.DistBackendError) as raised:
        torch.openreg.synchronize()
    took = time.monotonic() - began
    assert re.search(NAMES.format("all_reduce", 0, 1), str(raised.value)), str(raised.value)
    assert "Timed out" in str(raised.value)
    assert TIMEOUT * 0.9 < took < TIMEOUT * 4, took
    # It has surfaced: the device goes on, and the Work still knows.
    torch.openreg.synchronize()
    assert work.is_completed() and not work.is_success() and work.exception() is not None
    assert work.get_future_result().wait() == 2
    with pytest.raises(dist.DistBackendError, match="all_reduce of group"):
        work.wait()
    assert (y * 0 + 3).sum().item() == 12.0


def rank_together(rank):
    dist.all_reduce(torch.ones(4, device=DEVICE))
    torch.openreg.synchronize()


def test_a_peer_that_does_not_come(pair):
    pair.start(rank_alone, ranks=[0])
    pair.start(rank_together, ranks=[1])
    pair.results()


def rank_bereaved(rank, async_op):
    x = torch.ones(4, device=DEVICE)
    dist.all_reduce(x)
    began = time.monotonic()
    work = dist.all_reduce(x, async_op=True)
    dist.distributed_c10d._get_default_store().set("waiting", "")
    with pytest.raises(dist.DistBackendError) as raised:
        if async_op:
            while not work.is_completed():
                time.sleep(0.001)
            work.wait()
        else:
            x.cpu()
    took = time.monotonic() - began
    assert re.search(NAMES.format("all_reduce", 0, 1), str(raised.value)), str(raised.value)
    torch.openreg.synchronize()  # reported once
    # The next one fails too, at once.
    work = dist.broadcast(x, 0, async_op=True)
    with pytest.raises(dist.DistBackendError, match="broadcast of group"):
        work.wait(torch.distributed.distributed_c10d.default_pg_timeout)
    torch.openreg.synchronize()
    return took


def rank_doomed(rank):
    dist.all_reduce(torch.ones(4, device=DEVICE))
    torch.openreg.synchronize()
    dist.distributed_c10d._get_default_store().wait(["waiting"])
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("async_op", [False, True], ids=["synchronize", "wait"])
def test_a_peer_that_is_killed(pair, async_op):
    pair.start(rank_bereaved, async_op, ranks=[0])
    pair.start(rank_doomed, ranks=[1])
    (took,) = pair.results([0])
    assert took < TIMEOUT
    pair.processes[1].join(60)
    assert pair.processes[1].exitcode == -signal.SIGKILL


def rank_waits_no_longer(rank):
    x = torch.ones(4, device=DEVICE)
    if rank == 1:
        dist.distributed_c10d._get_default_store().wait(["rank 0 has given up"])
        dist.send(x, 0)
        return
    work = dist.irecv(x, 1)
    with pytest.raises(dist.DistBackendError, match="recv of group .* is not complete after the 50 ms"):
        work.wait(torch.distributed.distributed_c10d.timedelta(milliseconds=50))
    dist.distributed_c10d._get_default_store().set("rank 0 has given up", "")
    assert work.wait()
    torch.openreg.synchronize()


def rank_reset(rank):
    """What a reset drops never reaches Gloo; the work says so, the device is as new."""
    x = torch.ones(4, device=DEVICE)
    with torch.openreg.testing.gate() as gate:
        gate.wait()
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        torch.openreg.reset()
    with pytest.raises(dist.DistBackendError, match="the device was reset|its device was reset"):
        work.wait(torch.distributed.distributed_c10d.timedelta(seconds=60))
    torch.openreg.synchronize()
    x = torch.ones(4, device=DEVICE)
    dist.all_reduce(x)
    assert x.tolist() == [2.0] * 4


def rank_destroys(rank):
    """Collectives under way end as they would have."""
    group = dist.new_group()
    x = torch.ones(4, device=DEVICE)
    torch.openreg.synchronize()
    with torch.openreg.testing.gate() as gate:
        gate.wait()
        dist.all_reduce(x, group=group)
        dist.destroy_process_group(group)
        del group
    assert x.tolist() == [2.0] * 4


def rank_forks(rank):
    """A forked child may let go of the group, and end."""
    dist.all_reduce(torch.ones(4, device=DEVICE))
    torch.openreg.synchronize()
    child = os.fork()
    if child == 0:
        dist.destroy_process_group()
        os._exit(7)
    limit = time.monotonic() + 60
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > limit:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(done[1]) == 7
    x = torch.ones(4, device=DEVICE)
    dist.all_reduce(x)
    assert x.tolist() == [2.0] * 4


def rank_begins_again(rank, path):
    """With a device given, no backend named; such a group can be split."""
    dist.destroy_process_group()
    store = dist.FileStore(path, 2)
    device = torch.device("openreg", rank)
    dist.init_process_group(store=store, rank=rank, world_size=2, device_id=device)
    x = torch.ones(4, device=device)
    dist.all_reduce(x)
    dist.barrier()
    alone = dist.split_group(split_ranks=[[0], [1]])
    dist.all_reduce(x, group=alone)
    both = dist.split_group(split_ranks=[[0, 1]])
    dist.all_reduce(x, group=both)
    assert x.tolist() == [4.0] * 4
    assert both._get_backend(device).name() == "openreg"


def test_the_ends_of_works_and_groups(pair, tmp_path):
    for function in (rank_waits_no_longer, rank_reset, rank_destroys, rank_forks):
        pair.run(function)
    pair.run(rank_begins_again, str(tmp_path / "again"))


ONE = """
    import datetime, os, sys, torch, torch.distributed as dist
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    x = torch.ones(4, device="openreg")
"""


def test_a_process_ends_with_a_collective_that_has_not_begun(run_ok):
    run_ok(
        ONE
        + """
    gate = torch.openreg.testing.gate()
    gate.wait()
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    print("queued")
    """,
        timeout=120,
    )


def test_importing_starts_nothing(run_ok):
    out = run_ok(
        """
    import torch, torch.distributed as dist, threads
    print(dist.get_default_backend_for_device("openreg"), threads.names().count("openreg-c10d"))
    print(torch.openreg.is_initialized())
    """
    )
    assert out.split() == ["openreg", "0", "False"]


def test_a_group_without_tensors_starts_no_device(run_ok):
    out = run_ok(
        """
    import torch, torch.distributed as dist
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    dist.barrier()
    print(torch.openreg.is_initialized())
    dist.destroy_process_group()
    """
    )
    assert out.split() == ["False"]


def test_a_device_that_kernels_cannot_reach(run_ok, plugins):
    """Copies on both sides of Gloo, and the same order."""
    run_ok(
        ONE
        + """
    assert not torch.openreg.get_device_properties(0).can_map
    with torch.openreg.testing.gate() as gate:
        gate.wait()
        x.add_(1)
        work = dist.all_reduce(x, async_op=True)
        whole = torch.zeros(4, device="openreg")
        dist.all_gather_single(whole, x)
        work.wait()
        y = x + 1
        assert not work.is_completed()
    assert y.tolist() == [3.0] * 4 and whole.tolist() == [2.0] * 4
    assert work.get_future().wait()[0].tolist() == [2.0] * 4
    dist.destroy_process_group()
    """,
        env={"OPENREG_PLUGIN": str(plugins / "libvendor_nomap.so")},
    )
