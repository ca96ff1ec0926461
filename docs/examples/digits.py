"""Trains a small convolutional net on scanned digits, on one openreg device and on the CPU.

The data are the 1,797 scanned 8x8 digits that ship with scikit-learn. The device run does what a
program for any asynchronous accelerator does: batches wait in pinned memory, the next one is copied
on a stream of its own while the current one is trained on, events order the two streams, and timing
events measure. Only the public torch API is used, so the same code runs on another accelerator.

    python docs/examples/digits.py [--device openreg:1] [--epochs 15]

The exit status is 1 if the device's test accuracy is below 97 %.
"""

import argparse
import json
import subprocess
import sys
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from tqdm import tqdm

REQUIRED_ACCURACY = 0.97
BATCH_SIZE = 32
TEST_SIZE = 360


def load_split(seed):
    """(images, labels) to train on and to test with: a shuffle that depends on the seed alone."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    test, train = order[:TEST_SIZE], order[TEST_SIZE:]
    return (images[train], labels[train]), (images[test], labels[test])


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def host_batches(data, generator):
    """Shuffled batches in host memory; the order comes from the generator."""
    images, labels = data
    order = torch.randperm(len(images), generator=generator)
    for chosen in order.split(BATCH_SIZE):
        yield images[chosen], labels[chosen]


class Prefetcher:
    """Copies the next batch to the device while the current one is used, on its own stream."""

    def __init__(self, device):
        self.device = device
        self.stream = torch.Stream(device=device)

    def copy(self, host_batch):
        with self.stream:
            batch = [part.pin_memory().to(self.device, non_blocking=True) for part in host_batch]
            ready = self.stream.record_event()
        return batch, ready

    def batches(self, host):
        """Batches that work queued on the current stream may use."""
        following = None
        for host_batch in host:
            upcoming, following = following, self.copy(host_batch)
            if upcoming is not None:
                yield self.hand_over(*upcoming)
        if following is not None:
            yield self.hand_over(*following)

    def hand_over(self, batch, ready):
        current = torch.accelerator.current_stream(self.device)
        current.wait_event(ready)
        for part in batch:
            # The memory belongs to the copy stream: it must not be given to a later copy before
            # the work of this stream is done with it.
            part.record_stream(current)
        return batch


class Stopwatch:
    """Seconds between start() and stop(): the device's own time by events, or the host's."""

    def __init__(self, device):
        self.device = device
        self.events = []
        if device.type != "cpu":
            self.events = [torch.Event(device=device, enable_timing=True) for _ in range(2)]

    def mark(self, which):
        if self.events:
            self.events[which].record(torch.accelerator.current_stream(self.device))
        else:
            setattr(self, f"time_{which}", time.perf_counter())

    def start(self):
        self.mark(0)

    def stop(self):
        self.mark(1)
        if not self.events:
            return self.time_1 - self.time_0
        self.events[1].synchronize()
        return self.events[0].elapsed_time(self.events[1]) / 1000


def train(model, data, device, epochs, generator):
    """Trains in place and returns the seconds it took."""
    steps = epochs * -(-len(data[0]) // BATCH_SIZE)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=steps)
    prefetcher = None if device.type == "cpu" else Prefetcher(device)
    watch = Stopwatch(device)
    watch.start()
    with tqdm(total=steps, desc=f"train on {device}", unit="step", mininterval=0.5) as progress:
        for _ in range(epochs):
            batches = host_batches(data, generator)
            for images, labels in prefetcher.batches(batches) if prefetcher else batches:
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                progress.update()
            # Reading the loss waits for the device, so it is done once an epoch.
            progress.set_postfix(loss=f"{loss.item():.4f}")
    return watch.stop()


@torch.no_grad()
def accuracy(model, data, device):
    images, labels = data
    predicted = model(images.to(device)).argmax(dim=1).cpu()
    return (predicted == labels).double().mean().item()


def run(device, epochs, seed):
    """Trains and tests on one device; everything random comes from the seed, on the host."""
    train_data, test_data = load_split(seed)
    torch.manual_seed(seed)
    model = make_model()
    generator = torch.Generator().manual_seed(seed)
    if device.type == "cpu":
        seconds = train(model, train_data, device, epochs, generator)
        return {"seconds": seconds, "accuracy": accuracy(model, test_data, device), "peak": None}
    torch.accelerator.reset_peak_memory_stats(device)
    with torch.accelerator.device_index(device.index):
        model.to(device)
        seconds = train(model, train_data, device, epochs, generator)
        reached = accuracy(model, test_data, device)
    peak = torch.accelerator.max_memory_allocated(device)
    return {"seconds": seconds, "accuracy": reached, "peak": peak}


def run_in_own_process(device, options):
    """Two sets of compute threads in one process slow each other, so the times would be unfair."""
    command = [sys.executable, __file__, "--only", f"--device={device}"]
    command += [f"--epochs={options.epochs}", f"--seed={options.seed}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout)


def report(results):
    print(f"\n{'device':<12}{'test accuracy':>14}{'time':>10}{'peak memory':>14}")
    for device, result in results.items():
        peak = f"{result['peak'] / 2**20:.1f} MiB" if result["peak"] is not None else "-"
        reached = f"{result['accuracy']:.2%}"
        print(f"{device:<12}{reached:>14}{result['seconds']:>8.2f} s{peak:>14}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="openreg:1")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="store_true", help="one device; the result as JSON")
    options = parser.parse_args()
    result = run(torch.device(options.device), options.epochs, options.seed)
    if options.only:
        print(json.dumps(result))
        return 0
    results = {options.device: result}
    if options.device != "cpu":
        results["cpu"] = run_in_own_process("cpu", options)
    report(results)
    if result["accuracy"] < REQUIRED_ACCURACY:
        print(f"test accuracy is below {REQUIRED_ACCURACY:.0%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
