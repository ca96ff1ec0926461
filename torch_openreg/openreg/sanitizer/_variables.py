"""The program's variables that hold the inputs of a graph: locals, globals, attributes of `self`.

They name the inputs in reports. If all of an input's variables hold other tensors of its shape at a
replay, and nothing has written it since the last one, `x = new` was probably meant to be
`x.copy_(new)`. That other tensor is not an input of a graph itself: a program may capture a graph
for each of several tensors, with one variable.
"""

import sys
import weakref

import torch

from ... import _C
from .._utils import type_name
from . import _processes
from ._frames import Frame, is_users
from ._names import is_function, is_left_by_loop, locals_of

_PLAIN = (torch.Tensor, torch.nn.Parameter)  # others may have no storage
_GONE = object()  # the value of a variable that is no more
_all = weakref.WeakSet()  # of the graphs


def _storage_of(value):
    """The address of the device memory that a variable's value has; None: it is no such tensor."""
    if type(value) not in _PLAIN or value.device.type != type_name():
        return None
    return value.untyped_storage().data_ptr()


class _Locals:
    """Those of the innermost call of a function; none if no call is on the stack."""

    def __init__(self, frame):
        self.code = frame.f_code

    def __call__(self):
        frame = sys._getframe(1)
        while frame is not None and frame.f_code is not self.code:
            frame = frame.f_back
        return {} if frame is None else locals_of(frame)


class _Attributes:
    prefix = "self."

    def __init__(self, owner):
        self.owner = weakref.ref(owner)

    def __call__(self):
        return getattr(self.owner(), "__dict__", {})


def _scopes():
    """(scope, its variables, frame), the innermost frame's first. A scope returns its variables
    now."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            if is_function(frame):
                found = locals_of(frame)
                yield _Locals(frame), found, frame
                owner = found.get("self")
                if type(owner).__weakrefoffset__ and hasattr(owner, "__dict__"):
                    yield _Attributes(owner), vars(owner), None
            yield lambda variables=frame.f_globals: variables, frame.f_globals, frame
        frame = frame.f_back


class _Variable:
    """`frame` runs in the scope; None: an attribute."""

    def __init__(self, scope, name, value, frame):
        self.scope, self.name = scope, name
        # What a loop over some tensors has left in a variable is no sign of how it will be used.
        self.counts = not (frame and is_left_by_loop(Frame.of(frame), name))
        self.value, self.shape = weakref.ref(value), value.shape
        self.may_be_replaced = type(value) is torch.Tensor  # a module holds a Parameter, too


class Variables:
    """Of a capture that is about to end.

    Args:
        capture: its number.
        begins: the addresses of its inputs.
    """

    def __init__(self, capture, begins):
        self.capture, self.held = capture, {begin: [] for begin in begins}
        for scope, variables, frame in _scopes():
            for name, value in list(variables.items()):
                held = self.held.get(_storage_of(value))
                if held is not None:
                    held.append(_Variable(scope, name, value, frame))
        if begins:  # reduce-overhead compares those of its graphs itself
            _processes.note_graph()
        counted = {b: [v for v in held if v.counts] for b, held in self.held.items()}
        self.checked = {b: v for b, v in counted.items() if v and v[0].may_be_replaced}
        _all.add(self)

    def names(self):
        """The name of each input that has one: an attribute's, which outlives a local variable's,
        or else that of the innermost variable."""
        found = {}
        for begin, held in filter(lambda item: item[1], self.held.items()):
            variable = next((v for v in held if hasattr(v.scope, "prefix")), held[0])
            found[begin] = getattr(variable.scope, "prefix", "") + variable.name
        return found

    def check(self):
        """Before a replay."""
        scopes = {}
        for begin, held in self.checked.items():
            there = []
            for variable in held:
                scope = variable.scope
                if scope not in scopes:
                    scopes[scope] = scope()
                value = scopes[scope].get(variable.name, _GONE)
                if value is variable.value():
                    break  # it still holds the input
                if value is not _GONE:
                    there.append((variable, value))
            else:
                if there and all(_is_other(begin, *pair) for pair in there):
                    _C._graph_input_replaced(self.capture, begin)


def _is_other(begin, variable, value):
    now = _storage_of(value)
    if now is None or now == begin or value.shape != variable.shape:
        return False
    held = (variable for others in _all for variable in others.held.get(now, ()))
    return not any(variable.value() is not None for variable in held)  # others were freed since
