"""Random programs over several streams, devices and threads give the CPU's results.

A program is a list of steps over a few square matrices (slots), made from a seed. Three threads
issue the steps, each on a stream drawn for it; a step waits, by events or wait_stream, for the
steps whose results it reads or whose operands it overwrites, and says record_stream where it uses a
block of another stream. So nothing but those orders the work. The CPU runs the same list in order.

OPENREG_RANDOM_PROGRAMS: how many (1000). OPENREG_RANDOM_PROGRAMS_SEED: the first seed (0); a
failure names its own.
"""

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import torch_openreg  # noqa: F401

PROGRAMS = int(os.environ.get("OPENREG_RANDOM_PROGRAMS", "1000"))
FIRST_SEED = int(os.environ.get("OPENREG_RANDOM_PROGRAMS_SEED", "0"))
BATCHES = 10
THREADS, SLOTS, STEPS, STREAMS_EACH = 3, 4, 20, 2
ISSUE_LIMIT = 60  # seconds


def _index(x):
    return torch.arange(x.shape[0], device=x.device).flip(0)


# Results are matrices of the operands' size, with values that stay small.
FUNCTIONAL = [
    lambda a, b: a + b * 0.5,
    lambda a, b: torch.maximum(a, b) - 0.25,
    lambda a, b: torch.where(a > b, a, 0.5 * b),
    lambda a, b: (a * b).tanh(),
    lambda a, b: a.abs().clamp(max=2) - b.sigmoid(),
    lambda a, b: F.relu(a - b),
    lambda a, b: (a @ b) / a.shape[0],
    lambda a, b: torch.addmm(a, b, a.t(), beta=0.5, alpha=1 / a.shape[0]),
    lambda a, b: torch.bmm(a[None].expand(2, -1, -1), torch.stack([a, b]))[1] / a.shape[0],
    lambda a, b: F.linear(a, b, b[0]) / a.shape[0],
    lambda a, b: a - b.mean(1, keepdim=True),
    lambda a, b: a.softmax(1) + b.sum(0) / a.shape[0],
    lambda a, b: a.amax(0) - b.std(1, unbiased=False, keepdim=True),
    lambda a, b: a.sort(1)[0] - b.cumsum(0) / a.shape[0],
    lambda a, b: F.layer_norm(a, a.shape[1:]) * 0.5 + b,
    lambda a, b: a.t() + b,
    lambda a, b: a.flip(0)[:, : a.shape[1]] - b.roll(1, 1),
    lambda a, b: torch.cat([a, b])[a.shape[0] // 2 :][: a.shape[0]] * 1.0,
    lambda a, b: torch.stack([a, b], 2).mean(2),
    lambda a, b: torch.cat([part * 0.5 for part in a.split(2)]) + b.t().contiguous(),
    lambda a, b: a.index_select(0, _index(a)) - b[_index(b)],
    lambda a, b: a.gather(1, b.argsort(1)),
    lambda a, b: F.embedding(_index(a), a) * 0.5 + b,
    lambda a, b: a * b[b > 0].sum().clamp(-1, 1),  # waits for its stream
    lambda a, b: a + b.to(torch.float64).cos().float(),
    lambda a, b: a.clone(memory_format=torch.contiguous_format) * 0.9 + b.masked_fill(b < 0, 0.1),
    lambda a, b: torch.complex(a, b).conj().imag + 0,
    lambda a, b: a + 0.01 * int((b.detach().abs() < 1e9).sum().item()) / b.numel(),
]
IN_PLACE = [
    lambda a, b: a.add_(b, alpha=0.5).clamp_(-3, 3),
    lambda a, b: a.mul_(0.5).sub_(b),
    lambda a, b: a.copy_(b.t()),
    lambda a, b: a.t()[0].add_(b[0]),
    lambda a, b: a[1:].copy_(b[:-1]),
    lambda a, b: a[::2].mul_(0.5),
    lambda a, b: torch.addmm(a, b, b, alpha=1 / a.shape[0], out=a).tanh_(),
    lambda a, b: a.index_add_(0, _index(a), b, alpha=0.25),
    lambda a, b: a.index_copy_(0, _index(a)[:1], b[:1]),
    lambda a, b: a.masked_fill_(b > 0.5, 0.25),
    lambda a, b: a.scatter_(1, b.argsort(1), b * 0.5),
    lambda a, b: a.__setitem__(_index(a)[:1], b[0]),
    lambda a, b: torch._foreach_lerp_([a], [b], 0.25),
    lambda a, b: a.zero_().add_(b),
]


def make_program(seed, devices):
    """Steps: what is done, which slots it reads and writes, on which device, stream and thread."""
    draw = random.Random(seed)
    start = [draw.randrange(devices) for _ in range(SLOTS)]
    where, steps = list(start), []
    for _ in range(STEPS):
        a = draw.randrange(SLOTS)
        near = [slot for slot in range(SLOTS) if where[slot] == where[a]]
        step = SimpleNamespace(
            kind=draw.choices(["functional", "in_place", "move", "look"], [8, 5, 2, 1])[0],
            function=None,
            a=a,
            b=draw.choice(near),
            to=draw.randrange(SLOTS),
            target=draw.randrange(devices),
            device=where[a],
            streams=[draw.randrange(STREAMS_EACH) for _ in range(devices)],
            thread=draw.randrange(THREADS),
            sleep=draw.random() < 0.2,
            by_event=draw.random() < 0.6,
            pinned=draw.random() < 0.5,
        )
        if step.kind == "functional":
            step.function = draw.choice(FUNCTIONAL)
            where[step.to] = step.device
        elif step.kind == "in_place":
            step.function = draw.choice(IN_PLACE)
            step.to = a
        elif step.kind == "move":
            where[step.to] = step.target
        steps.append(step)
    size = draw.choice([2, 3, 4, 5, 7, 8, 12, 16, 33])
    return SimpleNamespace(size=size, steps=steps, start=start)


def run_on_cpu(program, slots):
    slots = [slot.clone() for slot in slots]
    seen = []
    for step in program.steps:
        if step.kind == "functional":
            slots[step.to] = step.function(slots[step.a], slots[step.b])
        elif step.kind == "in_place":
            step.function(
                slots[step.a], slots[step.b].clone() if step.a == step.b else slots[step.b]
            )
        elif step.kind == "move":
            slots[step.to] = slots[step.a].clone()
        else:
            seen.append(slots[step.a].clone())
    return slots, seen


class Slot:
    """A tensor, where it was allocated, and who has written and read it."""

    def __init__(self, tensor, stream):
        self.tensor, self.stream = tensor, stream
        self.written, self.read = None, []


class Run:
    def __init__(self, program, slots, streams):
        self.program, self.streams = program, streams
        self.slots = []
        for slot, device in zip(slots, program.start, strict=True):
            with streams[device][0] as stream:
                self.slots.append(Slot(slot.to(stream.device), stream))
                self.slots[-1].written = self.mark(stream)
        self.issued = [threading.Event() for _ in program.steps]
        self.needs = self.find_needs()
        self.looks = {}

    def find_needs(self):
        """For each step the earlier ones that the host must have issued before it."""
        needs, last_write, last_reads = [], {}, {}
        for i, step in enumerate(self.program.steps):
            reads = {step.a, step.b} if step.kind in ("functional", "in_place") else {step.a}
            writes = set() if step.kind == "look" else {step.to}
            before = {last_write.get(slot) for slot in reads | writes}
            for slot in writes:
                before.update(last_reads.get(slot, ()))
            needs.append([n for n in before if n is not None])
            for slot in reads:
                last_reads.setdefault(slot, []).append(i)
            for slot in writes:
                last_write[slot], last_reads[slot] = i, []
        return needs

    @staticmethod
    def mark(stream):
        event = torch.Event(stream.device)
        event.record(stream)
        return stream, event

    def follow(self, stream, marks, by_event):
        for other, event in marks:
            if other == stream:
                continue
            if by_event or other.device != stream.device:
                stream.wait_event(event)
            else:
                stream.wait_stream(other)

    def issue(self, step):
        stream = self.streams[step.device][step.streams[step.device]]
        a, b = self.slots[step.a], self.slots[step.b]
        if step.kind in ("move", "look"):
            b = a
        with ExitStack() as stack:
            target = self.streams[step.target][step.streams[step.target]]
            if step.kind == "move" and step.target != step.device:
                stack.enter_context(target)
            stack.enter_context(stream)
            self.follow(stream, [a.written, b.written], step.by_event)
            if step.sleep:
                torch.openreg._sleep(200_000)
            for slot in {a, b}:
                if slot.stream != stream:
                    slot.tensor.record_stream(stream)
            if step.kind == "functional":
                self.slots[step.to] = Slot(step.function(a.tensor, b.tensor), stream)
                self.slots[step.to].written = self.mark(stream)
            elif step.kind == "in_place":
                self.follow(stream, a.read, step.by_event)
                step.function(a.tensor, a.tensor.clone() if a is b else b.tensor)
                a.written = self.mark(stream)
                a.read = []
            elif step.kind == "move":
                self.move(step, a, stream, target)
            else:
                self.looks[id(step)] = self.look(step, a, stream)
            mark = self.mark(stream)
            for slot in {a, b}:
                slot.read.append(mark)

    def move(self, step, source, stream, target):
        if step.target == step.device:
            fresh = Slot(source.tensor.clone(), stream)
            fresh.written = self.mark(stream)
        else:
            fresh = Slot(source.tensor.to(target.device), target)
            fresh.written = self.mark(target)
        self.slots[step.to] = fresh

    @staticmethod
    def look(step, slot, stream):
        if not step.pinned:
            return slot.tensor.cpu()
        host = torch.empty(slot.tensor.shape).pin_memory()
        host.copy_(slot.tensor, non_blocking=True)
        stream.synchronize()
        return host

    def thread(self, number):
        try:
            for i, step in enumerate(self.program.steps):
                if step.thread != number:
                    continue
                for need in self.needs[i]:
                    assert self.issued[need].wait(ISSUE_LIMIT), "a thread is stuck"
                self.issue(step)
                self.issued[i].set()
        finally:
            for step, issued in zip(self.program.steps, self.issued, strict=True):
                if step.thread == number:
                    issued.set()

    def results(self):
        for device in range(len(self.streams)):
            torch.openreg.synchronize(device)
        return [slot.tensor.cpu() for slot in self.slots]


def check(seed, pool, streams):
    program = make_program(seed, len(streams))
    generator = torch.Generator().manual_seed(seed)
    start = [torch.randn(program.size, program.size, generator=generator) for _ in range(SLOTS)]
    expected, expected_looks = run_on_cpu(program, start)
    run = Run(program, start, streams)
    for result in [pool.submit(run.thread, number) for number in range(THREADS)]:
        result.result()
    slots = run.results()
    looks = [run.looks[id(step)] for step in program.steps if step.kind == "look"]
    for got, wanted in zip(slots + looks, expected + expected_looks, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_programs_give_the_cpus_results(batch):
    devices = min(2, torch.openreg.device_count())
    streams = [[torch.Stream(f"openreg:{d}") for _ in range(STREAMS_EACH)] for d in range(devices)]
    with ThreadPoolExecutor(THREADS) as pool:
        for seed in range(FIRST_SEED + batch, FIRST_SEED + PROGRAMS, BATCHES):
            try:
                check(seed, pool, streams)
            except BaseException as error:
                raise AssertionError(f"OPENREG_RANDOM_PROGRAMS_SEED={seed}") from error


def test_random_programs_without_events_show_wrong_results():
    """Without its events the same scheme shows wrong results."""
    stream, side = torch.Stream("openreg:0"), torch.Stream("openreg:0")
    with stream:
        x = torch.zeros(64, device="openreg:0")
    stream.synchronize()
    with torch.openreg.testing.gate() as gate:
        gate.wait(stream)
        with stream:
            x.add_(1)
        with side:
            early = x.cpu()
    assert early.sum() == 0
