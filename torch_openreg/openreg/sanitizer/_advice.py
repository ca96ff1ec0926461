"""What to change in a program so that a report goes: lines to paste, in the program's names.

A name in a line to paste means the same at its place as it does in the report. Where no line has
such names, a sentence says what is missing.
"""

import ast
import itertools
import re
from typing import NamedTuple

import torch

from ... import _C
from .. import _messages
from .._utils import type_name
from . import _names
from ._frames import Frame, own_frames

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


def _waits_between(report):
    """A sentence about a wait between the accesses that does not order them; "": there is none."""
    first, second, edges, names = report.order
    target = report.later.stream or 0
    edges = [e for e in edges if e.source == report.earlier.stream and first < e.waited < second]
    if any(e.target == target and e.recorded < first for e in edges):
        return (
            f" In between, {report.later.who} waits for an event of {report.earlier.who} that was "
            "recorded before the first: it must wait for one that is recorded after the first."
        )
    others = [e.target for e in edges if e.target not in (0, target) and e.recorded > first]
    if others:
        other = dict(names)[others[-1]]
        return f" In between, {other} waits for it, but {report.later.who} does not."
    return ""


def words(report):
    """What is missing, as a sentence, where no line to paste has the names for it."""
    kind, call = report.missing.kind, report.earlier.call
    if report.helps or report.graph:
        return ""
    first, after = report.earlier.who, _messages.place(*call[:2]) if call else "the first"
    return {
        "record": f"Call record_stream() on the tensor, with {first}, after {after}.",
        "wait": f"Record an event on {first} after {after}, and let {report.later.who} wait for it "
        "before the second.",
        "work": "Call wait() of what the collective has returned before the second.",
    }.get(kind, "")


def notes(report):
    """Paragraphs that say what is wrong between the two accesses."""
    return [" ".join(filter(None, (_wrong(report), words(report))))]


def _wrong(report):
    missing, name = report.missing, report.subject.name or "The memory"
    if missing.kind == "write":
        return "Nothing has written these bytes between the two."
    if missing.kind == "record" and report.later.operator == "free":
        return (
            f"{name} is freed by the second, while {report.earlier.who} may still use it: a later "
            "allocation may get its memory before the first is over."
        )
    if missing.kind == "record":
        made = report.subject.made if report.subject.name is None else None
        where = f", allocated at {_messages.place(*made[:2])}," if made else ""
        return (
            f"{name}{where} is freed after the first, while {report.earlier.who} may still use it, "
            "and the second gets its memory. Nothing orders the second after the first."
        )
    lines = "Nothing orders the second after the first."
    if report.kind == "possible race":
        lines += " They may touch the same bytes: a mask, or too many indices, decide which."
    if missing.lost:
        lines += " The event that is waited for had been recorded again, after the first."
    elif missing.is_wait:
        lines += _waits_between(report)
    if missing.elsewhere:
        lines += (
            " Another thread has waited for the first, but does not order this one after that "
            "wait: a join, a lock or a queue would."
        )
    if missing.kind == "work":
        lines += " A collective is over when its wait() has returned."
    return lines


class Origin(NamedTuple):
    """Where a stream comes from."""

    name: str | None
    """What the line that made it assigns it to."""
    made: object
    """That line's Frame, or None."""
    is_default: bool
    device: int


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


def _of_device(function, device):
    """A call of a function of the device module, where device 0 or that device is current."""
    module = "cuda" if type_name() == "cuda" else "accelerator"
    other = device and device != torch.accelerator.current_device_index()
    return f"torch.{module}.{function}({device if other else ''})"


def _current(device):
    return _of_device("current_stream", device)


def _default(device):
    return f"torch.{type_name()}.default_stream({device or ''})"


def _stream(handle, live, origin, frame):
    """An expression for a stream at a line; None: it has no name there."""
    stream, name = origin(handle), live.stream_at(handle, frame)
    if stream.is_default:
        return _default(stream.device)
    if name:
        return name
    known = stream.name and _names.is_known_at(stream.name, stream.made, frame)
    return stream.name if known else None


