"""Compiled steps against native torch.compile, and what compiling them takes. Two processes take
turns, as in steps.py, each with a cache of generated code of its own."""

import functools
import json
import os
import statistics
import tempfile
import time

import steps
import torch

COMPILE_LIMIT = 1.1


def training(make, device):
    def compiled():
        model, batch = make()
        return torch.compile(model), batch

    return steps.training_step(compiled, device, functools.partial(torch.optim.SGD, foreach=True))


def small_operators(elements, device):
    @torch.compile
    def chain(x):
        for _ in range(20):
            x = torch.sin(x) * 1.01 + 0.1
        return x

    x = torch.ones(elements, device=device)
    return lambda: chain(x)


PROGRAMS = {
    "MLP 4 x 512": (functools.partial(training, functools.partial(steps.mlp, 512, 64)), 1.0),
    "transformer layer": (functools.partial(training, steps.transformer), 1.0),
    "conv net": (functools.partial(training, steps.convolutions), 1.0),
} | {
    # The kernel runs beside the host's next call: at best the longer of the two by their sum.
    f"chain of small operators, {elements} elements": (
        functools.partial(small_operators, elements),
        0.7,
    )
    for elements in (512, 1024, 2048, 4096)
}


@functools.lru_cache(maxsize=1)
def program(name, device, threads):
    """The step, and how many seconds its first call took, in which it is compiled."""
    torch.set_num_threads(threads)
    torch._dynamo.reset()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    step = PROGRAMS[name][0](device)
    start = time.perf_counter()
    step()
    steps.synchronizing(device)()
    return step, time.perf_counter() - start


def turn(name, device, threads):
    step, first = program(name, device, threads)
    synchronize = steps.synchronizing(device)
    steps.steps_us(step, synchronize, 0.03)
    return steps.steps_us(step, synchronize, 0.15), first


def measure(name, processes, threads):
    turns = []
    for (cpu, cpus_first), (us, first), (again, _) in steps.rounds(turn, processes, name, threads):
        turns.append((us / cpu, first / cpus_first, again / cpu))
    step, first, again = map(statistics.median, zip(*turns, strict=True))
    return step, first, max(again, 1 / again)


def main():
    with steps.processes() as processes:
        for threads in sorted({1, torch.get_num_threads()}):
            for name, (_, limit) in PROGRAMS.items():
                step, first, noise = measure(name, processes, threads)
                named = f"{name}, {threads} thread{'s' * (threads > 1)}"
                row = {"name": f"compiled {named} / native", "value": step, "unit": "x"}
                print(json.dumps({**row, "limit": limit, "floor": noise}), flush=True)
                row = {"name": f"compiling {named} / native", "value": first, "unit": "x"}
                print(json.dumps({**row, "limit": COMPILE_LIMIT}), flush=True)


if __name__ == "__main__":
    main()
