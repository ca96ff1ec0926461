"""The sanitizer: accesses to the same memory that nothing orders.

::

    torch.openreg.sanitizer.enable()

    side = torch.openreg.Stream()
    a = torch.rand(4, 4, device="openreg")
    with side:
        torch.mul(a, 5, out=a)  # DataRaceError: side.wait_stream(...) is missing

It follows the order that the program asks for (streams, events, waits, synchronisation), in the
order of its calls, not the one in which tasks happen to run: what is wrong is reported each time.
docs/diagnostics.md has examples, and what is not seen.
"""

import os
from dataclasses import dataclass

from .. import _C

__all__ = [
    "Access",
    "DataRaceError",
    "Frame",
    "Report",
    "clear",
    "disable",
    "enable",
    "is_enabled",
    "reports",
]

MODES = ("error", "warn")
SHOWN_FRAMES = 10


class DataRaceError(RuntimeError):
    """Two accesses to the same memory that nothing orders, and one of them writes."""

    __module__ = "torch.openreg.sanitizer"


@dataclass(frozen=True)
class Frame:
    """A line of a stack."""

    filename: str
    line: int
    name: str

    def __str__(self):
        return f'File "{self.filename}", line {self.line}, in {self.name}'


@dataclass(frozen=True)
class Access:
    """One side of a conflict."""

    operator: str
    """``aten::mul.out``"""
    stream: int | None
    """Its ``native_handle``; None: the host."""
    device: int | None
    """Of the stream; None: the host."""
    is_default: bool
    """Of the device's default stream."""
    write: bool
    begin: int
    end: int
    """From the first byte to behind the last."""
    stack: tuple[Frame, ...] | None
    """Of the call, the innermost frame first; None if it was not recorded."""

    @property
    def where(self):
        if self.stream is None:
            return "the host"
        kind = "the default stream" if self.is_default else f"stream {self.stream:#x}"
        return f"{kind} of openreg:{self.device}"

    def __str__(self):
        does = "writes" if self.write else "reads"
        text = f"{self.operator} on {self.where} {does} {self.begin:#x} to {self.end:#x}"
        if self.stack is None:
            return f"{text} (no Python stack)"
        frames = list(self.stack[:SHOWN_FRAMES])
        if not frames:
            frames = ["(no Python frames: a thread of autograd, or C++)"]
        if len(self.stack) > SHOWN_FRAMES:
            frames.append(f"and {len(self.stack) - SHOWN_FRAMES} more")
        return "\n".join([f"{text}, called from", *(f"    {frame}" for frame in frames)])


@dataclass(frozen=True)
class Report:
    """A conflict: two accesses that nothing orders."""

    number: int
    earlier: Access
    later: Access
    begin: int
    end: int
    """What both touch, from the first byte to behind the last."""
    memory: str
    """Whose memory it is."""
    advice: str
    """The call that would have ordered them."""

    def __str__(self):
        return (
            f"data race {self.number} on {self.memory}, {self.begin:#x} to {self.end:#x}:\n"
            f"  {self.later}\n"
            f"and nothing orders it with the earlier access:\n"
            f"  {self.earlier}\n"
            f"What would have: {self.advice}"
        )


def _access(given):
    stack = given["stack"]
    if stack is not None:
        stack = tuple(Frame(f["filename"], f["line"], f["name"]) for f in stack)
    host = given["device"] < 0
    return Access(
        operator=given["operation"],
        stream=None if host else given["stream"],
        device=None if host else given["device"],
        is_default=given["is_default"],
        write=given["write"],
        begin=given["begin"],
        end=given["end"],
        stack=stack,
    )


def _report(given):
    sides = {side: _access(given[side]) for side in ("earlier", "later")}
    return Report(**{**given, **sides})


def _text(given):
    return str(_report(given))


def _error_of(text):
    """A class whose objects have this text: what Python raises in a thread later is a class."""

    def __init__(self, *arguments):
        DataRaceError.__init__(self, *(arguments or (text,)))

    members = {"__init__": __init__, "__module__": DataRaceError.__module__}
    return type("DataRaceError", (DataRaceError,), members)


_C._sanitizer_bind(DataRaceError, _text, _error_of)


class _Enabled:
    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        disable()
        return False


def enable(mode="error", stacks=True):
    """Switches the sanitizer on, for the whole process. As a context manager it is off at the end.

    Args:
        mode: "error": a conflict raises DataRaceError in the thread that made the later access, in
            each such call, before the operator is queued. Copies raise when they are queued, operators
            of the host on pinned memory when they have run, and what turns out to be a conflict
            only when an event is signalled at the thread's next call that finds it out. "warn": a
            UserWarning in the same places, once of each report.
        stacks: whether the Python stack of each access is kept.

    What was queued before is not known to it. Enabling it again forgets what it knew and the
    reports.
    """
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; allowed are 'error' and 'warn'")
    if _C._sanitizer_active():
        disable()
    _C._sanitizer_enable(mode == "warn", bool(stacks))
    return _Enabled()


def disable():
    """Switches the sanitizer off. The reports stay until they are cleared."""
    _C._sanitizer_disable()


def is_enabled():
    """Whether the sanitizer is on."""
    return bool(_C._sanitizer_active())


def reports():
    """The conflicts that were found since the sanitizer was enabled, or cleared: a list of Report,
    in their order. One pair of operators on the same streams and address is one. At most 1000 are
    kept; those after them raise or warn all the same."""
    return [_report(given) for given in _C._sanitizer_reports()]


def clear():
    """Forgets the reports."""
    _C._sanitizer_clear()


def _enable_by_setting():
    mode = {"1": "error", "warn": "warn"}.get(os.environ.get("OPENREG_SANITIZER", ""))
    if mode:
        enable(mode)


_enable_by_setting()
