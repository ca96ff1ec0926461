"""For gdb 13: what the streams of libopenreg do and wait for, in a process or in a core dump.

    (gdb) source csrc/openreg/gdb_openreg.py
    (gdb) openreg streams       streams that have work, and their first tasks; `all`: all of both
    (gdb) openreg hosts         host threads that sleep, and what for
    (gdb) print *stream         also an orTask, orCell, orMutex or orSleeper; print/r: its fields

It needs the library's debug information, and fails with a message without it. It reads memory,
takes no lock and calls nothing in the process, so data that a thread was changing may be shown half
changed: a running stream's list of tasks may begin or end one task off.
"""

import functools
import os
import time

import gdb
import gdb.printing

SHOWN = 10  # tasks of a stream
KINDS = {
    "OR_KIND_KERNEL": "kernel ",
    "OR_KIND_HOST_FUNC": "host function ",
    "OR_KIND_COPY": "copy ",
    "OR_KIND_SET": "fill ",
}
CELL_DONE = (
    1  # OR_CELL_DONE; an enumerator that is only used as a number may have no debug information
)
HOST = -1  # OR_HOST


class MissingError(Exception):
    """The requested thing is not there, or the library was built without it."""


# ---- finding things ----


def library_files():
    files = (objfile.filename for objfile in gdb.objfiles())
    return [f for f in files if f and os.path.basename(f).startswith("libopenreg.so")]


def explain(what):
    """The error for a symbol or type that gdb does not have."""
    files = library_files()
    if not files:
        return MissingError(
            "no libopenreg.so is loaded: the program has not come so far, or uses no openreg device"
        )
    return MissingError(
        f"{files[0]} has no debug information about {what}: build it with "
        "`CFLAGS=-g make build`, or run the program over the debug build, "
        "LD_PRELOAD=build/ctest/debug/libopenreg.so.0 (`make ctest`)"
    )


def usable(symbol, name):
    value = symbol.value() if symbol else None
    if value is None or value.is_optimized_out:
        raise explain(name)
    return value


def shared(name):
    return usable(gdb.lookup_global_symbol(name), name)


def static(name, file):
    """A file's static variable: other libraries of the process may have one of the same name."""
    for symbol in gdb.lookup_static_symbols(name):
        if os.path.basename(symbol.symtab.filename) == file:
            return usable(symbol, f"{name} of {file}")
    raise explain(f"{name} of {file}")


def pointer_to(name):
    try:
        return gdb.lookup_type(name).pointer()
    except gdb.error:
        raise explain(name) from None


def at(address, type_name):
    return gdb.Value(address).cast(pointer_to(type_name)).dereference()


def text_at(pointer):
    try:
        return pointer.string()
    except gdb.MemoryError:
        return f"<name at 0x{int(pointer):x}, which cannot be read>"


# ---- in words, as the hang report has it ----


def thread_text(tid):
    for thread in gdb.selected_inferior().threads():
        if thread.ptid[1] == tid:
            return f"thread {thread.num} (LWP {tid})"
    return f"LWP {tid}, which is gone"


def worker_text(index):
    if index == HOST:
        return "on a host thread that waits for it"
    for thread in gdb.selected_inferior().threads():
        if thread.name == f"openreg-{index}":
            return f"on worker {index}, thread {thread.num} (LWP {thread.ptid[1]})"
    return f"on worker {index}"  # a core dump has no names of threads


def device_of(handle):
    return handle >> 54 & 0x3F  # handle.c


def stream_name(handle):
    device = device_of(handle)
    if int(static("default_streams", "context.c")[device]) == handle:
        return f"the default stream of openreg:{device}"
    return f"stream 0x{handle:x} of openreg:{device}"


def lowered(enumerator, prefix):
    return str(enumerator).removeprefix(prefix).lower()


def cell_text(cell):
    event, stream = int(cell["event"]), int(cell["stream"])
    if stream:
        return f"event 0x{event:x}, recorded as task {int(cell['number'])} of {stream_name(stream)}"
    return f"external event 0x{event:x} of openreg:{device_of(event)}"


