"""Peers that do not come or die, groups that end early, forks: who is told what."""

import datetime
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


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    pair = Ranks(2, tmp_path_factory.mktemp("pair"), TIMEOUT)
    yield pair
    pair.close()


def names(error, collective, group):
    """The message has the collective, the group, the rank, and the other rank with its address."""
    peer = r".*\(peer: rank 1 at \[[0-9a-f.:]+\]:\d+\)$"
    message = rf"^{collective} of group {group} failed on rank 0 of 2: {peer}"
    assert re.search(message, str(error)), str(error)


def rank_alone(rank):
    x = torch.ones(4, device=DEVICE)
    limit = datetime.timedelta(seconds=TIMEOUT)
    group = dist.new_group(group_desc="two", timeout=limit)
    dist.all_reduce(x, group=group)
    torch.openreg.synchronize()
    if rank == 1:
        return
    began = time.monotonic()
    work = dist.all_reduce(x, async_op=True, group=group)
    work.wait()  # nothing is known yet
    y = x + 1
    with pytest.raises(dist.DistBackendError) as raised:
        torch.openreg.synchronize()
    took = time.monotonic() - began
    names(raised.value, "all_reduce", r"two \([0-9a-f]+\)")
    assert "Timed out" in str(raised.value)
    assert TIMEOUT * 0.9 < took < TIMEOUT * 4, took
    # It has surfaced: the device goes on, and the Work still knows.
    torch.openreg.synchronize()
    assert work.is_completed() and not work.is_success() and work.exception() is not None
    assert work.get_future_result().wait() == 2
    with pytest.raises(dist.DistBackendError, match="all_reduce of group"):
        work.wait()
    assert (y * 0 + 3).sum().item() == 12.0


def test_peer_that_does_not_come_is_an_error(pair):
    pair.run(rank_alone)


def rank_bereaved(rank):
    store = dist.distributed_c10d._get_default_store()
    x, y = torch.ones(4, device="openreg:0"), torch.ones(4, device="openreg:1")
    other = dist.new_group(group_desc="other")
    dist.all_reduce(x)
    dist.all_reduce(y, group=other)
    torch.openreg.synchronize(0)
    torch.openreg.synchronize(1)
    if rank == 1:
        store.wait(["rank 0 waits"])
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(x)
    work = dist.all_reduce(y, group=other, async_op=True)
    store.set("rank 0 waits", "")
    began = time.monotonic()
    # It surfaces where the host waits for the device ...
    with pytest.raises(dist.DistBackendError) as raised:
        x.cpu()
    names(raised.value, "all_reduce", r"default_pg \(0\)")
    # ... or for the work; and once.
    while not work.is_completed():
        time.sleep(0.001)
    with pytest.raises(dist.DistBackendError) as raised:
        work.wait()
    names(raised.value, "all_reduce", r"other \([0-9a-f]+\)")
    torch.openreg.synchronize(0)
    torch.openreg.synchronize(1)
    # The next one fails too, at once.
    work = dist.broadcast(x, 0, async_op=True)
    with pytest.raises(dist.DistBackendError, match="broadcast of group"):
        work.wait(datetime.timedelta(seconds=60))
    torch.openreg.synchronize()
    return time.monotonic() - began


def test_peer_that_is_killed_is_an_error_before_the_timeout(tmp_path):
    pair = Ranks(2, tmp_path, TIMEOUT)
    pair.start(rank_bereaved)
    (took,) = pair.results([0])
    assert took < TIMEOUT
    pair.processes[1].join(60)
    assert pair.processes[1].exitcode == -signal.SIGKILL
    pair.close()


def rank_waits_no_longer(rank):
    x = torch.ones(4, device=DEVICE)
    if rank == 1:
        dist.distributed_c10d._get_default_store().wait(["rank 0 has given up"])
        dist.send(x, 0)
        return
    work = dist.irecv(x, 1)
    with pytest.raises(
        dist.DistBackendError, match=r"recv of group .* is not complete after the 50 ms"
    ):
        work.wait(datetime.timedelta(milliseconds=50))
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
    with pytest.raises(dist.DistBackendError, match="its device was reset"):
        work.wait(datetime.timedelta(seconds=60))
    torch.openreg.synchronize()
    x = torch.ones(4, device=DEVICE)
    dist.all_reduce(x)
    assert x.tolist() == [2.0] * 4


