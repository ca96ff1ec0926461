"""The sanitizer's findings for people: Report, and its text."""

import functools
import itertools
import os
import re
import sysconfig
from typing import NamedTuple

import torch

from ... import _C
from .. import _messages
from . import _graph_reports, _names, _pictures
from ._advice import Help, Missing, advise, notes

_SHOWN_FRAMES = 10
_SHOWN_CALLERS = 3
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_RUNNERS = ("<frozen runpy>", os.path.join(_OURS, "openreg", "testing", "_schedules.py"))
_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]([^/\\.]+)")
_COMPILED = re.compile(r".*[/\\](\w\w)[/\\]c\1\w{40,}\.py")  # in the folders of Inductor
# Installed packages whose frames are counted; those of others are as the user's. NumPy's are here
# because it reads memory by Python functions of its own.
_FOLDED = {
    *("_pytest", "pytest", "pluggy", "xdist", "execnet", "pytest_openreg"),
    *("functorch", "torchgen", "numpy"),
}


class Frame(NamedTuple):
    """A line of a stack."""

    filename: str
    line: int
    name: str
    columns: tuple[int, int, int] | None = None
    """The last line of the expression that runs, its first byte in `line`, and the end of its last
    byte there. None where Python does not have them, as in 3.10."""

    @classmethod
    def of(cls, frame, line):
        """From Python's."""
        code = frame.f_code
        return cls(code.co_filename, line, code.co_name, _columns(code, frame.f_lasti))

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
        (os.path.join(os.path.dirname(_OURS), "pytest_openreg.py"), "pytest"),
    )


@functools.lru_cache(maxsize=4096)
def _package(filename):
    """The file's owner; None: the user."""
    for folder, name in _folders():
        if filename.startswith(folder):
            return name
    if _COMPILED.match(filename):
        return "torch"
    installed = _INSTALLED.match(filename)
    if installed:
        return installed[1] if installed[1] in _FOLDED else None
    standard = filename.startswith((sysconfig.get_paths()["stdlib"], "<frozen "))
    return "Python" if standard else None


def is_users(filename):
    """Whether the file is the user's own."""
    return _package(filename) is None


def own_frames(frames):
    """The frames of the user's own code, the innermost first.

    Without the lines that PyTorch puts behind compiled code: they are those of whichever program
    compiled the same code first.
    """
    frames = list(frames or ())
    compiled = [i for i, frame in enumerate(frames) if _COMPILED.match(frame.filename)]
    if compiled:
        outside = frames[compiled[-1] + 1 :]
        frames = list(itertools.dropwhile(lambda frame: is_users(frame.filename), outside))
    return [frame for frame in frames if is_users(frame.filename)]


def user_frame(frames):
    """The innermost frame of the user's own code, or else the innermost; None without frames."""
    return next(iter((*own_frames(frames), *(frames or ()))), None)


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


def _plain_operator(operator):
    """``add_`` for ``aten::add_.Tensor``; "" for what is no operator."""
    name = operator.removeprefix("aten::").partition(".")[0]
    other = ("allocation", "free", "memory access")
    return "" if name in other or name.startswith(("_", "resolve_")) else name


