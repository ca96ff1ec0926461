"""The checks of a plugin that need the C interface alone. Each runs in a process of its own."""

import ctypes
import json
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from .c_api import DEVICE_LOST, LAUNCH_FAILURE, OUT_OF_MEMORY, SUCCESS, Api, Refused, function_of

# Sentences of openreg.h, openreg_operator.h and docs/vendor/check.md.
INIT = "It registers the plugin's factories."
CREATE = "Fills `count` descriptions."
COUNT = "The number of devices, 0 to OPENREG_MAX_DEVICES."
PROPERTIES = "Fills `model`, `major` and `minor`. Called on any thread, inside a task too."
ADDRESSES = (
    "Addresses are unique in the process. The address of `alloc` is not null and a multiple of 16, "
    "and so is that of `alloc_host`."
)
SHORT = "`alloc` returns orErrorMemoryAllocation if memory is short, and nothing has changed then."
FREE = "What `free` gets can be allocated again."
COPY = "A copy writes exactly the bytes of its destination, from any address to any address."
OVERLAP = "If the ranges overlap, the destination gets the bytes that the source had."
SET = "`set` writes exactly the bytes of its range, each with the value."
END = (
    "They either finish the work and return orSuccess, or return orErrorNotReady and complete it "
    "later with orEventSignal(done, status) from any thread"
)
DONE = "`done` is signalled once, for a call that returns orErrorNotReady, and not destroyed."
FAILURE = "Any other value is the task's failure."
MAP = "the kernel address of a range, with the same offset from a multiple of 16 as `ptr`."
LOST = "The factory stops what it has started and signals each `done`."
RESET = (
    "The factory stops what it has started, signals each `done`, and makes the device work again."
)
SHUTDOWN = "The factory ends threads of its own; it need not signal."
FORK = "`create_devices` starts nothing: a child that is forked before the first use has a device."
CHILD = "Nothing in the plugin waits in a forked child, which has none of its threads."
INDEPENDENT = "What waits for one stream holds up no other, and no call of the host."

# Seconds after which a check takes it that something waits for ever.
PATIENCE = float(os.environ.get("CHECK_PLUGIN_LIMIT", "30")) / 2

CHECKS = {}  # in the order in which a driver is written


class Broken(Exception):
    """The plugin breaks the contract; `function` and `contract` where they are not the check's."""

    def __init__(self, text, function=None, contract=None):
        super().__init__(text)
        self.function, self.contract = function, contract


class Skipped(Exception):
    """There is nothing to check, because ..."""


class Check:
    def __init__(self, run, name, function, contract, devices, torch):
        self.run, self.name, self.function = run, name, function
        self.contract, self.devices, self.torch = contract, devices, torch
        self.about = run.__doc__.strip().partition("\n")[0]


def check(name, function, contract, devices=2, torch=False):
    """Registers a check: the function of the table and the sentence that it is about; how many
    devices it needs, or None for the driver's own number; whether it needs PyTorch."""

    def register(run):
        CHECKS[name] = Check(run, name, function, contract, devices, torch)
        return run

    return register


def expect(truth, text, *blame):
    if not truth:
        raise Broken(text, *blame)


def data(size, seed=0):
    return random.Random(f"{seed} {size}").randbytes(size)


def same(got, expected, what, *blame):
    """Compares bytes, and names the first one that differs."""
    if got == expected:
        return
    at = next(i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b)
    wrong = sum(a != b for a, b in zip(got, expected, strict=True))
    raise Broken(
        f"{what}: {wrong} of {len(expected)} bytes are wrong, the first at {at}: {got[at]:#04x} "
        f"in place of {expected[at]:#04x}",
        *blame,
    )


def at_address(array):
    return ctypes.addressof(array)


