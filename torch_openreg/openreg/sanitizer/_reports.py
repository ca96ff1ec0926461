"""The sanitizer's findings for people: Report, and its text."""

import os
import re
from typing import NamedTuple

from .. import _messages
from .._utils import OWN_NAME
from . import _graph_reports, _grid_reports, _pictures
from ._advice import Help, Missing, notes, words
from ._frames import Frame, own_frames, stack_text, user_frame

_SHOWN_CALLERS = 3
_CORES = re.compile(r"or[A-Z]")  # functions of csrc/openreg


def _plain_operator(operator):
    """``add_`` for ``aten::add_.Tensor``, ``copy`` for ``orMemcpyAsync``; "" for what is no
    operator."""
    if _CORES.match(operator):
        return "copy" if "Memcpy" in operator else "fill" if "Memset" in operator else ""
    name = operator.removeprefix("aten::").partition(".")[0]
    other = ("allocation", "free", "memory access", "read")
    return "" if name in other or name.startswith(("_", "resolve_")) else name


def stream_words(device, is_default, name, made):
    """A stream in the program's words; "" if it has none there."""
    other = f" of {OWN_NAME}:{device}" if device else ""
    if is_default:
        return f"the default stream{other}"
    if name:
        return f"stream {name}{other}"
    return f"a stream{other} made at {_messages.place(*made[:2])}" if made else ""


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
    name: str | None = None
    """The stream's own name, or that of the variable or attribute that holds it."""
    made: Frame | None = None
    """The line that made the stream; None for a default stream and the host."""
    is_python: bool = False
    """Whether `stack` is of a function in Python that the backward pass calls."""

    @property
    def line(self):
        """The innermost Frame outside PyTorch, pytest and Python; for a node of autograd without
        Python frames that of the forward pass. None without a stack."""
        return user_frame(self._frames)

    @property
    def call(self):
        """The same, and for a node of autograd that of ``backward()``."""
        return user_frame(self.stack or self.forward)

    @property
    def _frames(self):
        return self.stack if self.is_python else self.forward or self.stack

    @property
    def does(self):
        """What it does, as ``"writes"``, ``"reads"``, ``"allocates"``, ``"frees"``."""
        if self.operator == "allocation":
            return "allocates"
        if self.operator == "free":
            return "frees"
        return "writes" if self.write else "reads"

    @property
    def who(self):
        """The stream or host in the program's words."""
        if self.device is None:
            return "the host"
        known = stream_words(self.device, self.is_default, self.name, self.made)
        if known:
            return known
        if "::" not in self.operator and not _CORES.match(self.operator):  # of torch.distributed
            return f"the collective {self.operator}"
        return "a stream of other code"

    def _says(self, memory):
        if self.operator == "free":
            return f"frees {memory}"
        who = self.who
        if self.name and self.made and not self.name.startswith('"'):
            who += f", made at {_messages.place(*self.made[:2])},"
        some = "some of " if self.some else ""
        how = "" if self.operator in who else _plain_operator(self.operator)
        if self.node:
            how = f"in the backward pass, {self.node}"
            if self.is_python and self.forward:
                how = f"{how}, of {_messages.place(*user_frame(self.forward)[:2])}"
            elif self.forward:
                ran = f", run by {_messages.place(*self.call[:2])}" if self.stack else ""
                how = f"in the backward pass of this line, {self.node}{ran}"
        how = f" ({how})" if how else ""
        return f"{who} {self.does} {some}{memory}{how}"

    def _callers(self):
        """The user's frames below that of its line."""
        return own_frames(self._frames)[1:]

    def _place(self, memory, other):
        """For a message, with the callers that the other access does not have."""
        frames, others = self._callers(), other._callers()
        while frames and others and frames[-1][:3] == others[-1][:3]:
            frames.pop()
            others.pop()
        places = list(dict.fromkeys(_messages.place(*frame[:2]) for frame in frames))
        more = len(places) - _SHOWN_CALLERS
        more, places = f" and {more} more" if more > 0 else "", places[:_SHOWN_CALLERS]
        how = "in the forward pass, called" if self.forward and not self.is_python else "called"
        calls = [f"{how} from {', '.join(places)}{more}"] if places else []
        return _messages.Place(self.line, self._says(memory), *calls)

    def __str__(self):
        does = "writes" if self.write else "reads"
        if self.operator in ("allocation", "free"):
            does = "handed out" if self.operator == "allocation" else "frees"
        some = "some of " if self.some else ""
        text = f"{self.operator} on {self.where} {does} {some}{self.begin:#x} to {self.end:#x}"
        if self.stack is None:
            return f"{text} (no Python stack)"
        if self.node is not None:
            return self._backward_text(text)
        if not self.stack:
            return f"{text} (no Python frames: a thread of C++)"
        return stack_text(f"{text}, called from", self.stack)

    def _backward_text(self, text):
        parts = [f"{text}, in a backward pass as {self.node}"]
        if self.forward:
            parts.append(stack_text("  of the forward's operator called from", self.forward))
        if self.stack:
            parts.append(stack_text("  in the backward pass called from", self.stack))
        return "\n".join(parts)


