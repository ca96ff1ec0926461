"""Groups by the name of their backend: which tensors they take, and what goes where by default.

The functions that begin with `rank_` run on every rank.
"""

import datetime
import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch.distributed import checkpoint

SIZE = 2
DEVICE = "openreg:1"  # not the one that is current at the start


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    ranks = Ranks(SIZE, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


def default_device(group):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the function is old, which its users do not heed
        return dist.distributed_c10d._get_pg_default_device(group).type


def rank_devices(rank):
    found = {}
    for name in (None, "openreg", "openreg:openreg", "cpu:gloo,openreg:openreg", "gloo"):
        group = dist.new_group(backend=name)
        types = sorted(device.type for device in group._device_types)
        found[name] = default_device(group), types, dist.get_backend(group)
        dist.destroy_process_group(group)
    return found


def test_group_name_decides_which_devices_it_takes(ranks):
    both = ["cpu", "openreg"]
    for found in ranks.run(rank_devices):
        assert found["openreg"] == ("openreg", both, "openreg")  # as "nccl" has cuda
        assert found["openreg:openreg"][:2] == ("openreg", ["openreg"])
        assert found["gloo"] == ("cpu", both, "gloo")
        assert found[None][:2] == found["cpu:gloo,openreg:openreg"][:2] == ("cpu", both)


def rank_openreg(rank):
    group = dist.new_group(backend="openreg")
    x = torch.full((3,), rank + 1.0, device=DEVICE)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [3.0] * 3
    y = torch.ones(3)
    dist.all_reduce(y, group=group)
    assert y.tolist() == [2.0] * 3
    torch.openreg.set_device(1)
    found = [None] * SIZE
    allocated = torch.openreg.memory_stats(1)["allocation.all.allocated"]
    dist.all_gather_object(found, {"rank": rank}, group=group)
    assert found == [{"rank": 0}, {"rank": 1}]
    assert torch.openreg.memory_stats(1)["allocation.all.allocated"] > allocated
    dist.barrier(group=group)
    torch.openreg.set_device(0)
    dist.destroy_process_group(group)


def test_group_named_openreg_sends_objects_by_the_device(ranks):
    ranks.run(rank_openreg)


def rank_loads(rank, folder, backend):
    from torch.distributed.checkpoint.format_utils import (
        BroadcastingTorchSaveReader,
        DynamicMetaLoadPlanner,
    )

    dist.destroy_process_group()
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/{backend}",
        rank=rank,
        world_size=SIZE,
        timeout=datetime.timedelta(seconds=20),
    )
    torch.openreg.set_device(rank)
    try:
        if rank == 0:
            torch.save({"w": torch.arange(4.0)}, f"{folder}/one.pt")
        dist.barrier()
        state = {"w": torch.zeros(4, device="openreg")}
        checkpoint.load(
            state,
            planner=DynamicMetaLoadPlanner(),
            storage_reader=BroadcastingTorchSaveReader(),
            checkpoint_id=f"{folder}/one.pt",
        )
        assert state["w"].tolist() == [0, 1, 2, 3]
        checkpoint.save({"v": state["w"] + 1}, checkpoint_id=f"{folder}/many")
        state = {"v": torch.zeros(4, device="openreg")}
        checkpoint.load(state, checkpoint_id=f"{folder}/many")
        assert state["v"].tolist() == [1, 2, 3, 4]
    finally:
        torch.openreg.set_device(0)


def test_group_named_openreg_saves_a_checkpoint(tmp_path):
    """What rank 0 has read goes where the group's default is, which has to be where others wait."""
    ranks = Ranks(SIZE, tmp_path)
    ranks.run(rank_loads, str(tmp_path), "openreg")
    ranks.close()


# ---- "gloo" -------------------------------------------------------------------------------------


def rank_gloo(rank):
    group = dist.new_group(backend="gloo")
    mine, other = torch.full((4,), rank + 1.0), 1 - rank
    for device in ("cpu", DEVICE):
        x = mine.clone().to(device)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [3.0] * 4
        y = torch.empty_like(x)
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine.to(device), other, group),
                dist.P2POp(dist.irecv, y, other, group),
            ]
        ):
            work.wait()
        assert y.tolist() == [other + 1.0] * 4
        parts = [torch.empty(4, device=device) for _ in range(SIZE)]
        dist.all_gather(parts, mine.to(device), group=group)
        assert [part[0].item() for part in parts] == [1, 2]
        sparse = torch.eye(3).to_sparse().to(device)
        dist.all_reduce(sparse, group=group)
        assert torch.equal(sparse.cpu().to_dense(), 2 * torch.eye(3))
    found = [None] * SIZE
    dist.all_gather_object(found, rank, group=group)
    assert found == [0, 1]
    dist.barrier(group=group)
    dist.destroy_process_group(group)


def test_group_named_gloo_takes_both_devices(ranks):
    ranks.run(rank_gloo)


def rank_gloo_order(rank):
    """In the order of streams, and not in that of what the group does with the CPU's tensors."""
    group = dist.new_group(backend="gloo")
    x = torch.full((1000,), float(rank), device=DEVICE)
    torch.openreg.synchronize(1)
    with torch.openreg.testing.gate(1) as gate:
        gate.wait()
        x.add_(1)
        work = dist.all_reduce(x, group=group, async_op=True)
        y = torch.ones(2)
        dist.all_reduce(y, group=group)  # waits for nothing of the device's
        assert y.tolist() == [2.0, 2.0]
        work.wait()
        z = x * 2
        assert not work.is_completed() and not torch.openreg.current_stream(1).query()
    assert z.tolist() == [6.0] * 1000 and work.is_completed()
    with pytest.raises(RuntimeError, match=r"strides \[2\]; pass tensor.contiguous"):
        dist.all_reduce(x[::2], group=group)
    dist.destroy_process_group(group)


def test_group_named_gloo_keeps_the_order_of_streams(ranks):
    ranks.run(rank_gloo_order)


def rank_default_gloo(rank, folder):
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/g", rank=rank, world_size=SIZE)
    assert dist.get_backend() == "gloo" and dist.group.WORLD.name() == "gloo"
    dist.monitored_barrier()
    torch.openreg.set_device(rank)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2).to(f"openreg:{rank}")
    ddp = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    ddp(torch.full((2, 4), rank + 1.0, device=f"openreg:{rank}")).sum().backward()
    assert model.weight.grad.tolist() == [[3.0] * 4] * 2
    torch.openreg.set_device(0)


@pytest.mark.slow
def test_group_named_gloo_serves_ddp(tmp_path):
    ranks = Ranks(SIZE, tmp_path)
    ranks.run(rank_default_gloo, str(tmp_path))
    ranks.close()


def rank_cpu_alone(rank):
    group = dist.new_group(backend="cpu:gloo")
    # And so both ranks have come to it: one that leaves closes what the other is connecting to.
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [SIZE] * 2
    assert [device.type for device in group._device_types] == ["cpu"]
    with pytest.raises(RuntimeError, match="No backend type associated with device type openreg"):
        dist.all_reduce(torch.ones(2, device=DEVICE), group=group)
    dist.destroy_process_group(group)


def test_group_can_be_the_cpus_alone(ranks):
    ranks.run(rank_cpu_alone)