def is_done(cell):
    return bool(int(cell["state"]) & CELL_DONE)


def cell_state(cell):
    if not is_done(cell):
        return "pending"
    status = str(cell["status"])
    return "done" if status == "orSuccess" else f"done with {status}"


def cell_and_state(cell):
    return f"{cell_text(cell)}: {cell_state(cell)}, {int(cell['refs'])} references"


def task_text(task):
    kind = str(task["kind"])
    text = KINDS.get(kind, "") + text_at(task["name"])
    if kind == "OR_KIND_WAIT":
        return f"{text}: {cell_text(task['u']['cell'])}"
    if kind == "OR_KIND_RECORD":
        return f"{text}: event 0x{int(task['u']['cell']['event']):x}"
    return text


def tasks(stream):
    """Number and record of each unfinished task; None in place of a record that is missing."""
    chunk, offset = stream["out"]["head"], int(stream["out"]["offset"])
    least = gdb.lookup_type("orTask").sizeof
    for number in range(int(stream["completed"]) + 1, int(stream["queued"]) + 1):
        while int(chunk) and offset == int(chunk["end"]):
            chunk, offset = chunk["next"], 0
        if not int(chunk):
            yield number, None
            return
        task = at(int(chunk["data"].address) + offset, "orTask")
        if int(task["size"]) < least:
            yield number, None
            return
        yield number, task
        offset += int(task["size"])


def first_task(stream):
    return next((task for _, task in tasks(stream)), None)


def task_lines(stream, most):
    left = int(stream["queued"]) - int(stream["completed"])
    for shown, (number, task) in enumerate(tasks(stream)):
        if shown == most:
            yield f"... and {left - shown} more", ""
            return
        missing = "not to be found: a thread was changing the queue, or memory is damaged"
        yield f"task {number}", task_text(task) if task is not None else missing


def wait_text(stream):
    """Returns what the stream's first task waits for, or where it runs; empty if it has none."""
    state = str(stream["state"])
    if state == "OR_STREAM_RUNNING":
        return worker_text(int(stream["worker"]))
    if state == "OR_STREAM_READY":
        on = int(shared("orDispatcherNow"))
        return "ready for " + ("the schedule to choose it" if on else "a worker")
    if state != "OR_STREAM_WAITING":
        return ""
    cell = stream["waits_for"]
    task = first_task(stream)
    if task is not None and str(task["kind"]) != "OR_KIND_WAIT":
        return "started, waits for the device to finish it"
    return f"waits for {cell_text(cell)}, {cell_state(cell)}"


def stream_text(stream):
    completed, queued = int(stream["completed"]), int(stream["queued"])
    text = (
        f"{stream_name(int(stream['last_handle']))}: {lowered(stream['state'], 'OR_STREAM_')}, "
        f"priority {int(stream['priority'])}, {completed} tasks completed, "
        f"{queued - completed} to go"
    )
    if bool(stream["dying"]):
        text += ", destroyed"
    wait = wait_text(stream)
    return f"{text}; {wait}" if wait else text


def host_text(wait):
    cell, stream = wait["goal"]["cell"], int(wait["stream"])
    if int(cell):
        what = f"{cell_text(cell)}, {cell_state(cell)}"
    elif stream:
        what = f"task {int(wait['goal']['count'])} of {stream_name(stream)}"
    else:
        what = "what the schedule has chosen to run"
    connection = gdb.selected_inferior().connection
    text = f"{thread_text(int(wait['thread']))}: waits for {what}"
    if connection is not None and connection.type == "native":
        # The clock of orNow().
        text += f", for {(time.monotonic_ns() - int(wait['since'])) / 1e9:.1f} s"
    return text


