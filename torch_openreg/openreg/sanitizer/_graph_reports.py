"""The words of reports about a graph's memory, and about the programs of a Triton kernel's grid,
whose places are in _grid_reports.py."""

import ast
import copy

from .. import _messages
from . import _names
from ._advice import Help

_TITLES = {
    "freed input": "replay of a graph whose input was freed,",
    "not replayed": "read of a graph's output before its first replay,",
    "possible replaced input": "possible replay with an old input,",
    "overwritten output": "read of an output that a later call of the graph has overwritten,",
    "possible first call": "possible first call in a capture, which each replay repeats,",
    "race of a grid": "race between the programs of one launch",
}


def _is_backward(report):
    """Whether the backward pass of a call comes after a later call."""
    return report.graph == "overwritten output" and report.later.operator == "backward"


def title(report):
    if _is_backward(report):
        return "backward pass of a graphed call that a later call has overwritten,"
    return _TITLES[report.graph]


def _freed(report):
    line, name = report.later.line, report.subject.name or "Its tensor"
    how, old = "freed", _messages.size(report.end - report.begin, "bytes")
    if line and _copied(report):
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


def _overwritten(report):
    if _is_backward(report):
        return "All calls of a graphed function save what a backward pass needs in the same memory."
    return "All calls of a graphed function give the same memory."


_NOTES = {
    "freed input": _freed,
    "not replayed": lambda _: "In a capture nothing runs: only a replay writes what it captured.",
    "possible replaced input": _replaced,
    "overwritten output": _overwritten,
    "possible first call": lambda _: "What it makes there is made anew by each replay.",
    "race of a grid": lambda _: "The programs of a grid run in no order.",
}


def notes(report):
    """Paragraphs that say what is wrong: the first access is the one in the capture."""
    return [_NOTES[report.graph](report)]


# ---- lines to paste ----


def _capture(report):
    """(the frame with the ``with`` of the capture, that statement, the graph's name); None if there
    is none on the stack."""
    for frame in report.earlier.stack or ():
        for node in reversed(_names.around(frame, ast.With)):
            for call in (item.context_expr for item in node.items):
                if isinstance(call, ast.Call) and call.args and _last_name(call.func) == "graph":
                    return frame, node, ast.unparse(call.args[0])
    return None


def _last_name(node):
    return getattr(node, "attr", None) or getattr(node, "id", None)


class _Renamed(ast.NodeTransformer):
    """Gives a target another name."""

    def __init__(self, old, new):
        self.old, self.new, self.found = old, new, False

    def visit(self, node):
        if isinstance(node, ast.expr) and ast.unparse(node) == self.old:
            self.found = True
            return ast.Name(self.new)
        return self.generic_visit(node)


def _copied(report):
    """The line that re-assigned an input, as one that copies into it; None if it did not."""
    node, name = _names.statement(report.later.line), report.subject.name
    if name is None or not isinstance(node, ast.Assign | ast.For):
        return None
    if "." not in name and not _names.has_before(report.later.line, name):
        return None  # another function's variable of this name
    for target in [node.target] if isinstance(node, ast.For) else node.targets:
        if ast.unparse(target) in (name, f"{name}.data") and isinstance(node, ast.Assign):
            value = ast.unparse(node.value)
            return f"{name}.zero_()" if value == "None" else f"{name}.copy_({value})"
        new = f"new_{name.rpartition('.')[2]}"
        renamed = _Renamed(name, new)
        text = ast.unparse(renamed.visit(copy.deepcopy(target)))
        if renamed.found and isinstance(node, ast.For):
            return f"for {text} in {ast.unparse(node.iter)}:\n    {name}.copy_({new})"
        if renamed.found:
            return f"{text} = {ast.unparse(node.value)}\n{name}.copy_({new})"
    return None


def _zeroed(report):
    """The line that freed a gradient by ``zero_grad()``, as one that keeps it."""
    node = _names.statement(report.later.line)
    call = node.value if isinstance(node, ast.Expr) else None
    if isinstance(call, ast.Call) and _last_name(call.func) == "zero_grad":
        return f"{ast.unparse(call.func)}(set_to_none=False)"
    return None


def _help_freed(report):
    later, name = report.later.line, report.subject.name or "x"
    instead = _copied(report) or _zeroed(report)
    if instead:
        return (Help("in place of", later.filename, later.line, instead),)
    capture = _capture(report)
    if capture is None:
        return _at(later, "before", f"kept = {name}")
    frame, node, graph = capture
    field = name.rpartition(".")[2]
    field = field if field.isidentifier() else "kept"
    return (Help("after", frame.filename, node.end_lineno, f"{graph}.{field} = {name}"),)


def _help_replaced(report):
    owner, dot, name = (report.subject.name or "x").rpartition(".")
    now, kept = owner + dot + name, f"{owner}{dot}graph_{name}"
    keep = _at(report.earlier.line, "before", f"{kept} = {now}")
    return (*keep, *_at(report.later.line, "before", f"{kept}.copy_({now})"))


def _help_not_replayed(report):
    capture = _capture(report)
    graph = capture[2] if capture else "graph"
    return _at(report.later.line, "before", f"{graph}.replay()")


def _help_overwritten(report):
    """A copy of what is read, made before the later call; else of what each call returns."""
    call, read = report.earlier.line, report.later.line
    if _is_backward(report):
        node = _names.statement(report.later.call)
        return _at(call, "before", node and _names.source(node, report.later.call.filename))
    name = (read and _names.read_name(read)) or report.subject.name or "output"
    if not call:
        return ()
    expression, node = _names.expression(call)
    targets = node.targets if isinstance(node, ast.Assign) else ()
    is_one_of = any(isinstance(target, ast.Tuple) for target in targets)
    if expression is None or is_one_of or _names.has_before(call, name):
        return _at(call, "after" if is_one_of else "before", f"{name} = {name}.clone()")
    text = ast.unparse(expression)
    node = _Renamed(text, f"{text}.clone()").visit(copy.deepcopy(node))
    return _at(call, "in place of", ast.unparse(node))


def _help_first_call(report):
    capture, line = _capture(report), report.earlier.line
    frame = capture[0] if capture else line
    node = _names.statement(frame)
    text = ast.unparse(node) if node else ""
    if capture and text:
        return (Help("before", frame.filename, capture[1].lineno, text),)
    return _at(line, "before", text)


def _at(line, where, code):
    return (Help(where, line.filename, line.line, code),) if line and code else ()


_HELPS = {
    "freed input": _help_freed,
    "not replayed": _help_not_replayed,
    "possible replaced input": _help_replaced,
    "overwritten output": _help_overwritten,
    "possible first call": _help_first_call,
    "race of a grid": lambda _: (),
}


def advise(report):
    """As _advice.advise()."""
    helps = _HELPS[report.graph](report)
    return (helps,) if helps else ()


def details(report, where):
    """Every fact of a report of memory `where`."""
    if report.programs:
        sites = "".join(f"  {frame}: {does}\n" for frame, does in report.programs)
        return (
            f"{title(report)} {report.number}, {where}:\n{sites}{notes(report)[0]}\n"
            f"  {report.later}\nMissing: {report.advice}"
        )
    capture = "" if report.graph == "race of a grid" else "in the capture, "
    return (
        f"{title(report)} {report.number}, {where}:\n"
        f"  {capture}{report.earlier}\n"
        f"{notes(report)[0]}\n"
        f"  {report.later}\n"
        f"Missing: {report.advice}"
    )
