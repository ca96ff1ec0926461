"""What to change in a program so that a report goes: lines to paste, in the program's names."""

import ast
import re
from typing import NamedTuple

import torch

from ... import _C
from .. import _messages
from .._utils import type_name
from . import _names

# openreg_sanitizer.h
_KINDS = (None, "wait", "host wait", "record", "work", "write")
_LOST, _ELSEWHERE = 8, 16


class Help(NamedTuple):
    """A line to paste, and its place in the program."""

    where: str
    """``"before"``, ``"after"`` or ``"in place of"`` the line."""
    filename: str
    line: int
    code: str
    """The line or lines to paste."""

    def __str__(self):
        verb = "put" if self.where == "in place of" else "add"
        code = "; ".join(self.code.splitlines())
        return f"{self.where} {_messages.place(self.filename, self.line)} {verb} {code}"


class Missing(NamedTuple):
    """What would have ordered the two accesses of a report."""

    kind: str | None = None
    """``"wait"`` of a stream for a stream, ``"host wait"`` for a stream, ``"record"`` of a stream
    on memory that is freed, ``"work"``: a wait for a collective, ``"write"`` of memory."""
    stream: int | None = None
    """The ``native_handle`` of the stream to wait for, or to record."""
    lost: bool = False
    """Whether there is a wait for an event that had been recorded again."""
    elsewhere: bool = False
    """Whether another thread has waited for the earlier access."""

    @classmethod
    def of(cls, bits, stream):
        """From the core's data."""
        kind = _KINDS[bits & 7]
        return cls(kind, stream or None, bool(bits & _LOST), bool(bits & _ELSEWHERE))

    @property
    def is_wait(self):
        return self.kind in ("wait", "host wait")


def notes(report):
    """Paragraphs that say what is wrong between the two accesses."""
    missing, name = report.missing, report.subject.name or "The memory"
    if missing.kind == "write":
        return ["Nothing has written these bytes between the two."]
    if missing.kind == "record" and report.later.operator == "free":
        return [
            f"{name} is freed by the second, while {report.earlier.who} may still use it: a later "
            "allocation may get its memory before the first is over."
        ]
    if missing.kind == "record":
        made = report.subject.made if report.subject.name is None else None
        where = f", allocated at {_messages.place(*made[:2])}," if made else ""
        return [
            f"{name}{where} is freed after the first, while {report.earlier.who} may still use it, "
            "and the second gets its memory. Nothing orders the second after the first."
        ]
    lines = "Nothing orders the second after the first."
    if report.kind == "possible race":
        lines += " They may touch the same bytes: which ones is not known at the call."
    if missing.lost:
        lines += " The event that is waited for had been recorded again, after the first."
    if missing.elsewhere:
        lines += (
            " Another thread has waited for the first, but does not order this one after that "
            "wait: a join, a lock or a queue would."
        )
    if missing.kind == "work":
        lines += " A collective is over when its wait() has returned."
    return [lines]


class _Place:
    """A statement of the program."""

    def __init__(self, frame):
        self.frame = frame
        self.node = _names.statement(frame)

    @property
    def first(self):
        return self.node.lineno if self.node else self.frame.line

    def before(self, code):
        return Help("before", self.frame.filename, self.first, code)

    def after(self, code):
        """Before it, if control does not come to the line behind it."""
        if isinstance(self.node, ast.Return | ast.Raise):
            return self.before(code)
        last = getattr(self.node, "end_lineno", self.frame.line)
        if hasattr(self.node, "body"):  # a compound statement, whose head has the access
            last = self.frame.line
        return Help("after", self.frame.filename, last, code)


def _current(device):
    """The current stream of a device, where device 0 or that device is current."""
    module = "cuda" if type_name() == "cuda" else "accelerator"
    other = device and device != torch.accelerator.current_device_index()
    return f"torch.{module}.current_stream({device if other else ''})"


def _default(device):
    return f"torch.{type_name()}.default_stream({device or ''})"


def _stream(handle, live, origin):
    """An expression for a stream; None: it has no name."""
    name, default, device = origin(handle)
    if default:
        return _default(device)
    variable = live.stream(handle)
    return variable.name if variable else name


def _frame_of(handle, report, live):
    """The line before which the later access has not begun, and where the stream has its name."""
    variable, frame = live.stream(handle), report.later.call
    if variable is None or variable.is_in(frame):
        return frame
    outer = next((f for f in report.later.stack if variable.is_in(f)), frame)
    begun = {earlier[:3] for earlier in report.earlier.stack or ()}
    return frame if outer[:3] in begun else outer