def mutex_text(mutex):
    lock = mutex["mutex"]["__data"]
    held = "held by " + thread_text(int(lock["__owner"])) if int(lock["__lock"]) else "free"
    fields = [field.name for field in mutex.type.strip_typedefs().fields()]
    if "rank" not in fields:
        return f"{held} (its rank is in builds with OR_DEBUG alone)"
    return f"{mutex['rank']}, {held}"


# ---- printers ----


class Printer:
    def __init__(self, text, value):
        self.text, self.value = text, value

    def to_string(self):
        try:
            return self.text(self.value)
        except MissingError as error:
            return f"<{error}>"


class StreamPrinter(Printer):
    def children(self):
        yield "lock", self.value["lock"]
        yield from task_lines(self.value, SHOWN)


def printers():
    collection = gdb.printing.RegexpCollectionPrettyPrinter("openreg")
    for name, text, printer in (
        ("orStream", stream_text, StreamPrinter),
        ("orTask", task_text, Printer),
        ("orCell", cell_and_state, Printer),
        ("orMutex", mutex_text, Printer),
        ("orSleeper", host_text, Printer),
    ):
        collection.add_printer(name, f"^{name}$", functools.partial(printer, text))
    return collection


# ---- commands ----


def streams():
    """The streams of all slots that were ever used, live or not."""
    table = shared("orStreamTable")
    base, size = int(table["base"]), int(table["slot_size"])
    for index in range(int(table["used"]) if base else 0):
        stream = at(base + index * size, "orStream")
        if int(stream["last_handle"]):
            yield stream


def hosts():
    wait = static("hosts", "host_wait.c")
    while int(wait):
        yield wait.dereference()
        wait = wait["next"]


def has_work(stream):
    return int(stream["queued"]) > int(stream["completed"])


def say_stream(stream, most):
    try:
        print(stream_text(stream))
        for number, text in task_lines(stream, most):
            print(f"  {number}" + (f", {text}" if text else ""))
    except gdb.MemoryError as error:
        print(f"  cannot be read: {error}")


class Command(gdb.Command):
    """What libopenreg's streams and host threads do: `openreg streams`, `openreg hosts`."""

    def __init__(self):
        super().__init__(self.name, gdb.COMMAND_DATA, prefix=self.name == "openreg")

    name = "openreg"

    def say(self, argument):
        raise MissingError("say `openreg streams` or `openreg hosts`")

    def invoke(self, argument, from_tty):
        self.dont_repeat()
        try:
            # After the process has ended, only some symbols are left.
            if not gdb.selected_inferior().pid:
                raise MissingError("there is no process and no core dump")
            self.say(argument.strip())
        except MissingError as error:
            raise gdb.GdbError(f"openreg: {error}") from None
        except gdb.error as error:
            raise gdb.GdbError(
                f"openreg: {error}; {__file__} has to be of the same version as the library"
            ) from None


class Streams(Command):
    """openreg streams [all]
    Each stream that has work, what it waits for, and its first tasks. `all`: idle ones and all
    tasks too."""

    name = "openreg streams"

    def say(self, argument):
        if argument not in ("", "all"):
            raise MissingError(f"streams takes `all` or nothing, not `{argument}`")
        idle = shown = 0
        for stream in streams():
            if argument or has_work(stream):
                say_stream(stream, None if argument else SHOWN)
                shown += 1
            else:
                idle += 1
        if not shown:
            print("no stream has work" if idle else "there is no stream")
        elif idle:
            print(f"{idle} idle, which `openreg streams all` shows")


class Hosts(Command):
    """openreg hosts
    Each host thread that sleeps until work on a device is over. One that is about to sleep is not
    in the list."""

    name = "openreg hosts"

    def say(self, argument):
        if argument:
            raise MissingError(f"hosts takes no argument, not `{argument}`")
        lines = [host_text(wait) for wait in hosts()]
        for line in lines:
            print(line)
        if not lines:
            print("no host thread sleeps for a device")


gdb.printing.register_pretty_printer(None, printers(), replace=True)
for command in (Command, Streams, Hosts):
    command()
