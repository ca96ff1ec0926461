"""The words of reports about a graph's memory."""

import ast
import linecache

from .. import _messages
from ._advice import Help

TITLES = {
    "freed input": "replay of a graph whose input was freed,",
    "not replayed": "read of a graph's output before its first replay,",
    "possible replaced input": "possible replay with an old input,",
    "overwritten output": "read of an output that a later call of the graph has overwritten,",
    "possible first call": "possible first call in a capture, which each replay repeats,",
}


def _assigned(report):
    """The value that the line which freed an input assigns to its name; None if it does not."""
    line = report.later.line
    try:
        source = linecache.getline(line.filename, line.line).strip() if line else ""
        statements = ast.parse(source).body
    except SyntaxError:  # a part of a statement, or the head of a block
        return None
    for statement in statements:
        targets = statement.targets if isinstance(statement, ast.Assign) else ()
        if report.subject.name in map(ast.unparse, targets):
            return ast.unparse(statement.value)
    return None


def _freed(report):
    line, name = report.later.line, report.subject.name or "Its tensor"
    how, old = "freed", _messages.size(report.end - report.begin, "bytes")
    if line and _assigned(report):
        how = "re-assigned"
    where = f"at {_messages.place(*line[:2])}" if line else "by no line of Python"
    return f"{name} was {how} {where}; the graph still {report.earlier.does} the old {old}."


def _replaced(report):
    name, old = (
        report.subject.name or "A variable",
        _messages.size(report.end - report.begin, "bytes"),
    )
    return (
        f"{name} holds another tensor now, and nothing has written the old {old} since the last "
        "replay."
    )


_NOTES = {
    "freed input": _freed,
    "not replayed": lambda _: "In a capture nothing runs: only a replay writes what it captured.",
    "possible replaced input": _replaced,
    "overwritten output": lambda _: "All calls of a graphed function give the same memory.",
    "possible first call": lambda _: "What it makes there is made anew by each replay.",
}


def notes(report):
    """Paragraphs that say what is wrong: the first access is the one in the capture."""
    return [_NOTES[report.graph](report)]


def _lines(report):
    """(place, where, code) of the line to paste."""
    name, later = report.subject.name or "t", report.later.line
    earlier = report.earlier.line
    if report.graph == "not replayed":
        return later, "before", "graph.replay()"
    if report.graph == "overwritten output":
        return earlier or later, "before", "kept = output.clone()"
    if report.graph == "possible first call":
        return earlier or later, "before", "# the same call, before the capture begins"
    if report.graph == "possible replaced input":
        return later, "before", f"{name}_of_the_graph.copy_({name})"
    new = _assigned(report)
    if new is None:
        return later, "before", f"kept = {name}  # for as long as the graph"
    return later, "in place of", f"{name}.copy_({new})"


def advise(report):
    """As _advice.advise()."""
    place, where, code = _lines(report)
    return ((Help(where, place.filename, place.line, code),),) if place else ()


def details(report, where):
    """Every fact of a report of memory `where`."""
    return (
        f"{TITLES[report.graph]} {report.number}, {where}:\n"
        f"  in the capture, {report.earlier}\n"
        f"{notes(report)[0]}\n"
        f"  {report.later}\n"
        f"Missing: {report.advice}"
    )
