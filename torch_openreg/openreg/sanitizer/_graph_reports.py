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


def details(report, where):
    use = report.earlier
    does = "writes" if use.write else "reads"
    if report.graph == "freed input":
        return (
            f"a graph {does} freed memory {report.number} on {where}:\n"
            f"  in the capture, {use}\n"
            f"and {_ended(report)}; the graph still {does} the old "
            f"{_size(report.end - report.begin)}:\n"
            f"  {report.later}\n"
            f"Missing: {report.advice}"
        )
    return (
        f"read {report.number} of what a graph writes, before its first replay, on {where}:\n"
        f"  {report.later}\n"
        f"and in the capture, where nothing ran:\n"
        f"  {use}\n"
        f"Missing: {report.advice}"
    )


def help(report, make):
    """The lines to paste, by `make`."""
    if report.graph == "not replayed":
        return (make("before", *report.place, "graph.replay()"),)
    new, name = _assigned(report), report.name or "t"
    if new is None:
        return (make("before", *report.place, f"kept = {name}  # for as long as the graph"),)
    return (make("in place of", *report.place, f"{name}.copy_({new})"),)
