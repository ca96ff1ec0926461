"""Reports, made from the core's data and the program's names."""

import itertools
import re

import torch

from ... import _C
from . import _graph_reports, _grid_reports, _names, _pictures
from ._advice import Missing, Origin, advise
from ._frames import frames_of, is_users, own_frames, user_frame
from ._reports import Access, Memory, Report, stream_words


def _name_of(given):
    """The text for a stream that the core has named: its given name, or the line that made it."""
    where = given["where"]
    if given["name"]:
        return re.sub(r"^stream 0x[0-9a-f]+", f'stream "{given["name"]}"', where)
    made = user_frame(frames_of(given["made"]))
    if made is None or not where.startswith("stream "):
        return where
    return f"{where} (made at {made.filename}:{made.line})"


class Live:
    """What the variables of the frames that are alive hold."""

    def __init__(self, is_alive):
        self.frames, self._streams = [], {}
        if is_alive:
            self.frames = _names.live_frames()

    def stream(self, handle):
        if handle not in self._streams:
            self._streams[handle] = _names.stream_variable(self.frames, handle)
        return self._streams[handle]

    def stream_at(self, handle, frame):
        """The name at a line of a variable that holds a stream; None: none has one there."""
        variable = self.stream(handle)
        if variable and variable.is_in(frame):
            return variable.name
        return _names.global_stream(self.frames, handle, frame)

    def tensor(self, address):
        return _names.tensor_variable(self.frames, address)

    def current(self, device):
        """The handle of the thread's current stream; None where no frame is alive."""
        if not self.frames:
            return None
        current = torch.accelerator.current_stream(device)
        return _C._stream_handle((current.stream_id, current.device_index))


def _made_stream(given):
    """What a stream was assigned to by the program, and that line's frame; (None, None) if it was
    not. Its constructor has names of its own."""
    frames = frames_of(given["made"]) or ()
    return _names.made_name(itertools.dropwhile(lambda f: not is_users(f.filename), frames))


def stream_name(given, live):
    """Its own name; that of a variable that holds it; or that of what it was assigned to."""
    if given["name"]:
        return f'"{given["name"]}"'
    variable = live.stream(given["stream"])
    return variable.name if variable else _made_stream(given)[0]


def _is_engine(frame):
    """Whether it runs a backward pass, so that the frames behind it are those of ``backward()``."""
    return frame.name == "_engine_run_backward"


def _access(given, live):
    stack = frames_of(given["stack"])
    is_python = bool(given["node"] and own_frames(stack)) and not any(map(_is_engine, stack))
    if given["node"] and not own_frames(stack):  # a thread without Python has no stack of its own
        stack = (stack or ()) + (frames_of(given["caller"]) or ())
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
        forward=frames_of(given["forward"], given["hook"]),
        name=stream_name(given, live) if named else None,
        made=user_frame(frames_of(given["made"])) if named else None,
        is_python=is_python,
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
        if name is None and side.line and side.node is None and side.operator != "replay":
            find = _names.written_name if side.write else _names.read_name
            name = find(side.line)
    if name is None and freed and earlier.node == "AccumulateGrad":
        name = _names.cleared_grad(earlier.line)
    return name, None


def _memory(given, sides, live):
    earlier, later = sides["earlier"], sides["later"]
    made = frames_of(given["allocation"])
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


_GRID = "race of a grid"
# (report, whether its frames were alive), by number and the moments of its accesses.
_made = {}
_KEPT_REPORTS = 2000


def _is_made_here(later):
    """Whether the line that runs makes an access of an operator. What tasks decide is raised by
    another line, where the variables may hold other objects."""
    at, frame = user_frame(frames_of(later["stack"])), next(iter(_names.live_frames()), None)
    if later["device"] < 0 or later["node"] or at is None or frame is None:
        return True
    return at[:2] == (frame.f_code.co_filename, frame.f_lineno)


def make_report(given, is_alive=False):
    """Makes a Report from the core's data. `is_alive`: for the call that is told of it."""
    is_alive = is_alive and _is_made_here(given["later"])
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
    name = stream_name({**given, "stream": stream}, live)
    made = user_frame(frames_of(given["made"]))
    of = _origin(stream)
    return stream_words(of.device, of.is_default, name, made) or "a stream of other code"


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
    if given["graph"] == "overwritten output":  # by the replay of the later call
        sides["earlier"] = sides["earlier"]._replace(write=True)
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
        programs=_grid_reports.noted(given["begin"]) if given["graph"] == _GRID else (),
    )
    try:
        helps = _graph_reports.advise(report) if report.graph else advise(report, live, _origin)
    except Exception:  # advice reads the program's source and objects; the report must not be lost
        helps = ()
    report = report._replace(helps=helps)
    return report._replace(mistake=_mistake(report))


def _origin(stream):
    """The Origin of a stream by its handle."""
    given = _C._stream_origin(stream)
    default = given["where"].startswith("the default stream")
    return Origin(*_made_stream(given), default, int(given["where"].rpartition(":")[2]))


# Of each pair of streams, the moment of the later access of the last mistake's first report, and
# that mistake: a wait there would have ordered all that comes before it.
_leaders = {}


def _mistake(report):
    thread = own_frames(report.later.stack)[-1:] if report.missing.kind == "host wait" else ()
    pair = report.missing, report.earlier.stream, report.later.stream, *(f[::2] for f in thread)
    moment, mistake = _leaders.get(pair, (0, None))
    if report.missing.is_wait and mistake and report.order.earlier <= moment <= report.order.later:
        return mistake
    lines = tuple((h.where, h.filename, h.line, h.code) for h in report.help)
    if not lines:
        lines = tuple(side.line and side.line[:2] for side in (report.earlier, report.later))
    mistake = (report.missing.kind, *lines)
    if report.order.later:
        if len(_leaders) >= _KEPT_REPORTS:
            _leaders.clear()
        _leaders[pair] = report.order.later, mistake
    return mistake
