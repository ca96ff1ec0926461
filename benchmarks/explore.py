"""How many runs a second explore() makes of ten small tasks: by seeds, and in a search."""

import json
import time

import torch

import torch_openreg  # noqa: F401

RUNS, LEAST = 400, 200
explore = torch.openreg.testing.explore


def program():
    a, b = torch.openreg.Stream(), torch.openreg.Stream()
    x = torch.ones(4, device="openreg")
    torch.openreg.synchronize()
    for stream in (a, b):
        with stream:
            x.add_(1).mul_(2).add_(3).mul_(4)
    torch.openreg.synchronize()
    return x


def ms_a_run(**how):
    start = time.perf_counter()
    found = explore(program, progress=False, **how)
    return (time.perf_counter() - start) / found.runs * 1e3


explore(program, 10)  # a first report takes longer
for name, how in (
    ("explore, ten tasks, a seed", {"schedules": RUNS}),
    ("explore, ten tasks, a run of a search", {"preemptions": 2, "limit": RUNS}),
):
    value = min(ms_a_run(**how) for _ in range(3))
    print(json.dumps({"name": name, "value": value, "unit": "ms", "limit": 1e3 / LEAST}))