def _frame_of(handle, report, live):
    """The line before which the later access has not begun, and where the stream has its name."""
    variable, frame = live.stream(handle), report.later.call
    if variable is None or live.stream_at(handle, frame):
        return frame
    outer = next((f for f in report.later.stack if variable.is_in(f)), frame)
    begun = {earlier[:3] for earlier in report.earlier.stack or ()}
    return frame if outer[:3] in begun else outer


def _wait(report, live, origin):
    """One stream waits for another."""
    handle, device = report.missing.stream, report.later.device
    frame = _frame_of(handle, report, live)
    earlier = _stream(handle, live, origin, frame)
    if earlier is None:
        return _wait_by_event(report, live, origin) or _wait_in_owner(report, live, origin)
    later = None if report.later.is_default else _stream(report.later.stream, live, origin, frame)
    inside = _names.context(frame, [later]) if later else None
    if inside is None or _is_within(report.earlier, frame, inside):
        return [_Place(frame).before(f"{later or _current(device)}.wait_stream({earlier})")]
    if origin(handle)[2:] == (True, device) and _was_current(report.later, handle):
        earlier = _current(device)
    return [Help("before", frame.filename, inside.lineno, f"{later}.wait_stream({earlier})")]


def _wait_by_event(report, live, origin):
    """For a stream that has no name where the wait goes, if one function makes both accesses. In a
    loop that is over before the second, the event would be the last turn's."""
    lines = _common_lines(report)
    if lines is None or report.earlier.node or lines[0] != report.earlier.call:
        return None
    loops = _names.around(lines[0], ast.For | ast.While)
    if any(loop.end_lineno < lines[1].line for loop in loops):
        return None
    if any(block.body[0].lineno == block.lineno for block in _names.around(lines[0], ast.With)):
        return None  # after a block on its line another stream is current
    later = None if report.later.is_default else report.later.stream
    stream = (later and _stream(later, live, origin, lines[1])) or _current(report.later.device)
    done = _names.unused(lines[0], "done")
    record = f"{done} = {_current(report.earlier.device)}.record_event()"
    wait = _Place(lines[1]).before(f"{stream}.wait_event({done})")
    return [_Place(lines[0]).after(record), wait]


def _wait_in_owner(report, live, origin):
    """In the code that has the stream's name and makes the first access, where none of the second's
    lines has it."""
    sides = report.earlier, report.later
    if any(side.node or not side.stack or _is_threads(side.stack) for side in sides):
        return None
    copy, use = _parted(report)
    if not copy:
        return None
    arguments = report, live, origin, copy, use
    return _wait_before_yield(*arguments) or _wait_after_call(*arguments)


def _is_threads(stack):
    """Whether it is of another thread than the main one."""
    return stack[-1].name == "_bootstrap"


def _wait_before_yield(report, live, origin, copy, use):
    """In a generator that takes a turn between the accesses."""
    if not (_takes_a_turn(copy, use) if use else _is_in_comprehension(report.later)):
        return None
    for name, frame in _names.generators_with(report.missing.stream):
        at = Frame.of(frame)
        later = _later_stream(report, live, origin, at)
        if later and _names.is_only_yield(at):
            return [_Place(at).before(f"{later}.wait_stream({name})")]
    return None


def _takes_a_turn(copy, use):
    """Whether a ``for`` loop around the second begins a turn after the first."""
    for frame in use:
        loops = (loop for loop in _names.around(frame, ast.For) if frame.line > loop.iter.lineno)
        begun = frame is use[0] and copy[0][::2] == frame[::2]
        if any(not begun or copy[0].line < loop.body[0].lineno for loop in loops):
            return True
    return False


def _is_in_comprehension(access):
    """Whether it is made in a line whose turns are on it."""
    node = _names.statement(own_frames(access.stack)[0])
    return any(isinstance(part, ast.comprehension) for part in ast.walk(node or ast.Pass()))


def _wait_after_call(report, live, origin, copy, use):
    """After the call in which the first access is made, if the second follows at once. What a
    function does last, or a generator between two turns, is for later and shall overlap."""
    if any(map(_names.yields, copy)):
        return None
    if use and copy[0][::2] == use[0][::2]:
        if copy[0].line >= use[0].line or not _adjoin((copy[0], use[0])):
            return None
    elif use and _is_in_loop(own_frames(report.earlier.stack)[len(copy) :]):  # of another turn
        return None
    stream = origin(report.missing.stream)
    known = (f for f in copy if stream.name and _names.is_known_at(stream.name, stream.made, f))
    frame = next(known, None)
    later = frame and _later_stream(report, live, origin, frame)
    if not later or _names.is_last(frame) or isinstance(_Place(frame).node, ast.Return):
        return None
    return [_Place(frame).after(f"{later}.wait_stream({stream.name})")]


