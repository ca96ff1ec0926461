"""Times tensors that travel through a queue to another process and back. A large tensor of the
device is compared with a small one, and with a large tensor of the CPU that is shared already.

The three take turns, and the fastest tenths of their times are compared. The floor compares one
half of the small tensor's times with the other half.
"""

import json
import time

import torch
import torch.multiprocessing as mp

TRIPS = 400


def send_back(requests, answers):
    while (value := requests.get()) is not None:
        answers.put(value)


def round_trip(requests, answers, value):
    """The time of the second of two, so that it does not matter which value went before."""
    for _ in range(2):
        begin = time.perf_counter()
        requests.put(value)
        answers.get()
    return (time.perf_counter() - begin) * 1e6


def tenth(times):
    return sorted(times)[len(times) // 10]


def main():
    context = mp.get_context("spawn")
    requests, answers = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=send_back, args=(requests, answers))
    process.start()
    values = {
        "64 B": torch.ones(16, device="openreg"),
        "64 MiB": torch.ones(1 << 24, device="openreg"),
        "CPU": torch.ones(1 << 24).share_memory_(),
    }
    times = {name: [] for name in values}
    for _ in range(TRIPS):
        for name, value in values.items():
            times[name].append(round_trip(requests, answers, value))
    requests.put(None)
    process.join()
    best = {name: tenth(all_[1:]) for name, all_ in times.items()}
    halves = sorted(tenth(times["64 B"][part::2]) for part in (0, 1))
    floor = halves[1] / halves[0]
    for name, by, limit in (("64 B", "one of 64 B", 1.1), ("CPU", "a shared one of the CPU", 1.5)):
        row = {"name": f"sharing: 64 MiB to a process and back / {by}", "limit": limit}
        row |= {"value": best["64 MiB"] / best[name], "unit": f"x of {best[name]:.3g} us"}
        print(json.dumps({**row, "floor": floor}), flush=True)


if __name__ == "__main__":
    main()