def stream_words(device, is_default, name, made):
    """A stream in the program's words; "" if it has none there."""
    other = f" of openreg:{device}" if device else ""
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

    @property
    def line(self):
        """The innermost Frame outside PyTorch, pytest and Python; for a node of autograd that of
        the forward pass. None without a stack."""
        return user_frame(self.forward or self.stack)

    @property
    def call(self):
        """The same, and for a node of autograd that of ``backward()``."""
        return user_frame(self.stack or self.forward)

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
        if "::" not in self.operator and not self.operator.startswith("or"):  # of torch.distributed
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
            if self.call and self.forward:
                how = f"{how}, from {_messages.place(*self.call[:2])}"
        how = f" ({how})" if how else ""
        return f"{who} {self.does} {some}{memory}{how}"

    def _callers(self):
        """The user's frames below that of its line."""
        return own_frames(self.forward or self.stack)[1:]

    def _place(self, memory, other):
        """For a message, with the callers that the other access does not have."""
        frames, others = self._callers(), other._callers()
        while frames and others and frames[-1][:3] == others[-1][:3]:
            frames.pop()
            others.pop()
        places = list(dict.fromkeys(_messages.place(*frame[:2]) for frame in frames))
        more = len(places) - _SHOWN_CALLERS
        more, places = f" and {more} more" if more > 0 else "", places[:_SHOWN_CALLERS]
        calls = [f"called from {', '.join(places)}{more}"] if places else []
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
        return _stack_text(f"{text}, called from", self.stack)

    def _backward_text(self, text):
        parts = [f"{text}, in a backward pass as {self.node}"]
        if self.forward:
            parts.append(_stack_text("  of the forward's operator called from", self.forward))
        if self.stack:
            parts.append(_stack_text("  in the backward pass called from", self.stack))
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

    @property
    def title(self):
        """The first line of the text, behind the word "error"."""
        if self.graph:
            return f"{_graph_reports.TITLES[self.graph]} on {self._where}{self.subject.title}"
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
        return self.later.call and self.later.call[:2]

    @property
    def help(self):
        """A tuple of Help, the lines to paste that mend the program."""
        return self.helps[0] if self.helps else ()

    def summary(self):
        """One line: the places of both accesses, and the lines to paste."""
        lines = (side.line for side in (self.earlier, self.later))
        places = " and ".join(_messages.place(*line[:2]) for line in lines if line)
        return f"{places}: {'; '.join(map(str, self.help)) or self.advice}"

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
        return _messages.message(
            f"{self.title}{f' in {self.process}' if self.process else ''}",
            [
                self.earlier._place(memory, self.later),
                self.later._place(reused, self.earlier),
            ],
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


# ---- from the core's data ----

_backwards = {}  # a backward pass, by the engine's number: the frames of its caller
_KEPT_BACKWARDS = 1000


def keep_backward(task, frames):
    """The frames of ``backward()``."""
    _backwards[task] = frames
    if len(_backwards) > _KEPT_BACKWARDS:
        del _backwards[next(iter(_backwards))]


def _columns(code, instruction):
    """As in Frame."""
    if code is None or not hasattr(code, "co_positions"):
        return None
    line, *rest = next(itertools.islice(code.co_positions(), instruction // 2, None), (None,))
    return None if line is None or None in rest else tuple(rest)


def _frames(stack, hook=0):
    """`hook` is the address of the code of a hook that the innermost frames may belong to."""
    if stack is None:
        return None
    inside = [i for i, f in enumerate(stack) if hook and id(f.get("code")) == hook]
    frames = (
        Frame(f["filename"], f["line"], f["name"], _columns(f.get("code"), f.get("instruction")))
        for f in stack[inside[-1] + 1 if inside else 0 :]
    )
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


class Live:
    """What the variables of the frames that are alive hold."""

    def __init__(self, is_alive):
        self.frames, self._streams = [], {}
        if is_alive:
            self.frames = _names.live_frames(lambda filename: _package(filename) is not None)

    def stream(self, handle):
        if handle not in self._streams:
            self._streams[handle] = _names.stream_variable(self.frames, handle)
        return self._streams[handle]

    def tensor(self, address):
        return _names.tensor_variable(self.frames, address)

    def current(self, device):
        """The handle of the thread's current stream; None where no frame is alive."""
        if not self.frames:
            return None
        current = torch.accelerator.current_stream(device)
        return _C._stream_handle((current.stream_id, current.device_index))


def _made_stream(given):
    """What a stream was assigned to by the program; its constructor has names of its own."""
    frames = _frames(given["made"]) or ()
    return _names.made_name(itertools.dropwhile(lambda f: not is_users(f.filename), frames))[0]


def _stream_name(given, live):
    """Its own name; that of a variable that holds it; or that of what it was assigned to."""
    if given["name"]:
        return f'"{given["name"]}"'
    variable = live.stream(given["stream"])
    return variable.name if variable else _made_stream(given)


def _access(given, live):
    stack = _frames(given["stack"])
    if not stack and given["node"]:
        stack = _backwards.get(given["task"], ())
    host = given["device"] < 0
    named = not host and not given["is_default"]
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
        forward=_frames(given["forward"], given["hook"]),
        name=_stream_name(given, live) if named else None,
        made=user_frame(_frames(given["made"])) if named else None,
    )


def _memory_name(earlier, later, made, freed, live):
    """(name, tensor), from the surest source on."""
    if not freed:
        variable, tensor = live.tensor(max(earlier.begin, later.begin))
        if variable:
            return variable.name, tensor
    name, _ = _names.made_name(made)
    if name is None and made and user_frame(made):
        name = _names.written_name(user_frame(made))
    for side in (earlier,) if freed else (later, earlier):
        if name is None and side.line and side.node is None:
            find = _names.written_name if side.write else _names.read_name
            name = find(side.line)
    return name, None


def _memory(given, sides, live):
    earlier, later = sides["earlier"], sides["later"]
    made = _frames(given["allocation"])
    freed = "reused" in given["memory"] or "freed" in given["memory"]
    name, tensor = _memory_name(earlier, later, made, freed, live)
    if given["name"]:  # the variable that held a graph's input when the capture ended
        name, tensor = given["name"], None
    size = given["end"] - given["begin"]
    if size == 1 and later.device is None:  # the host's, of which the first byte is known
        size = earlier.end - earlier.begin
    dtype = None if freed else given["dtype"] or None
    if tensor is not None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        size = max(size, tensor.numel() * tensor.element_size()) if later.device is None else size
    return Memory(name, dtype, size, user_frame(made))


# (report, whether its frames were alive), by number and the moments of its accesses.
_made = {}
_KEPT_REPORTS = 2000


def make_report(given, is_alive=False):
    """Makes a Report from the core's data. `is_alive`: in the call that makes the later access."""
    key = given["number"], *given["order"][:2]
    known, was_alive = _made.get(key, (None, False))
    if known is not None and not is_alive:
        return known
    report = _new_report(given, Live(is_alive))
    # A conflict that is raised again keeps its first report. One that is not kept has no moments,
    # and its number comes again.
    if not was_alive and key[1:] != (0, 0):
        _made[key] = report, is_alive
    if len(_made) > _KEPT_REPORTS:
        del _made[next(iter(_made))]
    return report


def _wait_name(stream, live):
    """The name of a stream that waits, or that is waited for, by its handle; 0 is the host."""
    if not stream:
        return "the host"
    given = _C._stream_origin(stream)
    _, is_default, device = _origin(stream)
    name = _stream_name({**given, "stream": stream}, live)
    made = user_frame(_frames(given["made"]))
    return stream_words(device, is_default, name, made) or "a stream of other code"


def _new_report(given, live):
    sides = {side: _access(given[side], live) for side in ("earlier", "later")}
    advice = given["advice"]
    for side in ("earlier", "later"):
        if given[side]["name"]:
            advice = advice.replace(given[side]["where"], sides[side].where)
    earlier, later, edges = given["order"]
    edges = tuple(_pictures.Edge(*edge) for edge in edges)
    streams = {stream for edge in edges for stream in (edge.source, edge.target)}
    names = tuple((stream, _wait_name(stream, live)) for stream in sorted(streams))
    report = Report(
        number=given["number"],
        **sides,
        begin=given["begin"],
        end=given["end"],
        memory=given["memory"],
        advice=advice,
        order=_pictures.Order(earlier, later, edges, names),
        graph=given["graph"],
        missing=Missing.of(given["missing"], given["wanted"]),
        subject=_memory(given, sides, live),
    )
    helps = _graph_reports.advise(report) if report.graph else advise(report, live, _origin)
    report = report._replace(helps=helps)
    return report._replace(mistake=_mistake(report))


def _origin(stream):
    """(name or None, whether it is a default stream, device) of a stream by its handle."""
    given = _C._stream_origin(stream)
    name = _made_stream(given)
    default = given["where"].startswith("the default stream")
    return name, default, int(given["where"].rpartition(":")[2])


# Of each pair of streams, the moment of the later access of the last mistake's first report, and
# that mistake: a wait there would have ordered all that comes before it.
_leaders = {}


def _mistake(report):
    pair = report.missing, report.earlier.stream, report.later.stream
    moment, mistake = _leaders.get(pair, (0, None))
    if report.missing.is_wait and mistake and report.order.earlier <= moment <= report.order.later:
        return mistake
    lines = tuple((h.where, h.filename, h.line, h.code) for h in report.help)
    if not lines:
        lines = tuple(side.line and side.line[:2] for side in (report.earlier, report.later))
    mistake = (report.missing.kind, *lines)
    if report.order.later:
        _leaders[pair] = report.order.later, mistake
    return mistake
