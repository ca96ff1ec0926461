"""Texts of what C and C++ report, with the program's names and lines: errors and hang reports.

C++ passes facts, or the core's text, in which a stream or an event has its handle.
"""

import itertools
import os
import re
import sys
import threading

from .. import _C
from . import _messages
from ._utils import type_name
from .sanitizer import _findings, _frames, _names
from .sanitizer._mistakes import short_operator

_STREAM = re.compile(r"\bstream (0x[0-9a-f]+)")
_INJECTED = re.compile(r"\b\w+:(\d+) .*injected fault \"(\w+)\"")
_FRAMES = 20  # of a thread, whose variables are searched
# What Python prints in front of an error, by the core's name for it; of others it is RuntimeError.
_TYPES = {
    "orErrorMemoryAllocation": "torch.OutOfMemoryError",
    "orErrorDeviceLost": "torch.AcceleratorError",
    "orErrorNotSupported": "NotImplementedError",
}
gates = {}  # events of gates: the Frame that made each


def caller():
    """The innermost line of the user's own code on this thread, as a Frame; None: there is none."""
    frame = next(_frames.walk_own(sys._getframe()), None)
    return frame and _frames.Frame.of(frame)


class _Streams:
    """The program's words for streams, by their handles in the core's text."""

    def __init__(self, frames):
        self._live = _findings.Live(is_alive=False)
        self._live.frames = frames
        self._known = {}

    def _find(self, handle):
        given = {**_C._stream_origin(handle), "stream": handle}
        made = _frames.user_frame(_frames.frames_of(given["made"]))
        name = _findings.stream_name(given, self._live)
        if name:
            return f"stream {name}", made
        at = f" made at {_messages.place(*made[:2])}" if made else ""
        return f"the stream{at}" if at else "a stream of other code", None

    def words(self, handle):
        """(words, the Frame that made it). Two streams never have the same words."""
        if handle not in self._known:
            words, made = self._find(handle)
            same = sum(other.partition(" (")[0] == words for other, _ in self._known.values())
            self._known[handle] = f"{words} ({same + 1})" if same else words, made
        return self._known[handle]

    def put_into(self, text):
        return _STREAM.sub(lambda match: self.words(int(match[1], 16))[0], text)


# ---- errors ----


def _at_its_own_call():
    """The line of help for an error of a kernel."""
    name = "CUDA_LAUNCH_BLOCKING" if type_name() == "cuda" else "OPENREG_LAUNCH_BLOCKING"
    return f"help: with {name}=1 in the environment each error is raised by its own call"


def error(text):
    """The text of an error of the core, without handles, and in lines that are not too long."""
    text = re.sub(r"\baten::(\w+)(\.\w+)?", r"\1", text)
    text = re.sub(r"; orDeviceReset \((\S+)\) brings it back", r"\n  help: \1 brings it back", text)
    if "stream 0x" in text:
        text = _Streams(_names.live_frames()).put_into(text)
    call = _injected_call(text)
    if text.startswith("orErrorLaunchFailure: ") and not call:
        text += f"\n  {_at_its_own_call()}"
    kind = _TYPES.get(text.partition(":")[0], "RuntimeError")
    return "\n".join([_messages.sentence(text, len(f"{kind}: ")), *call])


def _injected_call(text):
    """The lines that show the call that a fault was injected into, as far as it is known."""
    found = _INJECTED.search(text)
    if not found:
        return []
    stack = _C._fault_call(_C._fault_kinds().index(found[2]), int(found[1]))
    at = _frames.user_frame(_frames.frames_of(stack))
    return list(_messages.Place(at, "the fault was injected here").lines()) if at else []


def failed_kernel(kernel, device, others, stack, words):
    """The lines that follow on the text of a kernel's own error, which was queued at `stack`. CUDA
    programs look for `words`."""
    kernel = short_operator(kernel)
    more = f" (and {others} more failed after it)" if others else ""
    at = _frames.user_frame(_frames.frames_of(stack))
    if at is None:
        raised = f"raised by {kernel} on {device}, queued earlier{more}"
        text = [*_messages.wrap(raised), f"  {_at_its_own_call()}"]
    else:
        raised = f"raised by {kernel} on {device}, which was queued here{more}"
        text = list(_messages.Place(at, raised).lines())
    if words and type_name() == "cuda":
        text.append(f"  a card raises: CUDA error: {words}")
    return [line[2:] for line in text]  # PyTorch indents them


# ---- out of memory ----

_MOST = 5  # lines that are shown


def _blocks(device):
    """The blocks in use, each with the stack of its allocation, if that was recorded."""
    for segment in _C._memory_snapshot(True)["segments"]:
        if segment["device"] == device:
            for block in segment["blocks"]:
                if block["state"].startswith("active"):
                    yield block


def _line_of(block):
    frames = (_frames.Frame(f["filename"], f["line"], f["name"]) for f in block["frames"])
    own = _frames.own_frames(f for f in frames if f.filename.endswith((".py", ">")))  # not C++'s
    if own:
        return own[0]
    origin = _C._memory_origin(block["address"])  # kept while the sanitizer is on
    return origin and _frames.Frame(*origin, "")


