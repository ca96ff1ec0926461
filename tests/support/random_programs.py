"""Random programs that are ordered correctly, and the same without one of the orders they need.

A program is a list of steps, made from a seed, of one to three threads over five streams of two
devices. Steps read and write halves of buffers: of both devices, and of pinned memory, which
copies and the host use. Who comes before whom is a graph (`Order`): each thread, and each stream,
does one thing after another; a thread comes before what it queues; events, waits of the host, and
what threads tell each other go across. Where a step touches what an earlier one has touched, and
nothing orders the two, the maker puts in steps that do, of a random kind.

Threads take their steps in the order of the list: each waits for its turn, by a plain list, which
orders nothing.
"""

import queue
import random
import threading
import time
from dataclasses import dataclass, field

import torch

DEVICES = 2
HALF = 32
STEPS = 14
TURN_LIMIT = 60  # seconds
STREAMS = ("0 default", "0 a", "0 b", "1 default", "1 a")


def device_of(stream):
    return int(stream[0])


@dataclass
class Step:
    thread: int
    kind: str
    stream: str = None
    to: object = None  # another stream, or the thread that is told
    reads: tuple = ()  # (buffer, half)
    writes: tuple = ()
    orders: bool = False  # it was put in to order others
    way: str = None
    told: list = field(default_factory=list)  # of a tell: how the other one hears


# ---- Who comes before whom ----


class Order:
    """A graph over what the steps do; nodes are numbers, and each knows all that come before it, as
    bits."""

    def __init__(self, threads):
        self.before = []
        self.threads = dict.fromkeys(range(threads), 0)
        self.streams = dict.fromkeys(STREAMS, 0)
        self.last = {}  # node of a thread or stream
        self.touched = []  # (node, place, writes, stream or None, thread)

    def _node(self, bits):
        self.before.append(bits | 1 << len(self.before))
        return len(self.before) - 1

    def _host(self, thread, bits=0):
        self.threads[thread] |= bits
        node = self._node(self.threads[thread])
        self.threads[thread] = self.before[node]
        return node

    def _queue(self, thread, stream, bits=0):
        bits |= self.threads[thread] | self.streams[stream]
        node = self._node(bits)
        self.streams[stream] = self.before[node]
        return node

    def take(self, step):
        """Adds the step. Of what was touched before and is not ordered: (stream, thread), the
        stream None for what a thread did itself."""
        thread, stream = step.thread, step.stream
        if step.kind == "event synchronize":
            self._queue(thread, stream)
        if step.kind in ("synchronize", "event synchronize", "query"):
            self._host(thread, self.streams[stream])
        elif step.kind == "device synchronize":
            bits = [b for s, b in self.streams.items() if device_of(s) == device_of(stream)]
            for each in bits:
                self._host(thread, each)
        elif step.kind in ("wait_stream", "wait_event"):
            recorded = self._queue(thread, step.to)
            self._queue(thread, stream, self.before[recorded])
        elif step.kind == "tell":
            self._host(step.to, self.threads[thread])
        elif step.kind == "host":
            return self._touch(step, self._host(thread), None)
        elif step.kind == "peer":
            node = self._queue(thread, stream, self.streams[step.to])
            self._queue(thread, step.to, self.before[node])
            return self._touch(step, node, stream)
        elif step.kind in ("kernel", "upload", "download"):
            return self._touch(step, self._queue(thread, stream), stream)
        elif step.kind == "replace":
            self.touched = [t for t in self.touched if t[1] not in step.writes]
            return self._touch(step, self._queue(thread, stream), stream)
        return []

    def conflicts(self, step, bits):
        """With what is known in `bits`; of those that are in the way of each other the latest."""
        for node, place, writes, stream, thread in reversed(self.touched):
            meets = place in step.writes or (writes and place in step.reads)
            if meets and not bits >> node & 1:
                yield stream, thread

    def known(self, step):
        bits = self.threads[step.thread]
        for stream in (step.stream, step.to if step.kind == "peer" else None):
            if step.kind != "host" and stream is not None:
                bits |= self.streams[stream]
        return bits

    def _touch(self, step, node, stream):
        found = list(self.conflicts(step, self.before[node]))
        for places, writes in ((step.reads, False), (step.writes, True)):
            self.touched += [(node, place, writes, stream, step.thread) for place in places]
        return found