def works(c, device=0, size=5000):
    """That a device still works: memory, copies, a kernel."""
    sent, ran = data(size, device), []
    memory = c.alloc(size, device)
    stream = c.stream(device)
    c.set(memory, 0x5A, size, stream)
    c.synchronize(stream, device)
    with c.on(device):
        c.write(memory, sent)
        same(c.read(memory, size), sent, f"device {device}")
    c.kernel(stream, lambda: ran.append(1), "check kernel")
    c.synchronize(stream, device)
    expect(ran, f"a kernel on device {device} was not run", "compute")
    c.free(memory)


# ---- loading ----


@check("load.factory", "orPluginInit", INIT)
def load_factory(c):
    """the library loads, and its factory serves the type openreg"""
    expect(c.device_count() == 2, "2 devices were asked for, and others made", "create_devices")
    plugin = [f for f in c.factories() if f.plugin]
    expect(
        any(f.serves and f.type.lower() == b"openreg" for f in plugin),
        "the factories of the plugin are "
        + ", ".join(f"{f.name.decode()!r} for {f.type.decode()!r}" for f in plugin)
        + "; none serves 'openreg'",
    )


@check("load.devices", "create_devices", CREATE)
def load_devices(c):
    """each device has memory and properties, with one device and with several"""
    for device in range(c.device_count()):
        found = c.properties(device)
        expect(
            found.total_memory >= 1 << 20,
            f"memory_limit of device {device} is {found.total_memory} bytes; 1 MiB or more is "
            "expected",
        )
        expect(
            found.model.decode("ascii", "replace").isprintable(),
            f"model of device {device} is {found.model!r}",
            "properties",
            PROPERTIES,
        )
    return f"{found.factory.decode()}, {found.total_memory >> 20} MiB each"


@check("load.alone", "create_devices", CREATE, devices=1)
def load_alone(c):
    """one device works without the second"""
    works(c)


@check("load.count", "count_devices", COUNT, devices=None)
def load_count(c):
    """without OPENREG_DEVICE_COUNT there are as many devices as the driver counts, or two"""
    count = c.device_count()
    if not count:
        raise Skipped("the driver counts no device")
    works(c, count - 1)
    return f"{count} devices" if count > 1 else "1 device"


def in_threads(function, count):
    """Calls ``function(number)`` in `count` threads at once; raises what one of them raised."""
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(function, range(count)))


# ---- memory ----

SIZES = (1, 2, 15, 16, 17, 511, 512, 4095, 4096, 4097, 65537, (1 << 20) - 1, 1 << 20, 3 << 20)


@check("memory.addresses", "alloc", ADDRESSES)
def memory_addresses(c):
    """allocations of many sizes are aligned, and share no byte"""
    held = {}
    for turn in range(3):
        for size in SIZES:
            for device in (0, 1):
                held[c.alloc(size, device)] = size, data(size, f"{turn} {device}")
    for address, (_, bytes_) in held.items():
        c.write(address, bytes_)
    for address, (size, bytes_) in held.items():
        same(c.read(address, size), bytes_, f"{size} bytes at {address:#x}")
    c.free(*held)


