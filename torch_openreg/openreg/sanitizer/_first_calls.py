"""What a capture makes that belongs to a first call: an optimizer's state, the parameters of a lazy
module. Each replay makes it again, so a replay is reported; it is possible that this was meant."""

import torch
from torch.nn.modules import module as _module
from torch.optim import optimizer as _optimizer

from ... import _C
from .._utils import type_name


def _tensors(optimizer):
    """The tensors of its state, by their addresses."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return {
        value.untyped_storage().data_ptr(): value
        for value in values
        if isinstance(value, torch.Tensor) and value.device.type == type_name()
    }


class FirstCalls:
    """Of a capture, from its begin to stop()."""

    def __init__(self):
        self._found, self._before, self._lazy = [], {}, set()
        self._handles = (
            _optimizer.register_optimizer_step_pre_hook(self._before_step),
            _optimizer.register_optimizer_step_post_hook(self._after_step),
            _module.register_module_forward_pre_hook(self._before_forward),
            _module.register_module_forward_hook(self._after_forward),
        )

    def stop(self):
        for handle in self._handles:
            handle.remove()
        self._before, self._lazy = {}, set()
        return self._found  # if there is none, there is nothing to check

    def check(self):
        """Before a replay."""
        for found in self._found if _C._sanitizer_active() else ():
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

    def _before_forward(self, module, _):
        lazy = isinstance(module, torch.nn.modules.lazy.LazyModuleMixin)
        if lazy and module.has_uninitialized_params():
            self._lazy.add(module)

    def _after_forward(self, module, *_):
        if module in self._lazy:
            self._lazy.remove(module)
            self._add(next(module.parameters()), f"{type(module).__name__}.forward")