def is_reported(steps, threads):
    """Whether two of its accesses are in conflict, of which the first is a stream's."""
    order = Order(threads)
    return any(stream is not None for step in steps for stream, _ in order.take(step))


# ---- Making them ----


class Maker:
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.threads = self.random.choice((1, 2, 2, 3))
        self.order = Order(self.threads)
        self.steps = []
        self.users = {}  # streams that have used a buffer

    def make(self):
        for _ in range(STEPS):
            self.add(self.random_step())
        return self.steps, self.threads

    def put(self, step):
        conflicts = self.order.take(step)
        assert not conflicts
        self.steps.append(step)

    def half(self, buffer):
        return ((buffer, self.random.randrange(2)),)

    def random_step(self):
        pick, thread = self.random, self.random.randrange(self.threads)
        stream = pick.choice(STREAMS)
        a, b = pick.sample([f"{device_of(stream)}{letter}" for letter in "xy"], 2)
        kind = pick.choice(("kernel",) * 5 + ("upload", "download", "host", "peer", "replace"))
        if kind == "kernel":
            return Step(thread, kind, stream, reads=self.half(b), writes=self.half(a))
        if kind == "upload":
            return Step(thread, kind, stream, reads=self.half("pinned"), writes=self.half(a))
        if kind == "download":
            return Step(thread, kind, stream, reads=self.half(a), writes=self.half("pinned"))
        if kind == "host":
            places = {pick.choice(("reads", "writes")): self.half("pinned")}
            return Step(thread, kind, **places)
        if kind == "replace":
            return Step(thread, kind, stream, to=a, writes=((a, 0), (a, 1)))
        other = pick.choice([s for s in STREAMS if device_of(s) != device_of(stream)])
        there = f"{device_of(other)}{pick.choice('xy')}"
        return Step(thread, kind, stream, other, self.half(a), self.half(there))

    def add(self, step):
        if step.kind == "replace":  # who has used it is named, by whoever lets it go
            step.told = sorted(self.users.pop(step.to, ()))
            for node, (buffer, _), _, _, thread in list(self.order.touched):
                if buffer == step.to and not self.order.threads[step.thread] >> node & 1:
                    self.pass_on(thread, step.thread)
        while step.kind != "replace":
            conflicts = list(self.order.conflicts(step, self.order.known(step)))
            if not conflicts:
                break
            self.put_order(*conflicts[0], step)
        for buffer, _ in step.reads + step.writes:
            if step.stream is not None:
                self.users.setdefault(buffer, set()).add(step.stream)
                if step.kind == "peer":
                    self.users[buffer].add(step.to)
        self.put(step)

    def pass_on(self, thread, to):
        """Whatever the one has done, the other may build on."""
        if thread != to:
            way = self.random.choice(tuple(WAYS))
            self.put(Step(thread, "tell", to=to, orders=True, way=way))

    def put_order(self, stream, thread, step):
        self.pass_on(thread, step.thread)  # that it has been queued
        if stream is None:
            return
        waits = ("synchronize", "event synchronize", "query", "device synchronize")
        if step.kind != "host" and self.random.random() < 0.5:
            kind = self.random.choice(("wait_stream", "wait_event"))
            self.put(Step(step.thread, kind, step.stream, stream, orders=True))
            return
        who = self.random.randrange(self.threads)
        self.pass_on(thread, who)
        self.put(Step(who, self.random.choice(waits), stream, orders=True))
        self.pass_on(who, step.thread)


def program(seed):
    """(steps, number of threads)"""
    return Maker(seed).make()


def without_one(seed):
    """The same program without a step that orders, which it needs; None if it has none."""
    steps, threads = program(seed)
    places = [i for i, step in enumerate(steps) if step.orders]
    random.Random(seed).shuffle(places)
    for i in places:
        broken = steps[:i] + steps[i + 1 :]
        if is_reported(broken, threads):
            return broken, threads
    return None


# ---- Running them ----


def _by_lock():
    lock = threading.Lock()
    lock.acquire()
    return lock.release, lock.acquire


