"""What a capture makes that belongs to a first call: an optimizer's state, the parameters of a lazy
module. Each replay makes it again, so a replay is reported; it is possible that this was meant."""

import threading

import torch
from torch.nn.parameter import UninitializedTensorMixin as _Uninitialized
from torch.optim import optimizer as _optimizer

from ... import _C
from ..._patches import replace
from .._utils import type_name


def _tensors(optimizer):
    """The tensors of its state, by their addresses."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return {
        value.untyped_storage().data_ptr(): value
        for value in values
        if isinstance(value, torch.Tensor) and value.device.type == type_name()
    }


_following = []  # the FirstCalls of captures
_MATERIALIZE = "torch.nn.parameter.UninitializedTensorMixin.materialize"
_materialize = _Uninitialized.materialize


def _materialize_and_note(parameter, *args, **kwargs):
    _materialize(parameter, *args, **kwargs)
    for follower in _following:
        if follower._thread == threading.get_ident():
            follower._add(parameter, "materialize of a lazy module")


class FirstCalls:
    """Of a capture, from its begin to stop()."""

    def __init__(self):
        self._found, self._before = [], {}
        self._handles = (
            _optimizer.register_optimizer_step_pre_hook(self._before_step),
            _optimizer.register_optimizer_step_post_hook(self._after_step),
        )
        self._thread, self._replays = threading.get_ident(), 0
        _following.append(self)
        replace(_MATERIALIZE, _materialize_and_note)

    def stop(self):
        for handle in self._handles:
            handle.remove()
        self._before = {}
        if self in _following:
            _following.remove(self)
        if not _following:
            replace(_MATERIALIZE, _materialize)
        return self._found  # if there is none, there is nothing to check

    def check(self):
        """Before a replay. The first one makes it for the first time."""
        self._replays += 1
        for found in self._found if self._replays > 1 and _C._sanitizer_active() else ():
            _C._sanitizer_first_call(*found)

    def _add(self, tensor, operation):
        if _C._is_current_stream_capturing():
            storage = tensor.untyped_storage()
            place = storage.data_ptr(), storage.nbytes()
            self._found.append((*place, operation, _C._SanitizerStack()))

    def _before_step(self, optimizer, *_):
        self._before[optimizer] = _tensors(optimizer).keys()

    def _after_step(self, optimizer, *_):
        before = self._before.pop(optimizer, ())
        made = [tensor for begin, tensor in _tensors(optimizer).items() if begin not in before]
        if made:
            self._add(made[0], f"{type(optimizer).__name__}.step")