def _wait(report, live, origin):
    """One stream waits for another."""
    handle, device = report.missing.stream, report.later.device
    frame = _frame_of(handle, report, live)
    later = None if report.later.is_default else _stream(report.later.stream, live, origin)
    earlier = _stream(handle, live, origin)
    if earlier is None and report.earlier.call:
        return _wait_by_event(report, frame, later or _current(device))
    earlier = earlier or "the_stream_of_the_first"
    inside = _names.context(frame, [later]) if later else None
    if inside is None or _is_within(report.earlier.call, frame, inside):
        return [_Place(frame).before(f"{later or _current(device)}.wait_stream({earlier})")]
    if origin(handle)[1:] == (True, device) and _was_current(report.later, handle):
        earlier = _current(device)
    return [Help("before", frame.filename, inside.lineno, f"{later}.wait_stream({earlier})")]


def _wait_by_event(report, frame, later):
    """For a stream that has no name where the wait goes."""
    record = f"done = {_current(report.earlier.device)}.record_event()"
    return [
        _Place(report.earlier.call).after(record),
        _Place(frame).before(f"{later}.wait_event(done)"),
    ]


def _is_within(earlier, frame, node):
    """Whether the earlier access is in the body of a statement around the later one's line."""
    if earlier is None or earlier.filename != frame.filename:
        return False
    return node.lineno <= earlier.line <= node.end_lineno and earlier.name == frame.name


def _was_current(access, handle):
    """Whether the stream of that handle was current before the context of an access."""
    from ..streams import _entered

    for name, before in _entered.before.items():
        if before and _C._stream_handle(name) == access.stream:
            return _C._stream_handle(before[-1][1]) == handle
    return False


def _host_wait(report, live, origin):
    handle, device = report.missing.stream, report.earlier.device
    stream = _stream(handle, live, origin)
    if stream is None or live.current(device) == handle:
        stream = _current(device)
    return [_Place(_frame_of(handle, report, live)).before(f"{stream}.synchronize()")]


def _host_wait_by_event(report, live, origin):
    """For a copy and a use in one function, in this order."""
    copy, use = report.earlier.call, report.later.call
    if copy is None or report.earlier.node or copy[::2] != use[::2] or copy.line >= use.line:
        return None
    record = f"copied = {_current(report.earlier.device)}.record_event()"
    return [_Place(copy).after(record), _Place(use).before("copied.synchronize()")]


def _tensor_at(report, frame):
    """The memory's name at an access; None where none is known there."""
    subject = report.subject
    if subject.name and (subject.made is None or subject.made.name == frame.name):
        return subject.name
    find = _names.written_name if report.earlier.write else _names.read_name
    return find(frame) or subject.name


def _record(report, live, origin):
    frame = report.earlier.call
    if frame is None:
        return None
    stream = _current(report.earlier.device)
    variable = live.stream(report.missing.stream)
    if variable is not None and variable.is_in(frame):
        stream = variable.name
    elif "." not in (origin(report.missing.stream)[0] or "."):
        stream = origin(report.missing.stream)[0]
    tensor = _tensor_at(report, frame) or "tensor"
    return [_Place(frame).after(f"{tensor}.record_stream({stream})")]


def _work(report, live, origin):
    at = _Place(report.later.call)
    if report.earlier.call is None:
        return [at.before("work.wait()")]
    call = _Place(report.earlier.call)
    name, _ = _names.made_name(report.earlier.stack)
    if name is None and isinstance(call.node, ast.Expr):
        code = f"work = {_names.source(call.node, call.frame.filename)}"
        held = Help("in place of", call.frame.filename, call.first, code)
        return [held, at.before("work.wait()")]
    return [at.before(f"{name or 'work'}.wait()")]


_EMPTY = re.compile(r"\b(new_)?empty(_like|_strided)?\(")


def _write(report, live, origin):
    """Zeros in place of an empty tensor, if its line makes one."""
    made = report.earlier.call
    name = report.subject.name or "tensor"
    if made is None:
        return [_Place(report.later.call).before(f"{name}.zero_()")]
    at = _Place(made)
    if at.node is not None:
        code = _names.source(at.node, made.filename)
        zeros = _EMPTY.sub(lambda m: f"{m[1] or ''}zeros{m[2] or ''}(", code)
        if zeros != code and "empty_strided" not in code:
            return [Help("in place of", made.filename, at.first, zeros)]
    return [at.after(f"{name}.zero_()")]


_WAYS = {
    "wait": (_wait,),
    "host wait": (_host_wait, _host_wait_by_event),
    "record": (_record,),
    "work": (_work,),
    "write": (_write,),
}


def advise(report, live, origin):
    """The groups of Help of a report, the cheapest first; each alone mends the program.

    Args:
        live: the variables of frames that are alive (_reports.Live).
        origin: (name, whether it is a default stream, device) of a stream by its handle.
    """
    if report.later.call is None:
        return ()
    ways = (way(report, live, origin) for way in _WAYS.get(report.missing.kind, ()))
    return tuple(tuple(way) for way in ways if way)
