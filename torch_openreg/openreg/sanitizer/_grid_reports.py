"""The places of a race between the programs of one launch: lines of the kernel, which has run
nothing yet, and the line of the launch."""

import ast

from .. import _messages
from . import _parsing
from ._frames import Frame

_noted = {}  # the two accesses of a race, by the first byte that both programs touch
_KEPT = 1000


def kernel_frame(filename, line, column):
    """The Frame of a line of a kernel, which underlines the call that begins at the column."""
    nodes = (
        node for statement in _parsing.path(filename, line)[-1:] for node in ast.walk(statement)
    )
    calls = (node for node in nodes if isinstance(node, ast.Call))
    call = next((c for c in calls if (c.lineno, c.col_offset) == (line, column)), None)
    return Frame(filename, line, "", call and (call.end_lineno, column, call.end_col_offset))


def note(begin, accesses):
    """For the report of a race between the programs of a launch (_triton/checks.py).

    Args:
        begin: the address of the first byte that both touch.
        accesses: (Frame, what the program does there) of the earlier one and the later one.
    """
    if len(_noted) > _KEPT:
        _noted.clear()
    _noted[begin] = accesses


def noted(begin):
    return _noted.get(begin, ())


def places(report):
    """For the message of a report."""
    later = report.later
    kernel = later.operator.removeprefix("triton::")
    launch = _messages.Place(later.line, f"{later.who} runs {kernel}")
    return [*(_messages.Place(frame, does) for frame, does in report.programs), launch]