def _is_in_loop(common):
    """Whether the innermost of the frames that both accesses have is in a loop; without such frames
    nothing is known."""
    return not common or bool(_names.around(common[0], ast.For | ast.While))


def _later_stream(report, live, origin, frame):
    """An expression for the stream of the second access, at a line of other code."""
    later = report.later
    if not later.is_default:
        return _stream(later.stream, live, origin, frame)
    return (_default if _names.around(frame, ast.With) else _current)(later.device)


def _is_within(earlier, frame, node):
    """Whether the earlier access is made in the body of a statement around the later one's line, or
    in functions that it calls."""
    return any(
        node.lineno <= at.line <= node.end_lineno and at[::2] == frame[::2]
        for at in (earlier.call, *own_frames(earlier.stack))
        if at
    )


def _was_current(access, handle):
    """Whether the stream of that handle was current before the context of an access."""
    from ..streams import _entered

    for name, before in _entered.before.items():
        if before and _C._stream_handle(name) == access.stream:
            return _C._stream_handle(before[-1][1]) == handle
    return False


def _parted(report):
    """The frames that are of one access only, the outermost first, of each."""
    stacks = [own_frames(side.stack)[::-1] for side in (report.earlier, report.later)]
    same = (copy[:3] == use[:3] for copy, use in zip(*stacks, strict=False))
    depth = len(list(itertools.takewhile(bool, same)))
    return [stack[depth:] for stack in stacks]


def _common_lines(report):
    """The lines of both accesses in the innermost function that has both; None if the first is not
    before the second there, or if they call one function, which other lines may call as well."""
    copy, use = (frames[:2] for frames in _parted(report))
    functions = [[frame[::2] for frame in side] for side in (copy, use)]
    if not copy or not use or functions[0][0] != functions[1][0] or copy[0].line >= use[0].line:
        return None
    return None if functions[0][1:] == functions[1][1:] != [] else (copy[0], use[0])


def _recorded_event(report):
    """The event that the program records right after a copy, by a name that the use's line has."""
    copy, use = report.earlier.call, report.later.call
    if copy is None or report.earlier.node or report.missing.lost:
        return None
    event = _names.event_recorded_after(copy)
    known = event and _names.is_known_at(event, copy, use)
    return event if known and ("." in event or copy.line < use.line) else None


def _host_wait_by_event(report, live, origin):
    """For a copy before a use in one function, or in functions that it calls."""
    event = _recorded_event(report)
    if event:
        return [_Place(report.later.call).before(f"{event}.synchronize()")]
    lines = None if report.earlier.node else _common_lines(report)
    if lines is None or isinstance(_Place(lines[0]).node, ast.Return) or _adjoin(lines):
        return None
    handle, device = report.missing.stream, report.earlier.device
    stream = _stream(handle, live, origin, lines[0])
    if lines[0] == report.earlier.call or live.current(device) == handle:
        stream = _current(device)
    if stream is None:
        return None
    copied = _names.unused(lines[0], "copied")
    record = _Place(lines[0]).after(f"{copied} = {stream}.record_event()")
    return [record, _Place(lines[1]).before(f"{copied}.synchronize()")]


def _adjoin(lines):
    """Whether the line after the first is the second, where an event would wait for no less than
    for the stream."""
    return lines is not None and not _names.has_between(*lines)


def _host_wait(report, live, origin):
    handle, device = report.missing.stream, report.earlier.device
    lines = None if report.earlier.node else _common_lines(report)
    frame = lines[1] if _adjoin(lines) else _frame_of(handle, report, live)
    stream = _stream(handle, live, origin, frame)
    if live.current(device) == handle:
        stream = _current(device)
    wait = f"{stream}.synchronize()" if stream else _of_device("synchronize", device)
    return [_Place(frame).before(wait)]


