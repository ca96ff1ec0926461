"""The words of reports about a graph's memory."""

import ast
import linecache


def _size(count):
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def _assignments(source):
    """(target, value) of each assignment in a line of source, as text."""
    try:
        statements = ast.parse(source.strip()).body
    except SyntaxError:  # a part of a statement, or the head of a block
        return
    for statement in statements:
        targets = statement.targets if isinstance(statement, ast.Assign) else ()
        yield from ((ast.unparse(t), ast.unparse(statement.value)) for t in targets)


def _assigned(report):
    """What the line that freed an input assigns to its name instead; None: it does not."""
    line = report.later.line
    found = dict(_assignments(linecache.getline(line.filename, line.line))) if line else {}
    return found.get(report.name)


def _ended(report):
    """How an input ended."""
    line, name = report.later.line, report.name or "its tensor"
    if line is None:
        return f"{name} was freed by no line of Python"
    how = "re-assigned" if _assigned(report) else "freed"
    return f"{name} was {how} at {line.filename}:{line.line}"


def _freed(report, where):
    does = "writes" if report.earlier.write else "reads"
    return (
        f"a graph {does} freed memory {report.number} on {where}:\n"
        f"  in the capture, {report.earlier}\n"
        f"and {_ended(report)}; the graph still {does} the old "
        f"{_size(report.end - report.begin)}:"
    )


def _not_replayed(report, where):
    return (
        f"read {report.number} of what a graph writes, before its first replay, on {where}:\n"
        f"  in the capture, where nothing ran, {report.earlier}\n"
        f"and it is read here:"
    )


def _replaced(report, where):
    name = report.name or "a variable"
    return (
        f"possible: a graph reads an input {report.number} that was replaced, on {where}:\n"
        f"  in the capture, {report.earlier}\n"
        f"and {name} holds another tensor now, while nothing has written the old "
        f"{_size(report.end - report.begin)} since the last replay:"
    )


def _overwritten(report, where):
    return (
        f"read {report.number} of an earlier call's output, which a later call of the graphed "
        f"function has overwritten, on {where}:\n"
        f"  the later call, {report.earlier}\n"
        f"and it is read through the tensor of the earlier one:"
    )


def _first_call(report, where):
    return (
        f"possible: each replay {report.number} repeats a first call, on {where}:\n"
        f"  in the capture, {report.earlier}\n"
        f"and it made there what later calls use:"
    )


_WORDS = {
    "freed input": _freed,
    "not replayed": _not_replayed,
    "possible replaced input": _replaced,
    "overwritten output": _overwritten,
    "possible first call": _first_call,
}


def details(report, where):
    words = _WORDS[report.graph](report, where)
    return f"{words}\n  {report.later}\nMissing: {report.advice}"


def place(report):
    """The line to change."""
    side = report.earlier if report.graph == "possible first call" else report.later
    return side.line and tuple(side.line[:2])


def help(report, make):
    """The lines to paste, by `make`."""
    name = report.name or "t"
    if report.graph == "not replayed":
        return (make("before", *report.place, "graph.replay()"),)
    if report.graph == "overwritten output":
        use = report.earlier.line or report.later.line
        return (make("before", use.filename, use.line, "kept = output.clone()"),)
    if report.graph == "possible first call":
        return (make("before", *report.place, "# the same call, before the capture begins"),)
    if report.graph == "possible replaced input":
        return (make("before", *report.place, f"{name}_of_the_graph.copy_({name})"),)
    new = _assigned(report)
    if new is None:
        return (make("before", *report.place, f"kept = {name}  # for as long as the graph"),)
    return (make("in place of", *report.place, f"{name}.copy_({new})"),)
