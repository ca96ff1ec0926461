"""The sanitizer's findings for people: Report, and its text."""

import functools
import itertools
import os
import re
import sysconfig
from typing import NamedTuple

import torch

from ... import _C
from . import _pictures

_SHOWN_FRAMES = 10
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_RUNNERS = ("<frozen runpy>", os.path.join(_OURS, "openreg", "testing", "_schedules.py"))
_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]([^/\\.]+)")


class Frame(NamedTuple):
    """A line of a stack."""

    filename: str
    line: int
    name: str

    def __str__(self):
        return f'File "{self.filename}", line {self.line}, in {self.name}'


@functools.cache
def _folders():
    """Folders of files that are not the user's, with their owners. The demo comes first: it is a
    user's program wherever it is installed."""
    return (
        (os.path.join(_OURS, "_demo.py"), None),
        (os.path.dirname(os.path.abspath(torch.__file__)), "torch"),
        (_OURS, "torch_openreg"),
    )


@functools.lru_cache(maxsize=4096)
def _package(filename):
    """The file's owner; None: the user."""
    for folder, name in _folders():
        if filename.startswith(folder):
            return name
    installed = _INSTALLED.match(filename)
    if installed:
        return installed[1]
    standard = filename.startswith((sysconfig.get_paths()["stdlib"], "<frozen "))
    return "Python" if standard else None


def user_frame(frames):
    """The innermost frame of the user's own code, or else the innermost; None without frames."""
    own = (frame for frame in frames or () if _package(frame.filename) is None)
    return next(own, frames[0] if frames else None)


def _folded(count, names):
    return f"{count} frame{'s' * (count != 1)} of {' and '.join(dict.fromkeys(names))}"


def _stack_text(called, frames, indent="    "):
    """`called` with the frames below it: the user's frames, and counts of the others."""
    if all(_package(frame.filename) for frame in frames):
        lines = [str(frame) for frame in frames]
    else:
        lines = []
        for own, group in itertools.groupby(frames, lambda f: _package(f.filename) is None):
            group = list(group)
            folded = _folded(len(group), (_package(frame.filename) for frame in group if not own))
            if own:
                lines += map(str, group)
            elif lines:
                lines.append(f"... {folded}")
            else:
                called = f"{called}, through {folded}"
    if len(lines) > _SHOWN_FRAMES:
        lines[_SHOWN_FRAMES:] = [f"and {len(lines) - _SHOWN_FRAMES} more"]
    return "\n".join([called, *(indent + line for line in lines)])


class Access(NamedTuple):
    """One side of a conflict."""

    operator: str
    """``aten::mul.out``; ``allocation`` for what has handed out memory that nothing wrote."""
    where: str
    """``the default stream of openreg:0``, ``stream 0x100010001 of openreg:0 (made at train.py:7)``
    or with its name, ``stream "copies" of openreg:0``; or ``the host``."""
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
    """The stack of the call, the innermost frame first; None if it was not recorded. On a thread of
    autograd, which has none, the stack of ``backward()``."""
    some: bool = False
    """Whether it touches some of these bytes only, of which it is not known which."""
    node: str | None = None
    """The node of a backward pass that it belongs to, as ``MulBackward0``, or None."""
    forward: tuple[Frame, ...] | None = None
    """The stack of the operator of the forward pass that made the node, if it is known."""

    @property
    def line(self):
        """The innermost Frame outside installed packages; for a node of autograd that of the
        forward pass. None without a stack."""
        return user_frame(self.forward or self.stack)

    def __str__(self):
        does = "writes" if self.write else "reads"
        if self.operator == "allocation":
            does = "handed out"
        some = "some of " if self.some else ""
        text = f"{self.operator} on {self.where} {does} {some}{self.begin:#x} to {self.end:#x}"
        if self.stack is None:
            return f"{text} (no Python stack)"
        if self.node is not None:
            return self._backward_text(text)
        if not self.stack:
            return f"{text} (no Python frames: a thread of C++)"
        return _stack_text(f"{text}, called from", self.stack)

    def _backward_text(self, text):
        parts = [f"{text}, in a backward pass as {self.node}"]
        if self.forward:
            parts.append(_stack_text("  of the forward's operator called from", self.forward))
        if self.stack:
            parts.append(_stack_text("  in the backward pass called from", self.stack))
        return "\n".join(parts)


class Help(NamedTuple):
    """A line to paste, and its place in the program."""

    where: str
    """``"before"``, ``"after"`` or ``"in place of"`` the line."""
    filename: str
    line: int
    code: str
    """The line or lines to paste."""

    def __str__(self):
        return f"{self.where} {self.filename}:{self.line} add {self.code}"


