"""The names that a program has for its streams and memory.

Two sources: the variables of frames that are alive, which hold the object itself; and the source of
the line that made it, where the object is assigned. What neither names has no name, rather than a
wrong one.
"""

import ast
import contextlib
import functools
import inspect
import itertools
import linecache
import re
import sys
import types
from typing import NamedTuple

import torch
from torch.autograd import graph as _graph

from ... import _C

_FRAMES, _VARIABLES, _ITEMS = 20, 400, 64  # that are searched: of a thread, a frame, a container
_DEVICE = torch._C._autograd.DeviceType.PrivateUse1


# ---- the source ----


@functools.lru_cache(maxsize=64)
def _parsed(filename, size):
    lines = linecache.getlines(filename)
    try:
        return ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return None


def _tree(filename):
    """None: there is no source."""
    if filename.startswith("<") and filename not in linecache.cache:
        return None
    lines = linecache.getlines(filename)
    return _parsed(filename, len(lines)) if lines else None


def _covers(node, line):
    return node.lineno <= line <= node.end_lineno


def _path(frame):
    """The statements and expressions around a line, the outermost first."""
    tree, path = frame and _tree(frame.filename), []
    while tree is not None:
        inside = (n for n in ast.iter_child_nodes(tree) if isinstance(n, ast.stmt))
        handlers = (h for h in ast.iter_child_nodes(tree) if isinstance(h, ast.ExceptHandler))
        cases = (c for c in getattr(tree, "cases", ()))
        bodies = itertools.chain.from_iterable(b.body for b in (*handlers, *cases))
        tree = next((n for n in (*inside, *bodies) if _covers(n, frame.line)), None)
        if tree is not None:
            path.append(tree)
    return path


def statement(frame):
    """The innermost statement of a frame's line; None without source."""
    path = _path(frame)
    return path[-1] if path else None


def context(frame, names):
    """The innermost ``with`` around a frame's line, in its function, that names one of `names`;
    None if there is none."""
    found = None
    for node in _path(frame):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found = None
        elif isinstance(node, ast.With) and node.lineno < frame.line:
            parts = (part for item in node.items for part in ast.walk(item.context_expr))
            texts = {ast.unparse(p) for p in parts if _plain(p)}
            if texts & set(names):
                found = node
    return found


def _is_call(node, frame):
    """Whether the expression is what the frame's instruction computes."""
    if frame.columns is None:
        return True
    end_line, first, last = frame.columns
    return (node.end_lineno, node.end_col_offset) == (end_line, last) and (
        node.lineno,
        node.col_offset,
    ) == (frame.line, first)


def _plain(target):
    return isinstance(target, ast.Name | ast.Attribute) or (
        isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant | ast.Name)
    )


def _assigned(target, value, frame):
    """The name that the frame's value gets by ``target = value``."""
    if isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
        if len(target.elts) != len(value.elts):
            return None
        pairs = zip(target.elts, value.elts, strict=True)
        return next(filter(None, (_assigned(t, v, frame) for t, v in pairs)), None)
    if _plain(target) and _is_call(value, frame):
        return ast.unparse(target)
    return None


def _targets(node):
    """(target, value) of what a statement assigns."""
    for part in ast.walk(node):
        if isinstance(part, ast.Assign):
            yield from ((target, part.value) for target in part.targets)
        elif isinstance(part, ast.AnnAssign | ast.NamedExpr) and part.value is not None:
            yield part.target, part.value
        elif isinstance(part, ast.withitem) and part.optional_vars is not None:
            yield part.optional_vars, part.context_expr


def made_name(frames):
    """The target to which the value that the innermost frame makes is assigned, through functions
    that return it, and that line's frame; (None, None) if there is none."""
    for frame in frames or ():
        node = statement(frame)
        if node is None:
            break
        for target, value in _targets(node):
            name = _assigned(target, value, frame)
            if name:
                return name, frame
        if not (isinstance(node, ast.Return) and node.value and _is_call(node.value, frame)):
            break
    return None, None


def _expression(frame):
    """That the frame's instruction computes, and its statement; None where there is no source."""
    node = statement(frame)
    parts = ast.walk(node) if node else ()
    found = (part for part in parts if isinstance(part, ast.expr) and _is_call(part, frame))
    if frame.columns is None:  # the first call
        found = (part for part in found if isinstance(part, ast.Call))
    return next(found, None), node


def written_name(frame):
    """The name that a line writes: ``x`` of ``x.mul_(2)``, ``x *= 2``, ``x[0] = 2``, ``out=x``."""
    call, node = _expression(frame)
    if isinstance(node, ast.AugAssign) and not isinstance(call, ast.Call):
        return ast.unparse(node.target)
    if isinstance(node, ast.Assign) and call is None and isinstance(node.targets[0], ast.Subscript):
        return ast.unparse(node.targets[0].value)
    if not isinstance(call, ast.Call):
        return None
    outs = [k.value for k in call.keywords if k.arg == "out"]
    if outs and _plain(outs[0]):
        return ast.unparse(outs[0])
    function = call.func
    if isinstance(function, ast.Attribute) and function.attr.endswith("_"):
        return ast.unparse(function.value) if _plain(function.value) else None
    return None


_COPIES = ("to", "cpu", "cuda", "clone", "contiguous", "float", "half", "numpy", "item", "tolist")


