"""Groups under as_cuda(): "nccl" is the device's backend."""

import pytest

# Two ranks that torch.multiprocessing spawns, as a program for CUDA does it.
PROGRAM = """
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel


def collectives(rank):
    assert dist.get_backend() == "nccl" and dist.is_nccl_available()
    assert dist.get_default_backend_for_device("cuda") == "nccl"
    x = torch.full((3,), rank + 1.0, device="cuda")
    dist.all_reduce(x)
    assert x.tolist() == [3, 3, 3] and x.get_device() == rank
    gathered = [torch.empty(3, device="cuda") for _ in range(2)]
    dist.all_gather(gathered, torch.full((3,), float(rank), device="cuda"))
    assert [t[0].item() for t in gathered] == [0, 1]
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    dist.barrier(device_ids=[rank])
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        assert "cpu" in str(error)
    else:
        raise AssertionError("as with NCCL, there is no backend for the CPU")
    sub = dist.new_group([0, 1], backend="nccl")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        dist.all_reduce(x, group=sub, async_op=True).wait()
    torch.cuda.current_stream().wait_stream(side)
    assert x.tolist() == [6, 6, 6]
    on_cpu = torch.ones(1)
    dist.all_reduce(on_cpu, group=dist.new_group([0, 1], backend="gloo"))
    assert on_cpu.item() == 2


def train(rank):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1).cuda(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for step in range(3):
        x = torch.full((2, 4), rank + step + 1.0, device=f"cuda:{rank}")
        with torch.autocast("cuda"):
            loss = model(x).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    weights = [torch.empty(1, 4, device="cuda") for _ in range(2)]
    dist.all_gather(weights, model.module.weight.detach())
    assert weights[0].equal(weights[1])


def shard(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    mesh = init_device_mesh("cuda", (2,))
    assert mesh.device_type == "cuda"
    for model in (
        fully_shard(nn.Linear(4, 4).cuda(), mesh=mesh),
        FullyShardedDataParallel(nn.Linear(4, 4).cuda(), device_id=rank),
    ):
        model(torch.ones(2, 4, device="cuda")).sum().backward()
        assert all(p.grad.device.type == "cuda" for p in model.parameters())


def both(rank, path):
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=path, rank=rank, world_size=2)
    for device in ("cpu", "cuda"):
        x = torch.ones(2, device=device)
        dist.all_reduce(x)
        assert x.tolist() == [2, 2]
    dist.destroy_process_group()


def main(rank, folder, parts):
    torch.cuda.set_device(rank)
    path = f"file://{folder}/store"
    dist.init_process_group(
        "nccl", init_method=path, rank=rank, world_size=2, device_id=torch.device("cuda", rank)
    )
    for part in parts:
        globals()[part](rank)
    dist.destroy_process_group()
    both(rank, path + "2")
    if rank == 0:
        print("done", *parts)


if __name__ == "__main__":
    parts = os.environ["PARTS"].split()
    mp.spawn(main, (tempfile.mkdtemp(), parts), nprocs=2)
"""


def start(run, tmp_path, parts):
    path = tmp_path / "ranks.py"
    path.write_text(PROGRAM)
    arguments = ("-m", "torch_openreg", "run", "--as-cuda", path)
    done = run("", {"PARTS": parts}, arguments=arguments)
    assert done.code == 0, done.err
    assert done.out == f"done {parts}\n"


@pytest.mark.slow
def test_nccl_group_communicates_and_trains(run, tmp_path):
    start(run, tmp_path, "collectives train")


@pytest.mark.slow
def test_fsdp_shards_over_cuda(run, tmp_path):
    start(run, tmp_path, "shard")
