"""Trains a small net with DistributedDataParallel, in as many processes as torchrun starts, on one
host or on several.

    torchrun --nproc-per-node 2 docs/examples/torchrun_ddp.py

The exit status is 1 if the net has not learnt. Several hosts: docs/distributed.md.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

STEPS = 40


def train(device, rank, size):
    """The mean loss of each step, over the parts of all ranks."""
    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    targets = inputs.sum(1, keepdim=True).sin()
    x, y = (t.chunk(size)[rank].to(device) for t in (inputs, targets))
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()  # the gradients' average, over all processes
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return losses.tolist()


def main():
    dist.init_process_group()  # torchrun's environment says where the others are
    index = int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    rank, size = dist.get_rank(), dist.get_world_size()
    losses = train(torch.device("openreg", index), rank, size)
    place = f"host {os.environ['GROUP_RANK']}, openreg:{index}"
    line = f"rank {rank} of {size} ({place}): loss {losses[0]:.4f} to {losses[-1]:.4f}\n"
    print(line, end="", flush=True)  # in one write: others print to the same place
    dist.destroy_process_group()
    return 0 if losses[-1] < losses[0] / 4 else 1


if __name__ == "__main__":
    sys.exit(main())
