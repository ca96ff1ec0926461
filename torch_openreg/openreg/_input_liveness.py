"""check_input_liveness=True: whether the tensors that a capture uses are alive at each replay."""

import sys
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from .. import _C
from ._utils import type_name


def _line():
    """The innermost line outside of torch and this package, as ``train.py:41``."""
    from .sanitizer._frames import is_users

    frame = sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class _Input:
    def __init__(self, tensor):
        storage = tensor.untyped_storage()
        self.begin, self.used, self.freed = storage.data_ptr(), _line(), None
        self.what = f"{tuple(tensor.shape)} of {tensor.dtype}"
        self.storage = weakref.ref(storage, self._end)

    def _end(self, _):
        self.freed = _line()

    def is_alive(self):
        storage = self.storage()
        return storage is not None and storage.data_ptr() == self.begin

    def __str__(self):
        freed = f", freed at {self.freed}" if self.freed else ""
        return f"a tensor {self.what}, used in the capture at {self.used}{freed}"


class InputLiveness(TorchDispatchMode):
    """Follows the operators of a capture, from its begin to stop()."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self._inputs, self._made, self._follows = {}, set(), True
        self.__enter__()

    def stop(self):
        if self._follows:
            self._follows = False
            self.__exit__(None, None, None)
        return self._inputs

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if _C._is_current_stream_capturing():
            for tensor, begin in self._storages([args, kwargs]):
                if begin not in self._made and begin not in self._inputs:
                    self._inputs[begin] = _Input(tensor)
            self._made.update(b for _, b in self._storages(out) if b not in self._inputs)
        return out

    @staticmethod
    def _storages(values):
        for value in tree_iter(values):
            if isinstance(value, torch.Tensor) and value.device.type == type_name():
                begin = value.untyped_storage().data_ptr()
                if begin:
                    yield value, begin

    def check(self):
        dead = [str(tensor) for tensor in self._inputs.values() if not tensor.is_alive()]
        if dead:
            raise RuntimeError(
                f"replay(): inputs of the graph that were freed after the capture: {len(dead)}\n  "
                + "\n  ".join(dead)
                + "\nKeep each tensor, and copy new values into it: tensor.copy_(new)"
            )
