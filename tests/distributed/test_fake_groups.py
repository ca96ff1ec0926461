"""PyTorch's stand-in for other ranks, its fake group, on this device."""

import pytest
import torch

FAKE = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=3, world_size=64, store=FakeStore())
assert dist.get_world_size() == 64 and dist.get_rank() == 3
x = torch.ones(4, device="openreg")
dist.all_reduce(x)
whole = torch.empty(64 * 4, device="openreg")
dist.all_gather_single(whole, x)
assert x.tolist() == [1.0] * 4 and x.device.type == "openreg"

# A step of one rank of 64, with its shards alone.
mesh = dist.init_device_mesh("openreg", (8, 8), mesh_dim_names=("replicate", "shard"))
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to("openreg")
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
assert model[0].weight.to_local().shape == (8, 64)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 64, device="openreg")).sum().backward()
optimizer.step()
torch.openreg.synchronize()
dist.destroy_process_group()
"""


def test_fake_group_takes_the_device(run_ok):
    run_ok(FAKE)


@pytest.mark.skipif(torch.__version__ < "2.15", reason="an option of PyTorch 2.15")
@pytest.mark.parametrize("name", ["openreg", "cuda"])
def test_fake_ranks_that_all_hold_the_same_give_its_sums(run_ok, name):
    run_ok(
        f"""
        import torch, torch_openreg, torch.distributed as dist
        from torch._C._distributed_c10d import FakeProcessGroup
        from torch.testing._internal.distributed.fake_pg import FakeStore

        if {name == "cuda"}:
            torch_openreg.as_cuda()
        options = FakeProcessGroup.Options()
        options.simulate_uniform_ranks = True
        dist.init_process_group("fake", FakeStore(), rank=3, world_size=64, pg_options=options)
        x, y = torch.ones(4, device="{name}"), torch.full((4,), 2.0, device="{name}")
        with torch.openreg.testing.gate() as gate:
            gate.wait()
            dist.all_reduce(x)
            dist.all_reduce(y, op=dist.ReduceOp.AVG)
            whole = torch.empty(64 * 4, device="{name}")
            dist.all_gather_single(whole, x)
        assert x.tolist() == [64.0] * 4 and y.tolist() == [2.0] * 4
        assert whole.tolist() == [64.0] * 256
        """
    )


MIXED = """
import torch, torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


def rank_of_a_real_pipeline(rank):
    # Two real ranks send each other what a pipeline sends; the other dimensions are fake.
    device = torch.device("openreg", rank)
    mesh = dist.init_device_mesh(
        "openreg", (2, 1), mesh_dim_names=("pp", "dp"), backend_override={"dp": "fake"}
    )
    assert dist.get_backend(mesh.get_group("dp")) == "fake"
    torch.manual_seed(rank)
    stage = nn.Linear(8, 8).to(device)
    fully_shard(stage, mesh=mesh["dp"])
    stage = PipelineStage(stage, rank, 2, device, group=mesh.get_group("pp"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, t: (y - t).square().mean())
    x = torch.ones(4, 8, device=device)
    if rank == 0:
        schedule.step(x)
    else:
        losses = []
        schedule.step(target=torch.zeros(4, 8, device=device), losses=losses)
        assert len(losses) == 2 and all(loss.item() > 0 for loss in losses)
    assert all(p.grad is not None for p in stage.submod.parameters())


torch.openreg.testing.run_ranks(rank_of_a_real_pipeline, 2)
"""


def test_fake_and_real_groups_mix_in_a_mesh(run_ok):
    run_ok(MIXED)


LOCAL = """
import torch, torch.distributed as dist
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, rand
from torch.testing._internal.distributed.fake_pg import FakeStore

NAME = {name!r}
dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
with LocalTensorMode(4):
    mesh = dist.init_device_mesh(NAME, (4,))
    x = torch.arange(32.0).view(8, 4)
    rows = distribute_tensor(x.to(NAME), mesh, [Shard(0)])
    columns = distribute_tensor(torch.eye(4, device=NAME), mesh, [Shard(1)])
    y = rows @ columns
    assert y.to_local().device.type == NAME
    whole = y.redistribute(placements=[Replicate()]).to_local().reconcile()
    assert torch.equal(whole.cpu(), x)
    assert rows.sum().full_tensor().reconcile().item() == x.sum()
    if NAME == "cuda":  # PyTorch asks for that name before it draws
        drawn = rand(8, 4, device_mesh=mesh, placements=[Shard(0)])
        assert drawn.full_tensor().reconcile().unique().numel() == 32
dist.destroy_process_group()
"""


@pytest.mark.parametrize("name", ["openreg", "cuda", "cpu"])
def test_local_tensors_hold_what_all_ranks_have(run_ok, name):
    run_ok(LOCAL.format(name=name), env={"OPENREG_AS_CUDA": str(int(name == "cuda"))})
