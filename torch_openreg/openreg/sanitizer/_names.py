"""The names that a program has for its streams and memory.

Two sources: the variables of frames that are alive, which hold the object itself; and the source of
the line that made it, where the object is assigned. What neither names has no name, rather than a
wrong one.
"""

import ast
import contextlib
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
from . import _parsing
from ._frames import is_users, walk_own

_FRAMES, _VARIABLES, _ITEMS = 20, 400, 64  # that are searched: of a thread, a frame, a container
_DEVICE = torch._C._autograd.DeviceType.PrivateUse1


# ---- the source ----


def _path(frame):
    """The statements around a frame's line, the outermost first."""
    return _parsing.path(*frame[:2]) if frame else []


def statement(frame):
    """The innermost statement of a frame's line; None without source."""
    path = _path(frame)
    return path[-1] if path else None


def around(frame, kind):
    """The statements of a kind around a frame's line, the outermost first."""
    return [node for node in _path(frame) if isinstance(node, kind)]


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


def is_known_at(name, made, frame):
    """Whether the name that the line `made` assigns means the same at another frame's line."""
    kind = ast.FunctionDef | ast.AsyncFunctionDef
    indexed = re.search(r"\[[^\d'\"]", name)  # by a variable, which other functions do not have
    if name.startswith("self.") and not indexed:
        kind = ast.ClassDef
    owner, other = ([n.lineno for n in around(at, kind)[-1:]] for at in (made, frame))
    return made.filename == frame.filename and (owner == other or not (owner or indexed))


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


def _targets(parts):
    """(target, value) of what these nodes assign."""
    for part in parts:
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
        for target, value in _targets(ast.walk(node)):
            name = _assigned(target, value, frame)
            if name:
                return (name, frame) if is_users(frame.filename) else (None, None)
        if not (isinstance(node, ast.Return) and node.value and _is_call(node.value, frame)):
            break
    return None, None


def _scope(frame):
    """The function of a frame's line, or else its module; None without source."""
    functions = around(frame, ast.FunctionDef | ast.AsyncFunctionDef)
    return functions[-1] if functions else _parsing.tree(frame.filename)


def _own(scope):
    """The nodes of a function, without those of functions in it."""
    nodes = list(ast.iter_child_nodes(scope)) if scope else []
    while nodes:
        node = nodes.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            nodes += ast.iter_child_nodes(node)


def binds(target, name):
    """Whether an assignment to the target gives the name a value."""
    return any(ast.unparse(n) == name for n in ast.walk(target) if isinstance(n, ast.expr))


def _bindings(frame, name):
    """The lines above the frame's, in its function, that assign the name, but to a list."""
    displays = ast.List | ast.ListComp | ast.Dict | ast.DictComp  # they are no tensors
    found = _targets(_own(_scope(frame)))
    targets = (target for target, value in found if not isinstance(value, displays))
    return [t.lineno for t in targets if t.lineno < frame.line and binds(t, name)]


def unused(frame, name):
    """The name, or it with a number, that nothing in the frame's file has."""
    taken = set()
    for node in ast.walk(_parsing.tree(frame.filename) or ast.Module([], [])):
        taken.add(getattr(node, "id", None) or getattr(node, "arg", None))
    numbered = (f"{name}{number}" for number in itertools.count(2))
    return next(n for n in (name, *itertools.islice(numbered, len(taken))) if n not in taken)


def is_of_part(frame, name):
    """Whether a comprehension or a lambda of the frame's statement has the variable."""
    parts = list(ast.walk(statement(frame) or ast.Pass()))
    inner = [p for c in parts if isinstance(c, ast.comprehension) for p in ast.walk(c.target)]
    inner += [a for f in parts if isinstance(f, ast.Lambda) for a in ast.walk(f.args)]
    names = {getattr(p, "id", None) or getattr(p, "arg", None) for p in inner}
    return name.partition(".")[0].partition("[")[0] in names


def has_before(frame, name):
    """Whether the frame's function has the variable before this line: as an argument, by ``global``
    or ``nonlocal``, or by a line above."""
    names = set()
    for node in _own(_scope(frame)):
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            names.update(node.names)
    return name in names or bool(_bindings(frame, name))