def rank_destroys(rank):
    """Collectives under way end as they would have."""
    group = dist.new_group()
    # Its half for the CPU is gone at once. PyTorch lets a rank go on while another still connects.
    dist.barrier(group)
    x = torch.ones(4, device=DEVICE)
    torch.openreg.synchronize()
    with torch.openreg.testing.gate() as gate:
        gate.wait()
        dist.all_reduce(x, group=group)
        dist.destroy_process_group(group)
        del group
    assert x.tolist() == [2.0] * 4


def rank_forks(rank):
    """A forked child may let go of the group, and end. (Gloo's own waits for threads.) It may not
    use it."""
    group = dist.new_group(backend="openreg:openreg")
    x = torch.ones(4, device=DEVICE)
    dist.all_reduce(x, group=group)
    torch.openreg.synchronize()
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(x, group=group)
        except RuntimeError as error:
            refused = "forked subprocess; use the 'spawn' start method" in str(error)
        else:
            refused = False
        dist.destroy_process_group(group)
        del group
        os._exit(7 if refused else 8)
    limit = time.monotonic() + 60
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > limit:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    code = os.waitstatus_to_exitcode(done[1])
    assert code == 7, f"the child ended with {code}"
    x = torch.ones(4, device=DEVICE)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2.0] * 4


def rank_begins_again(rank, path):
    """With a device given and no backend named."""
    dist.destroy_process_group()
    store = dist.FileStore(path, 2)
    device = torch.device("openreg", rank)
    dist.init_process_group(store=store, rank=rank, world_size=2, device_id=device)
    x = torch.ones(4, device=device)
    dist.all_reduce(x)
    dist.barrier()
    assert x.tolist() == [2.0] * 4


def test_works_and_groups_may_end_early_or_begin_again(pair, tmp_path):
    for function in (rank_waits_no_longer, rank_reset, rank_destroys, rank_forks):
        pair.run(function)
    pair.run(rank_begins_again, str(tmp_path / "again"))


def sums(group, device):
    """What all_reduce makes of the ranks' numbers, on the device and on the CPU."""
    rank = dist.get_rank()
    tensors = [torch.full((3,), rank + 1.0, device=where) for where in (device, "cpu")]
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
    return [tensor[0].item() for tensor in tensors]


def rank_splits(rank):
    device = torch.device("openreg", rank)
    # With options that it is given, PyTorch does not ask for the group's.
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    own = dist.split_group(split_ranks=[[0], [1]], pg_options=options)
    both = dist.split_group(split_ranks=[[0, 1]], group_desc="both")
    of_both = dist.split_group(both, split_ranks=[[0], [1]])
    assert [dist.get_process_group_ranks(g) for g in (own, both, of_both)] == [
        [rank],
        [0, 1],
        [rank],
    ]
    assert sums(own, device) == sums(of_both, device) == [rank + 1.0] * 2
    assert sums(both, device) == sums(None, device) == [3.0, 3.0]
    assert own.group_desc == "default_pg:split:0" and of_both.group_desc == "both:split:0"
    assert both.bound_device_id == device
    # A limit of its own, which the group that was split does not get.
    limit = datetime.timedelta(seconds=7)
    short = dist.split_group(split_ranks=[[0, 1]], timeout=limit)
    backends = [group._get_backend(device) for group in (short, both, dist.group.WORLD)]
    assert [backend.options._timeout == limit for backend in backends] == [True, False, False]
    part = dist.split_group(split_ranks=[[0, 1]], backend="openreg")
    x = torch.ones(2, device=device)
    dist.all_reduce(x, group=part)
    assert x.tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(x.cpu(), group=part)


def rank_is_left_out(rank):
    device = torch.device("openreg", rank)
    alone = dist.split_group(split_ranks=[[1]])
    # From PyTorch 2.15 on it is what new_group returns.
    assert (alone in (None, dist.GroupMember.NON_GROUP_MEMBER)) == (rank == 0)
    if rank == 1:
        assert sums(alone, device) == [2.0, 2.0]
    first = dist.new_group([0])  # of which rank 1 is told too
    if rank == 0:
        assert sums(first, device) == [1.0, 1.0]


def rank_mesh(rank):
    mesh = dist.init_device_mesh("openreg", (2, 1), mesh_dim_names=("rows", "columns"))
    device = torch.device("openreg", rank)
    assert sums(mesh.get_group("rows"), device) == [3.0, 3.0]
    assert sums(mesh.get_group("columns"), device) == [rank + 1.0] * 2