class Memory(NamedTuple):
    """The memory that both accesses touch."""

    name: str | None = None
    """The variable or attribute that holds it; None where the program has none."""
    dtype: str | None = None
    size: int = 0
    """Bytes."""
    made: Frame | None = None
    """The line of its first use, which allocated it; None where that is not known."""

    @property
    def title(self):
        """``" over x, 4000 bytes of float32"``"""
        size = f"{self.size} byte{'s' * (self.size != 1)}{f' of {self.dtype}' * bool(self.dtype)}"
        return f" over {self.name}, {size}" if self.name else f" over {size}"


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
    graph: str = ""
    """What is wrong with a graph's memory, of which `earlier` is the use in the capture; ``""``: it
    is about no graph."""
    missing: Missing = Missing()
    """What would have ordered the two."""
    subject: Memory = Memory()
    """The memory, as the program names it."""
    helps: tuple[tuple[Help, ...], ...] = ()
    """The lines of each way to mend the program, the cheapest way first."""
    mistake: tuple = ()
    """Equal for reports of the same missing line, in loops, tests and processes."""
    programs: tuple[tuple[Frame, str], ...] = ()
    """The lines of the kernel and what two programs do there, in a race between the programs of a
    launch."""

    @property
    def title(self):
        """The first line of the text, behind the word "error"."""
        if self.graph:
            return f"{_graph_reports.title(self)} on {self._where}{self.subject.title}"
        if self.kind == "uninitialized":
            return f"read of memory that nothing has written, on {self._where}{self.subject.title}"
        possible = "possible " * (self.kind == "possible race")
        return f"{possible}data race on {self._where}{self.subject.title}"

    @property
    def _where(self):
        return self.memory.partition(",")[0]

    @property
    def place(self):
        """(filename, line) of the line to change; None without a stack."""
        if self.help:
            return self.help[0][1:3]
        if self.programs:
            return self.programs[1][0][:2]
        return self.later.call and self.later.call[:2]

    @property
    def help(self):
        """A tuple of Help, the lines to paste that mend the program; empty where no line has the
        names for them."""
        return self.helps[0] if self.helps else ()

    @property
    def remedy(self):
        """The lines to paste in one line, or what is missing in words."""
        return "; ".join(map(str, self.help)) or words(self) or self.advice

    def summary(self):
        """One line: the places of both accesses, and the lines to paste."""
        lines = (side.line for side in (self.earlier, self.later))
        lines = (frame for frame, _ in self.programs) if self.programs else lines
        places = " and ".join(_messages.place(*line[:2]) for line in lines if line)
        return f"{places}: {self.remedy}"

    @property
    def kind(self):
        """``"race"``, ``"possible race"`` (one access is partial, and may not touch the other's
        bytes) or ``"uninitialized"`` (the bytes read have not been written); of a graph
        ``"freed input"``, ``"not replayed"``, ``"overwritten output"``, ``"possible replaced
        input"`` or ``"possible first call"``."""
        if self.graph:
            return self.graph
        if self.earlier.operator == "allocation":
            return "uninitialized"
        partial = self.earlier.some or self.later.some
        return "possible race" if partial or self.later.operator == "free" else "race"

    @property
    def _identity(self):
        """What is equal in two runs of the same program."""
        sides = (self.earlier, self.later)
        return self.memory, [(s.operator, s.device, s.is_default, s.write) for s in sides]

    def text(self, colour=False, kind="error"):
        """The report for people.

        Args:
            colour: whether it has a terminal's codes for colours.
            kind: the word before the title; ``""``: none.
        """
        memory = self.subject.name or "this memory"
        reused = "the same memory, used again" if "reused" in self.memory else memory
        if self.programs:
            places = _grid_reports.places(self)
        else:
            places = [
                self.earlier._place(memory, self.later),
                self.later._place(reused, self.earlier),
            ]
        return _messages.message(
            f"{self.title}{f' in {self.process}' if self.process else ''}",
            places,
            _graph_reports.notes(self) if self.graph else notes(self),
            self.helps,
            kind=kind,
            colour=colour,
        )

    def __str__(self):
        return self.text()

    def details(self):
        """Every fact: addresses, handles, operators and both stacks."""
        where = f"{self.memory}, {self.begin:#x} to {self.end:#x}"
        if self.process:
            where += f" in {self.process}"
        if self.graph:
            return _graph_reports.details(self, where)
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
