"""The lines of stacks, and whose they are: the user's, PyTorch's, pytest's or Python's."""

import functools
import itertools
import os
import re
import sysconfig
from typing import NamedTuple

import torch

_SHOWN_FRAMES = 10
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_RUNNERS = ("<frozen runpy>", os.path.join(_OURS, "openreg", "testing", "_schedules.py"))
_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]([^/\\.]+)")
_COMPILED = re.compile(r".*[/\\](\w\w)[/\\]c\1\w{40,}\.py")  # in the folders of Inductor
# Installed packages whose frames are counted; those of others are as the user's. NumPy's are here
# because it reads memory by Python functions of its own.
_FOLDED = {
    *("_pytest", "pytest", "pluggy", "xdist", "execnet", "pytest_openreg"),
    *("functorch", "torchgen", "numpy", "triton"),
}


def _columns(code, instruction):
    """As in Frame."""
    if code is None or not hasattr(code, "co_positions"):
        return None
    line, *rest = next(itertools.islice(code.co_positions(), instruction // 2, None), (None,))
    return None if line is None or None in rest else tuple(rest)


class Frame(NamedTuple):
    """A line of a stack."""

    filename: str
    line: int
    name: str
    columns: tuple[int, int, int] | None = None
    """The last line of the expression that runs, its first byte in `line`, and the end of its last
    byte there. None where Python does not have them, as in 3.10."""

    @classmethod
    def of(cls, frame):
        """From Python's."""
        code = frame.f_code
        return cls(code.co_filename, frame.f_lineno, code.co_name, _columns(code, frame.f_lasti))

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


def walk_own(frame):
    """A frame of Python's that is alive and those that called it, of the user's own code."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


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


def stack_text(called, frames, indent="    "):
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


def frames_of(stack, hook=0):
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
