"""What torch_openreg.as_cuda() costs the host: the same calls by the device's own name, and by
CUDA's in a process that asked for it.

A process as a whole is up to a tenth faster or slower than another one that does the same, by where
its memory lies. So there are several of each kind, which take turns, and the medians are compared;
the floor is the slowest of those without by their fastest. The time is the processor time of the
calling thread, so that no wait for the device is in it.
"""

import functools
import json
import multiprocessing
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

PROCESSES, TURNS = 5, 7
STEP_LIMIT = 1.05


@functools.lru_cache
def calls(device):
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.Linear(16, 16), nn.ReLU())]
    model = nn.Sequential(*layers).to(device)
    x, y = torch.randn(8, 16, device=device), torch.randn(8, 16, device=device)
    on_cpu = torch.randn(8, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step():
        optimizer.zero_grad()
        F.mse_loss(model(on_cpu.to(device, non_blocking=True)), y).backward()
        optimizer.step()

    return {
        "a small training step": step,
        "torch.zeros(8, device='DEVICE')": lambda: torch.zeros(8, device=device),
        "x + y": lambda: x + y,
        "x.to('DEVICE')": lambda: x.to(device),
        "x.device.type": lambda: x.device.type,
    }


def turn(name, device, seconds):
    """The host's time for a call, in us."""
    call, synchronize = calls(device)[name], torch.accelerator.synchronize
    end, done = time.perf_counter() + seconds, 0
    used = 0.0
    while time.perf_counter() < end:
        before = time.thread_time()
        for _ in range(20):
            call()
        used += time.thread_time() - before
        done += 20
        synchronize()  # so that no queue is full
    return used / done * 1e6


def as_cuda():
    import torch_openreg

    torch_openreg.as_cuda(force=True)


def medians(name, pools, seconds):
    """The host's time for a call in each process, in us."""
    turns = [
        [pool.apply(turn, (name, device, seconds)) for device, pool in pools] for _ in range(TURNS)
    ]
    return list(map(statistics.median, zip(*turns, strict=True)))


def main():
    context = multiprocessing.get_context("spawn")
    pools = []
    for _ in range(PROCESSES):
        pools += [("openreg", context.Pool(1)), ("cuda", context.Pool(1, as_cuda))]
    for name in calls("cpu"):
        times = medians(name, pools, 0.1 if "step" in name else 0.03)
        plain, asked = sorted(times[::2]), sorted(times[1::2])
        without = statistics.median(plain)
        row = {"name": f"as_cuda: {name.replace('DEVICE', 'cuda')} / without"}
        row |= {"value": statistics.median(asked) / without, "unit": f"x of {without:.3g} us"}
        limit = {"limit": STEP_LIMIT} if "step" in name else {}
        print(json.dumps({**row, **limit, "floor": plain[-1] / plain[0]}), flush=True)
    for _, pool in pools:
        pool.terminate()


if __name__ == "__main__":
    main()
