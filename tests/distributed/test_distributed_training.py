"""DDP and FSDP2 on openreg: the gradients and losses of one process on the CPU.

The functions that begin with `rank_` run on every rank.
"""

import os

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn

# Four processes take a while to start: they are for `make integration`.
SIZES = [2, 4] if os.environ.get("OPENREG_INTEGRATION") else [2]
BATCH = 16


@pytest.fixture(scope="module", params=SIZES)
def ranks(request, tmp_path_factory):
    ranks = Ranks(request.param, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24), nn.LayerNorm(24))
            for _ in range(3)
        )
        self.head = nn.Linear(24, 5)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def make_model():
    torch.manual_seed(0)
    return Model()


def batch():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, 24, generator=generator)
    return x, torch.randint(5, (BATCH,), generator=generator)


def own_part(t):
    return t.chunk(dist.get_world_size())[dist.get_rank()]


def train(model, optimizer, part, device, count):
    """The mean loss of each step, over every rank's part of the batch."""
    losses = []
    x, y = (part(t).to(device) for t in batch())
    for _ in range(count):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def on_cpu(count):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return train(model, optimizer, lambda t: t, "cpu", count), model


def same_losses(losses, expected):
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    torch.testing.assert_close(losses.cpu(), expected, rtol=1e-4, atol=1e-5)
    assert losses[-1] < 0.8 * losses[0]


def use(rank):
    """The rank's device, made current."""
    index = rank % torch.openreg.device_count()
    torch.openreg.set_device(index)
    return f"openreg:{index}"


def rank_ddp_gradient(rank):
    device = use(rank)
    model = nn.parallel.DistributedDataParallel(make_model().to(device), device_ids=None)
    x, y = batch()
    parts = [own_part(t).to(device) for t in (x, y)]
    nn.functional.cross_entropy(model(parts[0]), parts[1]).backward()
    one = make_model()
    nn.functional.cross_entropy(one(x), y).backward()
    for ours, theirs in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-6)


def test_ddp_gives_the_average_gradient(ranks):
    ranks.run(rank_ddp_gradient)


def rank_ddp_trains(rank, hook):
    device = use(rank)
    model = nn.parallel.DistributedDataParallel(
        make_model().to(device), bucket_cap_mb=0.01, gradient_as_bucket_view=True
    )
    if hook:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        model.register_comm_hook(None, allreduce_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = train(model, optimizer, own_part, device, 8)
    expected, one = on_cpu(8)
    same_losses(losses, expected)
    for ours, theirs in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("hook", [False, True], ids=["plain", "hook"])
def test_ddp_trains_with_the_losses_of_one_process(ranks, hook):
    ranks.run(rank_ddp_trains, hook)


def rank_ddp_runs_ahead(rank):
    device = use(rank)
    model = nn.parallel.DistributedDataParallel(make_model().to(device), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, own_part, device, 3)
    torch.openreg.synchronize()
    x, y = (own_part(t).to(device) for t in batch())
    torch.openreg.synchronize()
    with torch.openreg.testing.gate() as gate:
        gate.wait()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        assert not torch.accelerator.current_stream().query()
    torch.openreg.synchronize()


def test_ddp_step_does_not_hold_the_host(ranks):
    ranks.run(rank_ddp_runs_ahead)


def rank_fsdp(rank, precision):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    device = use(rank)
    model = make_model().to(device)
    options = {}
    if precision:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    sharded = model.head.weight
    assert sharded.device == torch.device(device)
    shards = [len(rows) for rows in torch.arange(5).chunk(dist.get_world_size())] + [0]
    assert sharded.to_local().shape[0] == shards[rank]  # of four ranks, the last has none
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = train(model, optimizer, own_part, device, 8).float()
    expected, one = on_cpu(8)
    if precision:
        dist.all_reduce(losses, dist.ReduceOp.AVG)
        torch.testing.assert_close(losses.cpu(), expected, rtol=0.1, atol=0.05)
        return
    same_losses(losses, expected)
    for ours, theirs in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor().cpu(), theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("precision", [False, True], ids=["float32", "bfloat16"])
def test_fsdp2_has_the_losses_of_the_cpu(ranks, precision):
    ranks.run(rank_fsdp, precision)