def _by_queue(make):
    def way():
        tasks = make()
        return lambda: tasks.put(1), tasks.get

    return way


def _by_event():
    event = threading.Event()
    return event.set, event.wait


def _by_semaphore():
    semaphore = threading.Semaphore(0)
    return semaphore.release, semaphore.acquire


WAYS = {
    "lock": _by_lock,
    "event": _by_event,
    "semaphore": _by_semaphore,
    "queue": _by_queue(queue.Queue),
    "simple queue": _by_queue(queue.SimpleQueue),
}


class Run:
    def __init__(self, steps, threads):
        self.steps, self.threads = steps, threads
        self.turn = [0]
        self.errors = []
        self.streams = {
            name: torch.openreg.default_stream(device_of(name))
            if name.endswith("default")
            else torch.openreg.Stream(device_of(name))
            for name in STREAMS
        }
        self.buffers = {
            f"{d}{letter}": torch.ones(2 * HALF, device=f"openreg:{d}")
            for d in range(DEVICES)
            for letter in "xy"
        }
        self.buffers["pinned"] = torch.ones(2 * HALF, pin_memory=True)
        for device in range(DEVICES):
            torch.openreg.synchronize(device)

    def __call__(self):
        others = [
            threading.Thread(target=self.take, args=(i,), daemon=True)
            for i in range(1, self.threads)
        ]
        for thread in others:
            thread.start()
        self.take(0)
        for thread in others:
            thread.join(TURN_LIMIT)
        if self.errors:
            raise self.errors[0]

    def take(self, thread):
        """A tell is two turns: one thread says it, then the other one hears it."""
        turn = 0
        try:
            for step in self.steps:
                if step.kind == "tell":
                    if step.thread == thread:
                        self.await_turn(turn)
                        tell, hear = WAYS[step.way]()
                        tell()
                        step.told[:] = [hear]
                        self.turn[0] += 1
                    elif step.to == thread:
                        self.await_turn(turn + 1)
                        step.told.pop()()
                        self.turn[0] += 1
                    turn += 2
                    continue
                if step.thread == thread:
                    self.await_turn(turn)
                    self.do(step)
                    self.turn[0] += 1
                turn += 1
        except BaseException as error:
            self.errors.append(error)
            self.turn[0] = -1

    def await_turn(self, turn):
        limit = time.monotonic() + TURN_LIMIT
        while self.turn[0] != turn:
            if self.turn[0] < 0 or time.monotonic() > limit:
                raise TimeoutError(f"turn {turn} did not come")
            time.sleep(0)

    def part(self, place):
        buffer, half = place
        return self.buffers[buffer][half * HALF : (half + 1) * HALF]

    def do(self, step):
        getattr(self, "do_" + step.kind.replace(" ", "_"))(step, self.streams.get(step.stream))

    def do_kernel(self, step, stream):
        with stream:
            self.part(step.writes[0]).add_(self.part(step.reads[0]), alpha=0.5)

    def do_upload(self, step, stream):
        with stream:
            self.part(step.writes[0]).copy_(self.part(step.reads[0]), non_blocking=True)

    do_download = do_upload

    def do_peer(self, step, stream):
        with self.streams[step.to], stream:
            self.part(step.writes[0]).copy_(self.part(step.reads[0]), non_blocking=True)

    def do_host(self, step, _):
        for place in step.reads:
            self.part(place).sum()
        for place in step.writes:
            self.part(place).fill_(2)

    def do_replace(self, step, stream):
        old = self.buffers.pop(step.to)
        for name in step.told:
            old.record_stream(self.streams[name])
        del old
        with stream:
            self.buffers[step.to] = torch.zeros(2 * HALF, device=stream.device)

    def do_wait_stream(self, step, stream):
        stream.wait_stream(self.streams[step.to])

    def do_wait_event(self, step, stream):
        stream.wait_event(self.streams[step.to].record_event())

    def do_synchronize(self, step, stream):
        stream.synchronize()

    def do_event_synchronize(self, step, stream):
        stream.record_event().synchronize()

    def do_query(self, step, stream):
        while not stream.query():
            time.sleep(0)

    def do_device_synchronize(self, step, stream):
        torch.openreg.synchronize(device_of(step.stream))