def read_name(frame):
    """The name that a line of one operand reads: ``x`` of ``x.to()``, ``y.copy_(x)``, ``x + 1``."""
    expression, _ = _expression(frame)
    if isinstance(expression, ast.BinOp):
        names = [expression.left, expression.right]
    elif isinstance(expression, ast.Call):
        names = [*expression.args, *(keyword.value for keyword in expression.keywords)]
        if isinstance(expression.func, ast.Attribute):
            names.insert(0, expression.func.value)
            if expression.func.attr in _COPIES:
                names = names[:1]
            elif expression.func.attr == "copy_":
                names = names[1:2]
    else:
        return None
    names = [n for n in names if _plain(n) and not _is_module(n)]
    return ast.unparse(names[0]) if len(names) == 1 else None


def _is_module(node):
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in ("torch", "F", "nn", "np", "numpy", "dist")


def source(node, filename):
    """A statement's text, without its indentation."""
    lines = linecache.getlines(filename)[node.lineno - 1 : node.end_lineno]
    indent = len(lines[0]) - len(lines[0].lstrip()) if lines else 0
    return "\n".join(line[indent:].rstrip() for line in lines)


# ---- frames that are alive ----


class Variable(NamedTuple):
    """A name, and the frame that has it."""

    name: str
    frame: types.FrameType

    def is_in(self, frame):
        """Whether the name means the same in the function of a Frame."""
        code = self.frame.f_code
        return (code.co_filename, code.co_name) == (frame.filename, frame.name)


def waiting_frame():
    """The frame of the one thread that waits for a backward pass; None if it is not one."""
    run = _graph._engine_run_backward.__code__
    waiting = [frame for frame in sys._current_frames().values() if frame.f_code is run]
    return waiting[0] if len(waiting) == 1 else None


def live_frames(is_folded):
    """The frames of the calling thread that are the program's own; on a thread that has none, of
    the thread that waits for its backward pass."""

    def own(frame):
        while frame is not None:
            if not is_folded(frame.f_code.co_filename):
                yield frame
            frame = frame.f_back

    found = list(itertools.islice(own(sys._getframe()), _FRAMES))
    return found or list(itertools.islice(own(waiting_frame()), _FRAMES))


def is_function(frame):
    """Whether the frame has variables of its own."""
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


def locals_of(frame):
    """A copy of a frame's variables. Before Python 3.13 a function's frame keeps the dict, and with
    it what the function deletes later. So it is emptied, unless the program has it too, from
    ``locals()``."""
    held = frame.f_locals
    found = dict(held)
    kept = is_function(frame) and sys.version_info < (3, 13)
    if kept and sys.getrefcount(held) == 3:  # the frame, this function, and the argument
        held.clear()
    return found


def _variables(frame):
    local = dict(itertools.islice(locals_of(frame).items(), _VARIABLES))
    yield from local.items()
    for name in frame.f_code.co_names:
        if name not in local and name in frame.f_globals:
            yield name, frame.f_globals[name]


def _inside(name, value):
    """Yields (name, value) of each part of a variable's value."""
    if isinstance(value, torch.nn.Module):
        for part, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield f"{name}.{_indexed(part)}", tensor
    if isinstance(value, list | tuple):
        for i, item in enumerate(value[:_ITEMS]):
            yield f"{name}[{i}]", item
    elif isinstance(value, dict):
        for key, item in itertools.islice(value.items(), _ITEMS):
            if isinstance(key, str | int):  # the text of others is the program's to make
                yield f"{name}[{key!r}]", item
    elif not isinstance(value, types.ModuleType | type | torch.Tensor | torch.Stream):
        fields = getattr(value, "__dict__", None)
        if isinstance(fields, dict):
            for key, item in itertools.islice(fields.items(), _ITEMS):
                yield f"{name}.{key}", item


def _indexed(path):
    """``0.weight`` of a Sequential is ``[0].weight`` in Python."""
    parts = (f"[{part}]" if part.isdigit() else f".{part}" for part in path.split("."))
    return "".join(parts).removeprefix(".")


def _is_written(name):
    """Whether the source may have it: a comprehension and Dynamo have names of their own."""
    return name.isidentifier() and not re.fullmatch(r"(tmp|graph_out)_\d+|__.*", name)


def _search(frames, matches):
    """The shortest way to an object: variables before what they hold, inner frames before outer."""
    for frame in frames:
        variables = [(n, v) for n, v in _variables(frame) if _is_written(n)]
        level = variables
        for _ in range(3):
            for name, value in level:
                with contextlib.suppress(Exception):
                    if matches(value):
                        return Variable(name.replace(".[", "["), frame)
            level = list(itertools.islice(_contents(level), 4 * _VARIABLES))
    return None


def _contents(level):
    for name, value in level:
        with contextlib.suppress(Exception):
            yield from _inside(name, value)
        if isinstance(value, torch.Tensor) and value.is_leaf and value.grad is not None:
            yield f"{name}.grad", value.grad


def stream_variable(frames, handle):
    """Which variable holds the stream; None: none does."""

    def matches(value):
        return (
            isinstance(value, torch.Stream)
            and value.device.type == torch._C._get_privateuse1_backend_name()
            and _C._stream_handle((value.stream_id, value.device_index)) == handle
        )

    return _search(frames, matches)


def tensor_variable(frames, address):
    """Which variable holds the tensor that has this byte, and the tensor; (None, None): none."""
    found = []

    def matches(value):
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return False
        first = value.data_ptr()
        size = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) + 1
        if value.numel() and first <= address < first + size * value.element_size():
            found.append(value)
            return True
        return False

    with torch._C.DisableTorchFunctionSubclass():
        variable = _search(frames, matches)
    return (variable, found[-1]) if variable else (None, None)