def is_left_by_loop(frame, name):
    """Whether a name has its value from a ``for`` loop that was over before the frame's line."""
    loops = (n for n in _own(_scope(frame)) if isinstance(n, ast.For))
    loops = [n for n in loops if n.lineno < frame.line and binds(n.target, name)]
    last = max(loops, key=lambda loop: loop.lineno, default=None)
    if last is None or last.end_lineno >= frame.line:
        return False
    return not any(line > last.lineno for line in _bindings(frame, name))


def has_between(frame, other):
    """Whether the function of two lines has a statement that begins and ends between theirs."""
    first, last = statement(frame), statement(other)
    nodes = (n for n in _own(_scope(frame)) if isinstance(n, ast.stmt))
    return not (first and last) or any(
        first.end_lineno < n.lineno and n.end_lineno < last.lineno for n in nodes
    )


def is_last(frame):
    """Whether no statement of its function follows on a frame's."""
    node = statement(frame)
    nodes = (n for n in _own(_scope(frame)) if isinstance(n, ast.stmt))
    return not (node and any(n.lineno > node.end_lineno for n in nodes))


def yields(frame):
    """The ``yield`` expressions of a frame's function."""
    return [n for n in _own(_scope(frame)) if isinstance(n, ast.Yield | ast.YieldFrom)]


def is_only_yield(frame):
    """Whether the statement of a frame's line has the one ``yield`` of its function."""
    found, node = yields(frame), statement(frame)
    return len(found) == 1 and isinstance(found[0], ast.Yield) and found[0] in ast.walk(node)


def listed_name(frame):
    """``xs`` of ``xs = [f(y) for y in ys]``, whose items the frame's instruction computes; None:
    the line is no such one."""
    for target, value in _targets([statement(frame)]):
        if isinstance(value, ast.ListComp) and _plain(target) and _is_call(value.elt, frame):
            return ast.unparse(target)
    return None


def event_recorded_after(frame):
    """The event that the statement behind a frame's, in its block, records on the current stream:
    ``e.record()`` or ``e = torch.cuda.current_stream().record_event()``; None: none."""
    path = _path(frame)
    parent = path[-2] if len(path) > 1 else _parsing.tree(frame.filename)
    body = [*getattr(parent, "body", ()), None]
    following = body[body.index(path[-1]) + 1] if path and path[-1] in body else None
    call = getattr(following, "value", None)
    if not isinstance(call, ast.Call) or call.args or call.keywords:
        return None
    function = ast.unparse(call.func)
    if function.endswith("current_stream().record_event") and isinstance(following, ast.Assign):
        event = following.targets[0]
    else:
        event = call.func.value if function.endswith(".record") else None
    return ast.unparse(event) if isinstance(event, ast.Name | ast.Attribute) else None


def cleared_grad(frame):
    """``p.grad``, if a line below the frame's is ``p.grad = None``; None: none is, or several."""
    nodes = [n for n in _own(_scope(frame)) if isinstance(n, ast.Assign) and n.lineno > frame.line]
    nodes = [n for n in nodes if isinstance(n.value, ast.Constant) and n.value.value is None]
    names = {ast.unparse(target) for node in nodes for target in node.targets}
    names = {name for name in names if name.endswith(".grad")}
    return names.pop() if len(names) == 1 else None


def expression(frame):
    """That the frame's instruction computes, and its statement; None where there is no source."""
    node = statement(frame)
    parts = ast.walk(node) if node else ()
    found = (part for part in parts if isinstance(part, ast.expr) and _is_call(part, frame))
    if frame.columns is None:  # the first call
        found = (part for part in found if isinstance(part, ast.Call))
    return next(found, None), node


def written_name(frame):
    """The name that a line writes: ``x`` of ``x.mul_(2)``, ``x *= 2``, ``x[0] = 2``, ``out=x``."""
    call, node = expression(frame)
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


