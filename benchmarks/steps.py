"""Training steps against native CPU, and against themselves with the sanitizer on; and steps whose
batch comes by a blocking copy from pageable memory, for which the host waits, where native CPU
takes the batch as it is.

Three processes take turns, so that a change of the machine's clock meets each of them: the device,
and two that never load it, so that no thread it keeps slows the CPU down. The second CPU by the
first is the floor: what noise alone makes of a ratio of 1.
"""

import contextlib
import functools
import json
import multiprocessing
import os
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

TURNS = 9
NATIVE_LIMIT, SANITIZER_LIMIT = 1.25, 1.5


def mlp(width, batch):
    layers = [part for _ in range(4) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(batch, width)


def transformer():
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    return layer, torch.randn(4, 32, 128)


def convolutions():
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers), torch.randn(16, 3, 32, 32)


PROGRAMS = {
    "MLP 4 x 128": functools.partial(mlp, 128, 32),
    "MLP 4 x 1024": functools.partial(mlp, 1024, 128),
    "transformer layer": transformer,
    "conv net": convolutions,
}


COPYING = ["MLP 4 x 128", "MLP 4 x 1024"]


def training_step(make, device, optimize, copies=False):
    torch.manual_seed(0)
    model, batch = make()
    model, x = model.to(device), batch if copies else batch.to(device)
    optimizer = optimize(model.parameters(), lr=1e-4)

    def step():
        optimizer.zero_grad()
        y = model(x.to(device))
        F.mse_loss(y, torch.zeros_like(y)).backward()
        optimizer.step()

    return step


@functools.lru_cache(maxsize=1)
def training(name, device, copies):
    return training_step(PROGRAMS[name], device, torch.optim.AdamW, copies)


def steps_us(step, synchronize, seconds):
    steps, start = 0, time.perf_counter()
    while time.perf_counter() < start + seconds:
        step()
        steps += 1
    synchronize()
    return (time.perf_counter() - start) / steps * 1e6


def synchronizing(device):
    return torch.accelerator.synchronize if device != "cpu" else lambda: None


def turn(name, device, copies):
    """A step's time in us, without and with the sanitizer."""
    step = training(name, device, copies)
    synchronize = synchronizing(device)
    steps_us(step, synchronize, 0.03)
    plain = steps_us(step, synchronize, 0.15)
    if device == "cpu":
        return plain, None
    with torch.openreg.sanitizer.enable():
        return plain, steps_us(step, synchronize, 0.15)


def process(autoload):
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = autoload
    return multiprocessing.get_context("spawn").Pool(1)


@contextlib.contextmanager
def processes():
    """The CPU's, the device's, and a second of the CPU's."""
    with process("0") as native, process("1") as device, process("0") as control:
        yield native, device, control


def rounds(turn, processes, name, *options):
    """What each process measures of a program, TURNS times in turn."""
    devices = "cpu", "openreg", "cpu"
    for _ in range(TURNS):
        yield [p.apply(turn, (name, d, *options)) for p, d in zip(processes, devices, strict=True)]


def measure(name, processes, copies=False):
    turns = []
    for (cpu, _), (plain, checked), (again, _) in rounds(turn, processes, name, copies):
        turns.append((plain / cpu, checked / plain, again / cpu))
    step, checked, control = map(statistics.median, zip(*turns, strict=True))
    return step, checked, max(control, 1 / control)


def main():
    with processes() as three:
        for name in PROGRAMS:
            step, checked, noise = measure(name, three)
            row = {"name": f"step of {name} / native", "value": step, "unit": "x"}
            print(json.dumps({**row, "limit": NATIVE_LIMIT, "floor": noise}))
            row = {"name": f"step of {name}, sanitizer / without", "value": checked, "unit": "x"}
            print(json.dumps({**row, "limit": SANITIZER_LIMIT}))
        for name in COPYING:
            step, _, noise = measure(name, three, copies=True)
            row = {"name": f"step of {name}, batch copied / native", "value": step, "unit": "x"}
            print(json.dumps({**row, "floor": noise}))


if __name__ == "__main__":
    main()
