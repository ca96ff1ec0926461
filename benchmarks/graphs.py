"""Replays of a graph against native CPU, which runs the same step eagerly. Each has one thread.

Two processes take turns, as in steps.py; a second one on the CPU gives the floor.
"""

import functools
import json
import statistics
import time

import steps
import torch

REPLAY_HOST_US = 10


def training(make):
    return functools.partial(steps.training_step, make, optimize=torch.optim.SGD)


def additions(device):
    t, one = torch.zeros(1, device=device), torch.ones(1, device=device)

    def step():
        x = t
        for _ in range(200):
            x = x + one

    return step


PROGRAMS = {
    "MLP 4 x 128": (training(functools.partial(steps.mlp, 128, 32)), 0.30),
    "transformer layer": (training(steps.transformer), 0.65),
    "200 additions of 1 element": (additions, 0.50),
}


def captured(step):
    """The graph, and how many eager steps the capture took."""
    with torch.openreg.stream(torch.openreg.Stream()):
        for _ in range(3):
            step()
        torch.accelerator.synchronize()
        start = time.perf_counter()
        for _ in range(3):
            step()
        eager = (time.perf_counter() - start) / 3
    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph):
        start = time.perf_counter()
        step()
        capture = time.perf_counter() - start
    return graph, capture / eager


@functools.lru_cache(maxsize=1)
def program(name, device):
    torch.set_num_threads(1)
    step = PROGRAMS[name][0](device)
    if device == "cpu":
        return step, None
    graph, captures = captured(step)
    return graph.replay, captures


def host_us(replay, replays=4):
    """Of a replay that is queued behind others, while nothing runs."""
    torch.accelerator.synchronize()
    with torch.openreg.testing.gate() as gate:
        gate.wait()
        start = time.perf_counter()
        for _ in range(replays):
            replay()
        return (time.perf_counter() - start) / replays * 1e6


def turn(name, device):
    run, captures = program(name, device)
    synchronize = steps.synchronizing(device)
    steps.steps_us(run, synchronize, 0.03)
    us = steps.steps_us(run, synchronize, 0.15)
    return us, captures, None if device == "cpu" else host_us(run)


def measure(name, processes):
    turns = []
    for (cpu, *_), (us, captures, host), (again, *_) in steps.rounds(turn, processes, name):
        turns.append((us / cpu, captures, host, again / cpu))
    replay, captures, host, again = map(statistics.median, zip(*turns, strict=True))
    return replay, captures, host, max(again, 1 / again)


def main():
    with steps.processes() as processes:
        for name, (_, limit) in PROGRAMS.items():
            replay, captures, host, noise = measure(name, processes)
            for row in (
                {"name": f"replay of {name} / native", "value": replay, "unit": "x"}
                | {"limit": limit, "floor": noise},
                {"name": f"capture of {name} / eager", "value": captures, "unit": "x", "limit": 3},
                {"name": f"host time of a replay of {name}", "value": host, "unit": "us"}
                | {"limit": REPLAY_HOST_US},
            ):
                print(json.dumps(row))


if __name__ == "__main__":
    main()