_VIEWS = ("detach", "view", "view_as", "reshape", "flatten", "t", "transpose", "contiguous")
_COPIES = ("to", "cpu", "cuda", "clone", "contiguous", "float", "half", "numpy", "item", "tolist")


def read_names(frame):
    """The names that a line reads: ``x`` of ``x.to()`` and ``y.copy_(x)``; both of ``x + y``."""
    computed, _ = expression(frame)
    if isinstance(computed, ast.BinOp):
        names = [computed.left, computed.right]
    elif isinstance(computed, ast.Call):
        names = [*computed.args, *(keyword.value for keyword in computed.keywords)]
        if isinstance(computed.func, ast.Attribute):
            if hasattr(torch.Tensor, computed.func.attr):  # optimizer.step() reads no `optimizer`
                names.insert(0, computed.func.value)
            if computed.func.attr in _COPIES:
                names = names[:1]
            elif computed.func.attr == "copy_":
                names = names[1:2]
    else:
        return []
    return [ast.unparse(n) for n in map(_viewed, names) if _plain(n) and not _is_module(n)]


def read_name(frame):
    """The one name that a line reads; None: none, or several."""
    names = read_names(frame)
    return names[0] if len(names) == 1 else None


def _viewed(node):
    """``x`` of ``x.detach().view(-1)``."""
    while isinstance(node, ast.Call) and getattr(node.func, "attr", None) in _VIEWS:
        node = node.func.value
    return node


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
        lines = [line for *_, line in code.co_lines() if line]
        same = (code.co_filename, code.co_name) == (frame.filename, frame.name)
        return same and min(lines) <= frame.line <= max(lines)


def waiting_frame():
    """The frame of the one thread that waits for a backward pass; None if it is not one."""
    run = _graph._engine_run_backward.__code__
    waiting = [frame for frame in sys._current_frames().values() if frame.f_code is run]
    return waiting[0] if len(waiting) == 1 else None


def live_frames():
    """The frames of the calling thread that are the program's own; on a thread that has none, of
    the thread that waits for its backward pass."""
    found = list(itertools.islice(walk_own(sys._getframe()), _FRAMES))
    return found or list(itertools.islice(walk_own(waiting_frame()), _FRAMES))


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
        with contextlib.suppress(Exception):  # of a proxy whose object is gone
            yield from _inside(name, value)
            if isinstance(value, torch.Tensor) and value.is_leaf and value.grad is not None:
                yield f"{name}.grad", value.grad


def _is_stream(value, handle):
    return (
        issubclass(type(value), torch.Stream)  # isinstance() would ask a proxy for its class
        and value.device.type == torch._C._get_privateuse1_backend_name()
        and _C._stream_handle((value.stream_id, value.device_index)) == handle
    )


def stream_variable(frames, handle):
    """Which variable holds the stream; None: none does."""
    return _search(frames, lambda value: _is_stream(value, handle))


def generators_with(handle):
    """Variables that hold the stream in the program's generators that wait for their next turn, and
    are in no thread's stack."""
    for generator in _C._generators():
        frame = None if generator.gi_running else generator.gi_frame
        if frame and is_users(frame.f_code.co_filename):
            variable = stream_variable([frame], handle)
            if variable:
                yield variable


def global_stream(frames, handle, at):
    """The name of the variable of a line's module that holds the stream, if the module assigns that
    name once, and no function has a variable of that name; None: none does."""
    spaces = [f.f_globals for f in frames if f.f_code.co_filename == at.filename]
    names = [name for name, value in dict(*spaces[:1]).items() if _is_stream(value, handle)]
    return next(
        (name for name in names if _is_assigned_once(_parsing.tree(at.filename), name)), None
    )


def _is_assigned_once(tree, name):
    nodes = list(ast.walk(tree)) if tree else []
    stores = [n for n in nodes if getattr(n, "id", None) == name and isinstance(n.ctx, ast.Store)]
    if len(stores) != 1 or any(isinstance(n, ast.arg) and n.arg == name for n in nodes):
        return False
    return any(stores[0] in node.targets for node in tree.body if isinstance(node, ast.Assign))


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
