"""A race in PyTorch's FullyShardedDataParallel, and how far the gradients are off. `--mended` adds
the `record_stream()` that is missing before PyTorch 2.15.

With NO_SHARD and parameters that are offloaded to the CPU, a unit's parameters are copied to the
device on a stream for that ("pre-unshard"), and computed with on another. The memory belongs to the
first. A root that has parameters of its own is done with its last weight early in backward:
autograd lets it go while the kernel that reads it is still queued, the next unit's copy is given
the memory, and nothing makes the copy wait. (With the units' own memory it goes well, as their
gradients are copied to the host before, for which the host waits.)
"""

import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp._flat_param import FlatParamHandle

WIDTH, BATCH = 512, 2048
DEVICE = torch.device("openreg", 0)


def mend():
    to_device = FlatParamHandle.flat_param_to

    def recorded(self, *args, **kwargs):
        to_device(self, *args, **kwargs)
        if self.flat_param.device == DEVICE:
            self.flat_param.data.record_stream(torch.openreg.default_stream(DEVICE))

    FlatParamHandle.flat_param_to = recorded


def sharded(module):
    return FullyShardedDataParallel(
        module,
        device_id=DEVICE,
        cpu_offload=CPUOffload(offload_params=True),
        sharding_strategy=ShardingStrategy.NO_SHARD,
        use_orig_params=True,
    )


def gradients(model, x):
    model(x).square().mean().backward()
    torch.accelerator.synchronize()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return found


def main():
    warnings.simplefilter("ignore", FutureWarning)
    if "--mended" in sys.argv:
        mend()
    torch.manual_seed(0)
    x = torch.randn(BATCH, WIDTH)
    first, second, last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
    expected = gradients(nn.Sequential(first, second, last), x)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("openreg", store=store, rank=0, world_size=1)
        model = sharded(nn.Sequential(sharded(first), sharded(second), last))
        with torch.openreg.sanitizer.enable("warn"):
            found = gradients(model, x.to(DEVICE))
        dist.destroy_process_group()
    for name, one, other in zip(("first", "second", "last"), found, expected, strict=True):
        off = ((one - other).norm() / other.norm()).item()
        print(f"gradient of the {name} weight:", "right" if off < 1e-4 else f"off by {off:.0%}")
    print("races reported:", len(torch.openreg.sanitizer.reports()))


if __name__ == "__main__":
    main()
