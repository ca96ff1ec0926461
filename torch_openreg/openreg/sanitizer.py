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

import atexit
import contextlib
import itertools
import os
import sys
import threading
import warnings
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

_MODES = ("error", "warn")
_SHOWN_FRAMES = 10

_last = threading.local()  # the report whose text was asked for last, by each thread


class DataRaceError(RuntimeError):
    """Two accesses to the same memory that nothing orders, of which one writes. `text` is its
    message."""

    __module__ = "torch.openreg.sanitizer"

    def __init__(self, text=""):
        super().__init__(text)
        self.report = _last.report if getattr(_last, "text", None) == text else None
        """The Report; None if this was not made for one."""


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
    where: str
    """``the default stream of openreg:0``, or ``the host``."""
    stream: int | None
    """The stream's ``native_handle``; None for the host."""
    device: int | None
    """The stream's device; None for the host."""
    is_default: bool
    """Whether the stream is its device's default stream."""
    write: bool
    begin: int
    end: int
    """From the first byte to behind the last."""
    stack: tuple[Frame, ...] | None
    """The stack of the call, the innermost frame first; None if it was not recorded."""

    def __str__(self):
        does = "writes" if self.write else "reads"
        text = f"{self.operator} on {self.where} {does} {self.begin:#x} to {self.end:#x}"
        if self.stack is None:
            return f"{text} (no Python stack)"
        frames = list(self.stack[:_SHOWN_FRAMES])
        if not frames:
            frames = ["(no Python frames: a thread of autograd, or C++)"]
        if len(self.stack) > _SHOWN_FRAMES:
            frames.append(f"and {len(self.stack) - _SHOWN_FRAMES} more")
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

    @property
    def _identity(self):
        """What two runs of the same program share."""
        sides = (self.earlier, self.later)
        return self.memory, [(s.operator, s.device, s.is_default, s.write) for s in sides]

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
        frames = (Frame(f["filename"], f["line"], f["name"]) for f in stack)
        # Behind these is whoever runs the program.
        stack = tuple(itertools.takewhile(lambda frame: frame.filename != "<frozen runpy>", frames))
    host = given["device"] < 0
    return Access(
        operator=given["operation"],
        where=given["where"],
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
    _last.report = _report(given)
    _last.text = str(_last.report)
    return _last.text


# Errors that an operator of the host could not raise (csrc/torch/sanitizer.cpp): _Unraised, oldest
# first.
_unraised = []
_serial = itertools.count(1)


class _Unraised:
    """Raises itself as a filter of warnings, or is taken.

    PyTorch issues the warnings of an operator when this returns to Python, and an exception that
    comes out of a filter is the operator's.
    """

    def __init__(self, text):
        self.error = DataRaceError(text)
        self.thread = threading.get_ident()
        self.warning = f"data race of the host, {next(_serial)}: its error comes at a later call"
        self.filter = ("error", self, Warning, None, 0)
        _unraised.append(self)
        warnings.filters.insert(0, self.filter)

    def match(self, text):
        if not text.startswith(self.warning):
            return False
        self.take()
        raise self.error

    def take(self):
        for taken, kept in ((self, _unraised), (self.filter, warnings.filters)):
            with contextlib.suppress(ValueError):
                kept.remove(taken)
        return str(self.error)


def _take_unraised():
    mine = threading.get_ident()
    texts = [unraised.take() for unraised in list(_unraised) if unraised.thread == mine]
    return "\n\n".join(texts) or None


def _take_all():
    return [unraised.take() for unraised in list(_unraised)]


_C._sanitizer_bind(DataRaceError, _text, lambda text: _Unraised(text).warning, _take_unraised)


@atexit.register
def _at_exit():
    texts = _take_all()
    if texts:
        print("DataRaceError, which nothing has raised:", *texts, sep="\n", file=sys.stderr)
        _C._sanitizer_fail_exit()


os.register_at_fork(after_in_child=_take_all)  # they are the parent's


class _Enabled:
    """What was there before, again at the end."""

    def __init__(self, outer):
        self._outer = outer

    def __enter__(self):
        return self

    def __exit__(self, error_type, *rest):
        if _C._in_forked_child():  # where no device works
            return False
        if self._outer is not None:
            _C._sanitizer_enable(*self._outer)
            return False
        try:
            disable()
        except DataRaceError as error:
            if error_type is None:
                raise
            warnings.warn(str(error), stacklevel=2)  # what is on its way goes on
        return False


def enable(mode="error", stacks=True):
    """Switches the sanitizer on, for the whole process. Does not wait.

    Used as a context manager, it puts the sanitizer back at the end into the state that it had
    before: off, or on in its earlier mode.

    Args:
        mode: ``"error"``: each call that makes the later access of a conflict raises DataRaceError,
            before the operator is queued. Copies raise when they are queued. Operators of the host
            on pinned memory raise when they have run; where PyTorch does not let them, the thread's
            next call of the device raises. What turns out to be a conflict only when an event is
            signalled is raised at the thread's next call that finds it. ``"warn"``: a UserWarning
            in the same places, once for each report. Another mode raises ValueError.
        stacks: whether the Python stack of each access is kept.

    It does not know what was queued before. If it is on already, the mode and `stacks` change; what
    it knows, and the reports, stay.
    """
    if mode not in _MODES:
        raise ValueError(f"mode is {mode!r}; allowed are 'error' and 'warn'")
    outer = _C._sanitizer_mode() if _C._sanitizer_active() else None
    _C._sanitizer_enable(mode == "warn", bool(stacks))
    return _Enabled(outer)


def disable():
    """Switches the sanitizer off. The reports stay until they are cleared.

    Raises DataRaceError if an error of the host, in any thread, has not been raised yet.
    """
    _C._sanitizer_disable()
    texts = _take_all()
    if texts:
        raise DataRaceError("\n\n".join(texts))


def is_enabled():
    """Whether the sanitizer is on."""
    return bool(_C._sanitizer_active())


def reports():
    """The conflicts that were found since the sanitizer was enabled or cleared: a list of Report,
    in the order in which they were found. Does not wait, so synchronise first where an event may
    still decide.

    A pair of operators on the same streams and address is reported once. At most 1000 reports are
    kept; later conflicts raise or warn all the same.
    """
    return [_report(given) for given in _C._sanitizer_reports()]


def clear():
    """Forgets the reports, and the errors that have not been raised yet."""
    _take_all()
    _C._sanitizer_clear()


def _enable_by_setting():
    mode = {"1": "error", "warn": "warn"}.get(os.environ.get("OPENREG_SANITIZER", ""))
    if mode:
        enable(mode)


_enable_by_setting()