def test_group_is_split_into_working_groups(pair, tmp_path):
    # Twice: the Gloo of a process's first group is not like that of later ones.
    for path in ("first", "second"):
        pair.run(rank_begins_again, str(tmp_path / path))
        for function in (rank_splits, rank_mesh, rank_is_left_out):
            pair.run(function)


def rank_splits_without_a_device(rank, path):
    dist.destroy_process_group()
    dist.init_process_group(store=dist.FileStore(path, 2), rank=rank, world_size=2)
    if torch.__version__ >= "2.15":
        part = dist.split_group(split_ranks=[[0], [1]])
        assert sums(part, torch.device("openreg", rank)) == [rank + 1.0, rank + 1.0]
        return
    with pytest.raises(RuntimeError, match="No device associated with the default pg"):
        dist.split_group(split_ranks=[[0], [1]])


def test_split_without_a_device_id_works_from_pytorch_2_15(pair, tmp_path):
    pair.run(rank_splits_without_a_device, str(tmp_path / "none"))


ONE = """
    import datetime, os, sys, torch, torch.distributed as dist
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    x = torch.ones(4, device="openreg")
"""


def test_process_ends_with_a_collective_that_has_not_begun(run_ok):
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


def test_import_of_distributed_starts_nothing(run_ok):
    out = run_ok(
        """
    import torch, torch.distributed as dist, threads
    print(dist.get_default_backend_for_device("openreg"), threads.names().count("openreg-c10d"))
    print(torch.openreg.is_initialized())
    """
    )
    assert out.split() == ["openreg", "0", "False"]


def test_group_without_tensors_starts_no_device(run_ok):
    out = run_ok(
        """
    import torch, torch.distributed as dist
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    if torch.__version__ < "2.15":
        dist.barrier()  # without a device it is the accelerator's in newer ones
    dist.all_gather_object([None], 1)
    print(torch.openreg.is_initialized())
    dist.destroy_process_group()
    """
    )
    assert out.split() == ["False"]


def test_collectives_work_on_a_device_that_kernels_cannot_reach(run_ok, plugins):
    """Copies on both sides of Gloo, and the same order."""
    run_ok(
        ONE
        + """
    assert not torch.openreg.get_device_properties(0).can_map
    with torch.openreg.testing.gate() as gate:
        whole, again = torch.zeros(2, 4, device="openreg")
        gate.wait()
        work = dist.all_reduce(x, async_op=True)
        dist.all_gather_single(whole, x, async_op=True)
        dist.all_gather_single(again, whole)
        work.wait()
        assert not work.is_completed()
        y = work.get_future().wait()[0]
    assert y.tolist() == whole.tolist() == again.tolist() == [1.0] * 4
    assert work.is_completed()
    dist.destroy_process_group()
    """,
        env={"OPENREG_PLUGIN": str(plugins / "libvendor_nomap.so")},
    )


def test_collectives_work_under_launch_blocking(run_ok, plugins):
    """The host waits for what it queues, and a collective still needs it for nothing more."""
    code = (
        ONE
        + """
    work = dist.all_reduce(x, async_op=True)
    whole = torch.zeros(4, device="openreg")
    dist.all_gather_single(whole, x)
    work.wait()
    assert work.get_future().wait()[0].tolist() == whole.tolist() == [1.0] * 4
    dist.destroy_process_group()
    """
    )
    blocking = {"OPENREG_LAUNCH_BLOCKING": "1"}
    run_ok(code, env=blocking)
    run_ok(code, env=blocking | {"OPENREG_PLUGIN": str(plugins / "libvendor_nomap.so")})


def test_process_ends_while_collectives_release_storages_of_python(run_ok):
    """The queue's thread may be the last, but Python, to have one, and the GIL is gone."""
    out = run_ok(
        ONE
        + """
    import sys, time

    def start():
        y = torch.ones(1000, device="openreg")
        y.untyped_storage()
        dist.all_reduce(y, async_op=True)
        whole = torch.ones(1000, device="openreg")
        dist.all_gather_single(whole, torch.ones(1000, device="openreg"), async_op=True)

    class Late:
        def __del__(self, sleep=time.sleep):
            sleep(0.5)

    for _ in range(40):
        torch.openreg._sleep(500_000)
        start()
    sys.late = Late()
    print("end")
    """
    )
    assert out.split() == ["end"]