class Report(NamedTuple):
    """A conflict: two accesses that nothing orders, or a read of uninitialized memory."""

    number: int
    earlier: Access
    """For a read of memory that nothing has written, the allocation."""
    later: Access
    begin: int
    end: int
    """What both touch, from the first byte to behind the last."""
    memory: str
    """Whose memory it is."""
    advice: str
    """The call that would have ordered them."""
    order: _pictures.Order = _pictures.Order()
    """The waits that there were, for pictures."""
    process: str = ""
    """The process, such as ``"process 4711 (train.py)"``, where it is another one."""

    @property
    def title(self):
        """The first line of the text, without "error: "."""
        return self.details().splitlines()[0].rstrip(":")

    @property
    def place(self):
        """(filename, line) of the line to change; None without a stack."""
        side = self.earlier if "record_stream" in self.advice else self.later
        return side.line and tuple(side.line[:2])

    @property
    def help(self):
        """Lines to paste, each of which mends the program: a tuple of Help, the cheapest first."""
        if self.place is None:
            return ()
        where = "after" if "record_stream" in self.advice else "before"
        return (Help(where, *self.place, self.advice),)

    @property
    def mistake(self):
        """Equal for reports of the same missing line, in loops, tests and processes."""
        lines = (side.line and tuple(side.line[:2]) for side in (self.earlier, self.later))
        return self.kind, *lines

    def summary(self):
        """One line: the places of both accesses, and what is missing."""
        places = (f"{s.line.filename}:{s.line.line}" for s in (self.later, self.earlier) if s.line)
        return f"{' and '.join(places)}: {'; or '.join(map(str, self.help)) or self.advice}"

    @property
    def kind(self):
        """``"race"``, ``"possible race"`` (one access is partial, and may not touch the other's
        bytes) or ``"uninitialized"`` (the bytes read have not been written)."""
        if self.earlier.operator == "allocation":
            return "uninitialized"
        return "possible race" if self.earlier.some or self.later.some else "race"

    @property
    def _identity(self):
        """What is equal in two runs of the same program."""
        sides = (self.earlier, self.later)
        return self.memory, [(s.operator, s.device, s.is_default, s.write) for s in sides]

    def __str__(self):
        return self.details()

    def details(self):
        """Every fact: addresses, handles, operators and both stacks."""
        where = f"{self.memory}, {self.begin:#x} to {self.end:#x}"
        if self.process:
            where += f" in {self.process}"
        if self.kind == "uninitialized":
            return (
                f"read {self.number} of memory that nothing has written, on {where}:\n"
                f"  {self.later}\n"
                f"and some of these bytes have not been written since they were handed out:\n"
                f"  {self.earlier}\n"
                f"Missing: {self.advice}"
            )
        title, meets = "data race", "nothing orders it with the earlier access"
        if self.kind == "possible race":
            title = "possible data race"
            meets += ", with which it may share bytes"
        return (
            f"{title} {self.number} on {where}:\n"
            f"  {self.later}\n"
            f"and {meets}:\n"
            f"  {self.earlier}\n"
            f"Missing: {self.advice}"
        )

    def picture(self):
        """The race as text: a row for each stream and for the host, time to the right, the two
        accesses, the existing waits, and below them the missing one."""
        return _pictures.text(self)

    def save(self, path):
        """Writes the report as a page for a browser, or its picture.

        Args:
            path: the file. ``.html`` is a page with picture, source and help, which needs no other
                file; ``.svg`` is the picture as a drawing, and ``.txt`` as the text of picture().
                Another ending raises ValueError.
        """
        if os.fspath(path).endswith(".html"):
            from . import _page  # jinja2 takes a while

            _page.save_reports(path, [self])
        else:
            _pictures.save(self, path)


# ---- from the core's data ----

_backwards = {}  # a backward pass, by the engine's number: the frames of its caller
_KEPT_BACKWARDS = 1000


def keep_backward(task, frames):
    """The frames of ``backward()``."""
    _backwards[task] = frames
    if len(_backwards) > _KEPT_BACKWARDS:
        del _backwards[next(iter(_backwards))]


def _frames(stack):
    if stack is None:
        return None
    frames = (Frame(f["filename"], f["line"], f["name"]) for f in stack)
    # The frames behind these run the program, or are explore() calling the function.
    return tuple(itertools.takewhile(lambda frame: frame.filename not in _RUNNERS, frames))


def _name_of(given):
    """The text for a stream that the core has named: its given name, or the line that made it."""
    where = given["where"]
    if given["name"]:
        return re.sub(r"^stream 0x[0-9a-f]+", f'stream "{given["name"]}"', where)
    made = user_frame(_frames(given["made"]))
    if made is None or not where.startswith("stream "):
        return where
    return f"{where} (made at {made.filename}:{made.line})"


def stream_label(stream):
    """The name of a stream by its handle; 0 is the host."""
    return _name_of(_C._stream_origin(stream)) if stream else "the host"


def _access(given):
    stack = _frames(given["stack"])
    if not stack and given["node"]:
        stack = _backwards.get(given["task"], ())
    host = given["device"] < 0
    return Access(
        operator=given["operation"],
        where=_name_of(given),
        stream=None if host else given["stream"],
        device=None if host else given["device"],
        is_default=given["is_default"],
        write=given["write"],
        begin=given["begin"],
        end=given["end"],
        stack=stack,
        some=given["some"],
        node=given["node"] or None,
        forward=_frames(given["forward"]),
    )


def make_report(given):
    """Makes a Report from the core's data."""
    sides = {side: _access(given[side]) for side in ("earlier", "later")}
    advice = given["advice"]
    for side in ("earlier", "later"):
        if given[side]["name"]:
            advice = advice.replace(given[side]["where"], sides[side].where)
    earlier, later, edges = given["order"]
    edges = tuple(_pictures.Edge(*edge) for edge in edges)
    streams = {stream for edge in edges for stream in (edge.source, edge.target)}
    names = tuple((stream, stream_label(stream)) for stream in sorted(streams))
    order = _pictures.Order(earlier, later, edges, names)
    return Report(**{**given, **sides, "advice": advice, "order": order})
