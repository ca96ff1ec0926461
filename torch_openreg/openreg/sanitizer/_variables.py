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
from ._names import is_function, locals_of
from ._reports import is_users

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
    """(scope, its variables), the innermost frame's first. A scope returns its variables now."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            if is_function(frame):
                found = locals_of(frame)
                yield _Locals(frame), found
                owner = found.get("self")
                if type(owner).__weakrefoffset__ and hasattr(owner, "__dict__"):
                    yield _Attributes(owner), vars(owner)
            yield lambda variables=frame.f_globals: variables, frame.f_globals
        frame = frame.f_back


class _Variable:
    def __init__(self, scope, name, value):
        self.scope, self.name = scope, name
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
        for scope, variables in _scopes():
            for name, value in list(variables.items()):
                held = self.held.get(_storage_of(value))
                if held is not None:
                    held.append(_Variable(scope, name, value))
        self.checked = {b: v for b, v in self.held.items() if v and v[0].may_be_replaced}
        _all.add(self)

    def names(self):
        """The innermost variable's name of each input that has one."""
        return {
            begin: getattr(held[0].scope, "prefix", "") + held[0].name
            for begin, held in self.held.items()
            if held
        }

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