def _many(count, size):
    blocks = f"{count} block{'s' * (count != 1)}"
    return f"{_messages.size(size)} in {blocks}"


def _by_line(blocks):
    """[(the Frame that allocated or None, count, bytes)], the most bytes first."""
    groups = {}
    for block in blocks:
        at = _line_of(block)
        count, size = groups.get(at, (0, 0))
        groups[at] = count + 1, size + block["size"]
    return sorted(((at, *sums) for at, sums in groups.items()), key=lambda group: -group[2])


def _by_name(blocks):
    """Lines for the largest blocks that variables of the functions that run hold."""
    frames = _names.live_frames()
    for block in sorted(blocks, key=lambda block: -block["size"])[:_MOST]:
        variable, _ = _names.tensor_variable(frames, block["address"])
        if variable:
            yield f"  {variable.name} holds {_messages.size(block['size'])}"


def memory(device):
    """Who holds a device's memory, the most first: by line, or by variable where the line that
    holds most was not recorded."""
    blocks = list(_blocks(device))
    groups = _by_line(blocks)
    if not groups:
        return ""
    if groups[0][0]:
        places = [
            _messages.Place(at, f"holds {_many(count, size)}") for at, count, size in groups[:_MOST]
        ]
        width = max(len(at.label) for at in places)
        lines = [line for at in places for line in at.lines(width)]
        rest = groups[_MOST:]
        if rest:
            sums = (sum(group[i] for group in rest) for i in (1, 2))
            lines.append(f"  {len(rest)} more lines hold {_many(*sums)}")
    else:
        lines = [
            *_by_name(blocks),
            "  help: for the line of each, before the program allocates add",
            f"            torch.{type_name()}.memory._record_memory_history()",
        ]
    return "\n\n" + "\n".join(lines)


# ---- hang reports ----


def _threads():
    """By the system's number: the name of a thread, its line of the user's, and its own frames."""
    frames, found = sys._current_frames(), {}
    for thread in threading.enumerate():
        own = list(itertools.islice(_frames.walk_own(frames.get(thread.ident)), _FRAMES))
        line = _frames.Frame.of(own[0]) if own else None
        is_main = thread is threading.main_thread()
        number = os.getpid() if is_main else thread.native_id  # a forked child's is its parent's
        name = "the main thread" if is_main else f"thread {thread.name!r}"
        found[number] = name, line, own
    return found


_HOST = re.compile(r"  host thread (\d+): (.*)")
_COLLECTIVE = re.compile(r"(  (\w+ \d+) of .*): event (0x[0-9a-f]+), ")
_HEADLINE = re.compile(r"  stream (0x[0-9a-f]+)( of \w+:\d+)(: .*)")


def _events(lines):
    """Names of events: gates, and what collectives signal."""
    made = {
        event: f"the gate made at {_messages.place(*at[:2])}" for event, at in gates.items() if at
    }
    matches = filter(None, map(_COLLECTIVE.match, lines))
    return made | {int(match[3], 16): f"the collective {match[2]}" for match in matches}


def _without_handles(line, streams, events):
    """A line of the core's report in the program's words."""
    line = re.sub(r"\b1 tasks", "1 task", line)
    headline = _HEADLINE.fullmatch(line)
    if headline:
        words, made = streams.words(int(headline[1], 16))
        at = f", made at {_messages.place(*made[:2])}" if made else ""
        return f"  {words}{headline[2]}{at}{headline[3]}"
    line = _COLLECTIVE.sub(r"\1: ", line)
    line = re.sub(r"(task \d+), or\w+: ", r"\1: ", line)
    line = re.sub(r", kernel ([^ :]+(?:::[^ :]+)*)", lambda m: f", {short_operator(m[1])}", line)

    def external(match):
        other = f"an external event{match[2] or ''}, which has not been signalled"
        name = events.get(int(match[1], 16))
        return f"{name}, which has not been signalled" if name else other

    line = re.sub(
        r"external event (0x[0-9a-f]+)( of \w+:\d+)?, which has not been signalled", external, line
    )
    line = re.sub(r"event 0x[0-9a-f]+", "an event", line)
    return streams.put_into(line)


def hang_report(text, colour=False):
    """The core's report, with the lines on which the program's threads wait."""
    title, *lines = text.splitlines()
    threads = _threads()
    streams = _Streams([frame for *_, own in threads.values() for frame in own])
    events, places, rest = _events(lines), [], []
    for line in lines:
        host = _HOST.fullmatch(line)
        name, at, _ = threads.get(int(host[1]), ("", None, [])) if host else ("", None, [])
        line = _without_handles(line, streams, events)
        if at:
            places.append(_messages.Place(at, f"{name} {line.partition(': ')[2]}"))
        else:
            rest.append(line.removeprefix("  "))
    kind, _, title = title.partition(": ")
    return _messages.message(title, places, rest, kind=kind, colour=colour) + "\n"


def print_hang_report(text):
    """On the process's stderr, which a test's capture does not hold back."""
    colour = _messages.wants_colour(sys.__stderr__)
    os.write(2, hang_report(text, colour).encode(errors="backslashreplace"))