def _tensor_at(report, frame):
    """The memory's name at an access; None: it has none there."""
    subject = report.subject
    name, made = subject.name, subject.made
    grad = report.earlier.node == "AccumulateGrad" and _names.cleared_grad(frame)
    if grad or (report.earlier.node and not report.earlier.is_python):
        return grad or None
    if name and (made is None or _names.is_known_at(name, made, frame)):
        return subject.name
    if report.earlier.write:
        return _names.written_name(frame)
    names = _names.read_names(frame)
    if len(names) > 1:  # those that are the same attribute
        last = (name or "").rpartition(".")[2]
        names = [name for name in names if name.rpartition(".")[2] == last]
    return names[0] if len(names) == 1 else None


def _record(report, live, origin):
    frame = report.earlier.call
    if frame is None:
        return None
    handle = report.missing.stream
    stream = None if origin(handle).is_default else _stream(handle, live, origin, frame)
    stream = stream or _current(report.earlier.device)
    tensor, subject = _tensor_at(report, frame), report.subject
    if tensor and _names.is_of_part(frame, tensor):
        return _record_items(report, live, origin)
    if tensor is None and subject.name and subject.made:  # where it was allocated
        there = _stream(handle, live, origin, subject.made)
        if there:
            return [_Place(subject.made).after(f"{subject.name}.record_stream({there})")]
    if tensor is None:
        return _record_items(report, live, origin)
    return [_Place(frame).after(f"{tensor}.record_stream({stream})")]


def _record_items(report, live, origin):
    """Of a list, where it is made: no variable holds its items."""
    made = report.subject.made
    name = made and _names.listed_name(made)
    stream = name and _stream(report.missing.stream, live, origin, made)
    if not stream:
        return None
    item = "item" if name != "item" else "tensor"
    return [_Place(made).after(f"for {item} in {name}:\n    {item}.record_stream({stream})")]


def _work(report, live, origin):
    """By the name that the collective's line gives its work, or could give it. A function that
    waits for what another one started has it by the same name, or by none."""
    at, first = _Place(report.later.call), report.earlier.call
    if first is None:
        return None
    call = _Place(first)
    name, made = _names.made_name(own_frames(report.earlier.stack))
    if name and _names.is_known_at(name, made, at.frame):
        return [at.before(f"{name}.wait()")]
    loops = _names.around(at.frame, ast.For)
    if name and any(_names.binds(loop.target, name) for loop in loops):
        # Turns of an inner loop have the same: the first statement waits before it.
        inner = loops[-1].body[0] is at.node and not _names.binds(loops[-1].target, name)
        line = loops[-1].lineno if inner else at.first
        return [Help("before", at.frame.filename, line, f"{name}.wait()")]
    if name and _names.has_before(at.frame, name):
        return [at.before(f"{name}.wait()")]
    if name or not isinstance(call.node, ast.Expr):
        return None
    work = _names.unused(first, "work")
    if not _names.is_known_at(work, first, at.frame):
        return None
    code = f"{work} = {_names.source(call.node, first.filename)}"
    return [Help("in place of", first.filename, call.first, code), at.before(f"{work}.wait()")]


_EMPTY = re.compile(r"((?<![\w.])(?:torch\.)?|\.new_)empty(_like)?\(")


def _write(report, live, origin):
    """Zeros in place of an empty tensor, if its line makes one."""
    made = report.earlier.call
    name = report.subject.name
    if made is None:
        return name and [_Place(report.later.call).before(f"{name}.zero_()")]
    at = _Place(made)
    if at.node is not None:
        code = _names.source(at.node, made.filename)
        zeros = _EMPTY.sub(r"\1zeros\2(", code)
        if zeros != code:
            return [Help("in place of", made.filename, at.first, zeros)]
    return name and [at.after(f"{name}.zero_()")]


_WAYS = {
    "wait": (_wait,),
    "host wait": (_host_wait_by_event, _host_wait),
    "record": (_record,),
    "work": (_work,),
    "write": (_write,),
}


def advise(report, live, origin):
    """The groups of Help of a report, the cheapest first; each alone mends the program.

    Args:
        live: the variables of frames that are alive (_findings.Live).
        origin: the Origin of a stream by its handle.
    """
    if report.later.call is None:
        return ()
    ways = (way(report, live, origin) for way in _WAYS.get(report.missing.kind, ()))
    return tuple(tuple(way) for way in ways if way)
