"""The program's variables that hold a tensor: locals, globals, and attributes of `self`."""

import sys

import torch

from .._utils import type_name
from ._reports import is_users

_PLAIN = (torch.Tensor, torch.nn.Parameter)  # others may have no storage


def storage_of(value):
    """The address of the device memory that a variable's value has; None: it is no such tensor."""
    if type(value) not in _PLAIN or value.device.type != type_name():
        return None
    return value.untyped_storage().data_ptr()


def locals_of(frame):
    """A copy of a frame's variables. Before Python 3.13 the frame keeps the dict that it returns
    here, which would hold the tensors."""
    kept = frame.f_locals
    found = dict(kept)
    own = kept is not frame.f_globals and isinstance(kept, dict)
    if own and sys.getrefcount(kept) <= 3:  # the frame, `kept` and the argument
        kept.clear()
    return found


def _user_frames():
    frame = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _held():
    """(name, value) of each variable, those of the innermost frame first."""
    for frame in _user_frames():
        found = locals_of(frame)
        yield from found.items()
        attributes = getattr(found.get("self"), "__dict__", {})
        yield from ((f"self.{name}", value) for name, value in attributes.items())
        yield from frame.f_globals.items()


def names_of(begins):
    """Names of the variables that hold storages, by the addresses of these."""
    wanted, names = set(begins), {}
    for name, value in _held():
        begin = storage_of(value)
        if begin in wanted:
            names.setdefault(begin, name)
    return names