@check("memory.free", "free", FREE)
def memory_free(c):
    """what was freed can be allocated again, many times over the whole memory"""
    size = min(c.properties(0).total_memory // 4, 1 << 40)
    while True:
        try:
            c.free(c.alloc(size))
            break
        except Refused as refused:
            if refused.code != OUT_OF_MEMORY or size < 1 << 20:
                raise
            size //= 2
    for turn in range(16):
        try:
            c.free(c.alloc(size))
        except Refused as refused:
            if refused.code != OUT_OF_MEMORY:
                raise
            raise Broken(
                f"{size} bytes were allocated and freed {turn + 1} times, then: {refused}"
            ) from None


def fill_up(c, device):
    """Allocates until memory is short; returns what it has, by address."""
    held = {}
    size = 1 << (c.properties(device).total_memory // 8).bit_length() - 1
    while size >= 1 << 20 and len(held) < 256:
        try:
            held[c.alloc(size, device)] = size
        except Refused as refused:
            if refused.code != OUT_OF_MEMORY:
                raise
            size //= 2
    return held


def reach(c, address, size):
    """That the first, the middle, and the last bytes are there."""
    offsets = (0, size // 2, size - 16)
    for offset in offsets:
        c.write(address + offset, data(16, offset))
    for offset in offsets:
        same(c.read(address + offset, 16), data(16, offset), f"at {offset} of {size} bytes")


@check("memory.short", "alloc", SHORT)
def memory_short(c):
    """out of memory is an error, and the device is usable afterwards"""
    held = fill_up(c, 1)
    expect(held, "not even 1 MiB could be allocated on device 1")
    address, size = held.popitem()
    c.free(address)
    works(c, 1, min(size, 5000))
    for address, size in list(held.items())[:3]:  # the largest ones
        reach(c, address, size)
    c.free(*held)
    works(c, 1)
    works(c, 0)


@check("memory.limit", "alloc", SHORT)
def memory_limit(c):
    """sizes near the limit are refused, or all of their bytes are there"""
    limit = c.properties(0).total_memory
    for size in (limit + 1, limit, limit - 1, limit - 4096, limit // 2 + 1):
        try:
            address = c.alloc(size)
        except Refused as refused:
            if refused.code != OUT_OF_MEMORY:
                raise
            continue
        try:
            reach(c, address, size)
        except Refused as refused:
            raise Broken(f"{size} bytes were allocated, and then: {refused}") from None
        c.free(address)
    works(c)


@check("memory.threads", "alloc", ADDRESSES)
def memory_threads(c):
    """threads allocate, copy and free at once"""

    def work(number):
        for turn in range(20):
            size = SIZES[(turn + number) % 11]
            address = c.alloc(size, number % 2)
            sent = data(size, number)
            c.write(address, sent)
            same(c.read(address, size), sent, f"{size} bytes of thread {number}")
            c.free(address)

    in_threads(work, 4)


@check("memory.pinned", "alloc_host", ADDRESSES)
def memory_pinned(c):
    """pinned host memory is aligned, and copies reach all of it"""
    for size in SIZES:
        host, memory = c.pinned(size), c.alloc(size)
        expect(at_address(host) % 16 == 0, f"{at_address(host):#x} is no multiple of 16")
        host[:] = sent = data(size)
        c.copy(memory, at_address(host), size)
        ctypes.memset(host, 0, size)
        c.copy(at_address(host), memory, size)
        same(bytes(host), sent, f"{size} bytes of pinned memory")
        c.free(memory)
        c.step("free_host", f"freeing {size} bytes of pinned memory")
        c.call("orFreeHost", at_address(host))


# ---- copies ----


@check("copies.sizes", "copy", COPY)
def copies_sizes(c):
    """bytes come back from the device, for each kind of host memory"""
    for size in (0, 1, 3, 16, 255, 4096, 65537, (1 << 20) + 3, 16 << 20):
        sent, memory, other = data(size), c.alloc(size or 1), c.alloc(size or 1)
        c.write(memory, sent)
        same(c.read(memory, size), sent, f"{size} bytes to the device and back")
        c.copy(other, memory, size)
        same(c.read(other, size), sent, f"{size} bytes within the device")
        c.free(memory, other)


@check("copies.bounds", "copy", COPY)
def copies_bounds(c):
    """a copy between unaligned addresses writes no other byte"""
    room = 5000
    there, other, whole = c.alloc(room), c.alloc(room), data(room, "whole")
    for to, start, size in ((1, 0, 1), (3, 5, 17), (1001, 13, 4099 - 1001), (16, 1, 1000)):
        part = data(size, to)
        expected = whole[:to] + part + whole[to + size :]
        c.write(there, whole)
        c.write(there + to, part)
        same(c.read(there, room), expected, f"{size} bytes to offset {to}")
        same(c.read(there + to, size), part, f"{size} bytes from offset {to}")
        c.write(other, whole)
        c.write(there + start, part)
        c.copy(other + to, there + start, size)
        same(c.read(other, room), expected, f"{size} bytes from offset {start} to {to}")
    c.free(there, other)


@check("copies.overlap", "copy", OVERLAP)
def copies_overlap(c):
    """a copy within an allocation, to a range that overlaps its source"""
    room = (1 << 20) + 3000
    memory, whole = c.alloc(room), data(room)
    for to, start, size in ((1, 0, 5000), (0, 1, 5000), (1000, 0, 1 << 20), (0, 1000, 1 << 20)):
        c.write(memory, whole)
        c.copy(memory + to, memory + start, size)
        expected = whole[:to] + whole[start : start + size] + whole[to + size :]
        same(c.read(memory, room), expected, f"{size} bytes from offset {start} to {to}")
    c.free(memory)


@check("copies.set", "set", SET)
def copies_set(c):
    """a fill writes its range and no other byte"""
    room = (1 << 20) + 10
    there, whole = c.alloc(room, 1), data(room)
    sizes = ((0, 1, 0), (1, 1, 255), (7, 33, 1), (16, 4096, 0x80), (3, 0, 9), (5, 1 << 20, 0x81))
    for offset, size, value in sizes:
        c.write(there, whole)
        with c.on(1):
            c.set(there + offset, value, size)
        expected = whole[:offset] + bytes([value]) * size + whole[offset + size :]
        same(c.read(there, room), expected, f"{size} bytes at offset {offset} set to {value}")
    c.free(there)


@check("copies.peers", "copy", COPY)
def copies_peers(c):
    """copies between two devices, on streams of either"""
    for size in (1, 4097, (1 << 20) + 1):
        sent, here, there = data(size), c.alloc(size, 0), c.alloc(size, 1)
        for device in (0, 1):
            stream = c.stream(device)
            for source, to in ((here, there), (there, here)):
                c.write(source, sent)
                c.set(to, 0, size, stream)
                c.copy(to, source, size, stream)
                c.synchronize(stream, device)
                same(c.read(to, size), sent, f"{size} bytes between devices")
        c.free(here, there)


# ---- order ----

STEPS, SIZE = 60, 3000


def steps(c):
    """Pinned memory with other bytes for each step, and room for what comes back."""
    sent, got = c.pinned(STEPS * SIZE), c.pinned(STEPS * SIZE)
    sent[:] = data(STEPS * SIZE, "steps")
    return sent, got


def compare_steps(got, sent, what):
    for i in range(STEPS):
        at = slice(i * SIZE, (i + 1) * SIZE)
        same(bytes(got[at]), bytes(sent[at]), f"step {i} of {what}", None, END)


@check("order.stream", "copy", END)
def order_stream(c):
    """tasks of a stream run one after the other, and a copy is over when it says so"""
    (sent, got), stream = steps(c), c.stream()
    here, there = c.alloc(SIZE), c.alloc(SIZE)
    for i in range(STEPS):
        c.copy(here, at_address(sent) + i * SIZE, SIZE, stream)
        c.set(here, i, 7, stream)
        c.copy(there, here, SIZE, stream)
        c.copy(at_address(got) + i * SIZE, there, SIZE, stream)
    c.synchronize(stream)
    for i in range(STEPS):
        sent[i * SIZE : i * SIZE + 7] = [i] * 7
    compare_steps(got, sent, "one stream")


def order_by_events(c, first, second):
    """One piece of memory is written on a stream and read on the other, in turn."""
    sent, got = steps(c)
    writes, reads, memory = c.stream(first), c.stream(second), c.alloc(SIZE, first)
    gate, written, read = c.gate(), c.event(first), c.event(second)
    c.wait(writes, gate)
    for i in range(STEPS):
        c.copy(memory, at_address(sent) + i * SIZE, SIZE, writes)
        c.record(written, writes)
        c.wait(reads, written)
        c.copy(at_address(got) + i * SIZE, memory, SIZE, reads)
        c.record(read, reads)
        c.wait(writes, read)
    expect(c.pending(reads), "work behind an event that is not complete has run")
    c.open(gate)
    c.synchronize(writes, first)
    c.synchronize(reads, second)
    compare_steps(got, sent, f"streams of devices {first} and {second}")


@check("order.events", "copy", END)
def order_events(c):
    """events order two streams"""
    order_by_events(c, 0, 0)


@check("order.devices", "copy", END)
def order_devices(c):
    """events order streams of two devices"""
    order_by_events(c, 0, 1)


@check("order.kernels", "compute", END)
def order_kernels(c):
    """a kernel runs after the copies before it, and before those after it"""
    stream, memory, read = c.stream(), c.alloc(SIZE), []
    host, got = c.pinned(SIZE), c.pinned(SIZE)
    first, second = data(SIZE, 1), data(SIZE, 2)
    source = c.pinned(SIZE)
    source[:] = first

    def kernel():
        read.append(bytes(got))
        time.sleep(0.01)
        host[:] = second

    c.copy(memory, at_address(source), SIZE, stream)
    c.copy(at_address(got), memory, SIZE, stream)
    c.kernel(stream, kernel, "check kernel")
    c.copy(memory, at_address(host), SIZE, stream)
    c.copy(at_address(got), memory, SIZE, stream)
    c.synchronize(stream)
    expect(len(read) == 1, f"the kernel has run {len(read)} times")
    same(read[0], first, "what the kernel saw of the copy before it", "copy")
    same(bytes(got), second, "what the copy after the kernel saw of it")


@check("order.streams", "copy", END)
def order_streams(c):
    """a hundred streams of both devices at once, from several threads"""
    (sent, got), memory = steps(c), [c.alloc(SIZE, i % 2) for i in range(STEPS)]
    streams = [c.stream(i % 2) for i in range(STEPS)] * 2

    def queue(first):
        for i in range(first, STEPS, 3):
            c.copy(memory[i], at_address(sent) + i * SIZE, SIZE, streams[i])
            c.copy(at_address(got) + i * SIZE, memory[i], SIZE, streams[i])

    in_threads(queue, 3)
    for device in (0, 1):
        c.synchronize(device=device)
    compare_steps(got, sent, "many streams")


# ---- kernels ----


@check("kernels.map", "map", MAP)
def kernels_map(c):
    """a kernel reads and writes the device's memory where `map` says"""
    if not c.properties(0).can_map:
        raise Skipped("the factory has no `map`")
    memory, stream, sent = c.alloc(SIZE), c.stream(), data(SIZE)
    c.write(memory, sent)
    seen = []

    def kernel(offset):
        def run():
            try:
                bytes_ = c.mapped(memory + offset, 100)
                seen.append((offset, bytes(bytes_)))
                bytes_[:] = bytes(b ^ 0xFF for b in bytes_)
            except Refused as refused:
                seen.append((offset, refused))

        return run

    for offset in (0, 401, 1000, SIZE - 100):
        c.kernel(stream, kernel(offset), "check kernel")
    c.synchronize(stream)
    got = c.read(memory, SIZE)
    expect(len(seen) == 4, f"{len(seen)} of 4 kernels have run", "compute", END)
    for offset, found in seen:
        if isinstance(found, Refused):
            raise found
        part = sent[offset : offset + 100]
        same(found, part, f"what a kernel reads at offset {offset}")
        same(got[offset : offset + 100], bytes(b ^ 0xFF for b in part), "what a kernel has written")


@check("kernels.errors", "compute", FAILURE)
def kernels_errors(c):
    """the error of a kernel comes out of `compute`, once, with the kernel's name"""
    for device in (0, 1):
        stream, later = c.stream(device), []
        c.kernel(stream, lambda: LAUNCH_FAILURE, "check kernel that fails")
        c.kernel(stream, lambda later=later: later.append(1), "check kernel")
        try:
            c.synchronize(stream, device)
        except Refused as refused:
            expect(
                "check kernel that fails" in str(refused) and refused.code == LAUNCH_FAILURE,
                f"a kernel returned orErrorLaunchFailure; reported was: {refused}",
            )
        else:
            raise Broken("a kernel returned orErrorLaunchFailure, and no error was reported")
        c.synchronize(stream, device)
        expect(later, "the kernel after one that failed was not run")
        works(c, device)


# ---- completion ----


@check("completion.done", "copy", DONE)
def completion_done(c):
    """each operation is complete once, and leaves its `done` alone afterwards"""
    size, stream = 1 << 20, c.stream()
    memory, host = c.alloc(2 * size), c.pinned(size)
    for operation in (
        lambda: c.copy(memory, at_address(host), size, stream),
        lambda: c.copy(at_address(host), memory, size, stream),
        lambda: c.copy(memory + size, memory, size, stream),
        lambda: c.set(memory, 1, size, stream),
        lambda: c.kernel(stream, lambda: None, "check kernel"),
    ):
        operation()
        c.synchronize(stream)
        time.sleep(0.08)  # a second signal may come late
        if os.fstat(2).st_size:  # the library has printed that it came
            return


@check("completion.host", "compute", INDEPENDENT)
def completion_host(c):
    """while a kernel runs, no call of the host waits for it"""
    entered, leave, done = threading.Event(), threading.Event(), []
    stream, host = c.stream(), c.pinned(SIZE)

    def kernel():
        entered.set()
        leave.wait()

    def use():
        c.properties(0)
        memory = c.alloc(SIZE)
        c.copy(memory, at_address(host), SIZE, stream)
        c.set(memory, 1, SIZE, stream)
        done.append(c.pending(stream))

    c.kernel(stream, kernel, "check kernel")
    entered.wait()
    caller = threading.Thread(target=use, daemon=True)
    caller.start()
    caller.join(PATIENCE)
    in_time, (function, waited) = bool(done), c.last
    leave.set()
    caller.join()
    expect(in_time and done[0], f"{waited} waited for the kernel", function)
    c.synchronize(stream)


@check("completion.streams", "compute", INDEPENDENT)
def completion_streams(c):
    """while a kernel runs, copies on other streams and on the other device are done"""
    entered, leave, done = threading.Event(), threading.Event(), []
    held, other, sent = c.stream(), c.stream(), data(SIZE)
    here, there = c.alloc(SIZE, 0), c.alloc(SIZE, 1)
    host, got = c.pinned(SIZE), c.pinned(SIZE)
    host[:] = sent

    def kernel():
        entered.set()
        leave.wait()

    def use():
        c.copy(here, at_address(host), SIZE, other)
        c.copy(there, here, SIZE, other)
        c.copy(at_address(got), there, SIZE, other)
        c.synchronize(other)
        done.append(bytes(got))

    c.kernel(held, kernel, "check kernel")
    entered.wait()
    caller = threading.Thread(target=use, daemon=True)
    caller.start()
    caller.join(PATIENCE)
    in_time = bool(done)
    leave.set()
    caller.join()
    expect(in_time, "copies on another stream waited for the kernel of the first")
    same(done[0], sent, "copies on another stream", "copy")
    return None if copies_overtake(c) else "one queue: a copy waits for those of other streams"


def copies_overtake(c, rounds=10):
    """Whether a short copy on one stream is over before a long one that has started on another.
    Both copy to the host, where the long one shows how far it is."""
    size = min(c.properties(0).total_memory // 8, 64 << 20)
    long, short, source = c.stream(), c.stream(), c.alloc(size)
    host, got = c.pinned(size), c.pinned(16)
    places = [*range(0, size, max(1, size // 61)), size - 1]
    c.set(source, 1, size)
    for _ in range(rounds):
        ctypes.memset(host, 0, size)
        c.copy(at_address(host), source, size, long)
        while not any(host[i] for i in places) and c.pending(long):
            time.sleep(0)
        c.copy(at_address(got), source, 16, short)
        c.synchronize(short)
        overtaken = not all(host[i] for i in places)
        c.synchronize(long)
        if overtaken:
            return True
    return False


# ---- faults ----


def copies_in_flight(c, device=0):
    """Starts copies of 32 MiB in all, which a reset or the end of the process comes upon."""
    host, memory = c.pinned(4 << 20), c.alloc(4 << 20, device)
    for stream in (c.stream(device), c.stream(device)):
        for _ in range(4):
            c.copy(memory, at_address(host), 4 << 20, stream)
    return memory, host


@check("faults.lost", "lost", LOST)
def faults_lost(c):
    """a lost device refuses work, leaves the other alone, and works after a reset"""
    stream, kept = c.stream(), c.alloc(SIZE)
    copies_in_flight(c)
    c.kernel(stream, lambda: DEVICE_LOST, "check kernel")
    code = c.code("orStreamSynchronize", stream)
    expect(code == DEVICE_LOST, "a kernel returned orErrorDeviceLost, and the device is not lost",
           "compute", FAILURE)  # fmt: skip
    works(c, 1)
    c.reset()
    works(c, 0)
    works(c, 1)
    c.free(kept)


@check("faults.reset", "reset", RESET)
def faults_reset(c):
    """a reset ends copies that have started, and the device works again"""
    memory, host = copies_in_flight(c)
    with c.on(0):
        c.reset()
    works(c, 0)
    host[:] = sent = data(4 << 20)
    c.copy(memory, at_address(host), 4 << 20)
    same(c.read(memory, 4 << 20), sent, "memory from before the reset")
    works(c, 1)


# ---- processes ----


def in_child(action, function, contract, what):
    """Runs it in a forked child, and expects that the child ends by itself with status 0."""
    child = os.fork()
    if not child:
        action()
        os._exit(0)
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return expect(code == 0, f"{what}: it ended with {code}", function, contract)
        time.sleep(0.005)
    os.kill(child, 9)
    os.waitpid(child, 0)
    raise Broken(f"{what}: it did not end within {PATIENCE:g} s", function, contract)


@check("fork.before", "create_devices", FORK)
def fork_before(c):
    """a child that is forked before the first use has a device, and so has its parent"""
    c.device_count()
    in_child(lambda: works(c), "create_devices", FORK, "a forked child that uses the device")
    works(c)


@check("fork.after", "create_devices", CHILD)
def fork_after(c):
    """a child that is forked after the first use ends, and its parent goes on"""
    works(c)
    copies_in_flight(c)

    def leave():
        expect(c.code("orDeviceSynchronize") != SUCCESS, "a forked child was not refused")
        ctypes.CDLL(None).exit(0)  # with the plugin's destructors

    in_child(leave, "create_devices", CHILD, "a forked child that exits")
    works(c)
    c.synchronize()


@check("exit.idle", "shutdown", SHUTDOWN)
def exit_idle(c):
    """the process ends after work is done"""
    for device in (0, 1):
        works(c, device)


@check("exit.busy", "shutdown", SHUTDOWN)
def exit_busy(c):
    """the process ends while copies run and others are queued"""
    for device in (0, 1):
        stream = c.stream(device)
        c.wait(stream, c.gate())
        memory, host = copies_in_flight(c, device)
        c.copy(memory, at_address(host), 4 << 20, stream)


# ---- the process of a check ----


def run(name, file):
    """Runs one check, and writes a line of JSON to the file for each step and for the end."""

    def report(kind, *values):
        os.write(file, (json.dumps([kind, *values]) + "\n").encode())

    c = Api(report)
    try:
        report("ok", CHECKS[name].run(c) or "")
    except Skipped as reason:
        report("skipped", str(reason))
    except Broken as broken:
        report("broken", str(broken), broken.function, broken.contract)
    except Refused as refused:
        report("broken", f"{refused.call}: {refused}", function_of(str(refused)), None)
