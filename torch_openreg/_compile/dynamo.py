"""The device interface for Dynamo. Imported after torch._dynamo."""

from pathlib import Path

import torch
from torch._dynamo import graph_bytecode_inputs, trace_rules
from torch._dynamo.callback import callback_handler
from torch._dynamo.decorators import assume_constant_result, substitute_in_graph
from torch._dynamo.device_interface import (
    DeviceInterface,
    register_interface_for_device,
)
from torch._dynamo.variables.ctx_manager import (
    GenericDeviceVariable,
    register_device_context_manager,
)
from torch._dynamo.variables.user_defined import UserDefinedClassVariable

from .. import _C, openreg
from .._patches import wrap
from ..openreg._utils import OWN_MODULE, OWN_NAME, type_name
from . import fakes as fakes
from . import random as random


class Interface(DeviceInterface):
    device = openreg.device
    Event = openreg.Event
    Stream = openreg.Stream

    class Worker:
        # The current device of this process: compiling runs a C++ compiler and uses no device.
        current_device = staticmethod(openreg.current_device)
        get_device_properties = staticmethod(openreg.get_device_properties)

    current_device = staticmethod(openreg.current_device)
    set_device = staticmethod(openreg.set_device)
    exchange_device = staticmethod(openreg._exchange_device)
    maybe_exchange_device = staticmethod(openreg._maybe_exchange_device)
    device_count = staticmethod(openreg.device_count)
    is_available = staticmethod(openreg.is_available)
    stream = staticmethod(openreg.stream)
    current_stream = staticmethod(openreg.current_stream)
    set_stream = staticmethod(openreg.set_stream)
    _set_stream_by_id = staticmethod(openreg._set_stream_by_id)
    synchronize = staticmethod(openreg.synchronize)
    memory_allocated = staticmethod(openreg.memory_allocated)

    @staticmethod
    def get_raw_stream(device_idx):
        return openreg.current_stream(device_idx).openreg_stream

    @staticmethod
    def get_compute_capability(device=None):
        return ""  # as of the CPU, whose kernels these are

    @staticmethod
    def is_bf16_supported(including_emulation=False):
        return True


class DeviceVariable(GenericDeviceVariable):
    """``torch.openreg.device`` in a compiled function."""

    _exchange_fn = staticmethod(openreg._exchange_device)
    _maybe_exchange_fn = staticmethod(openreg._maybe_exchange_device)
    _get_device_index_fn = staticmethod(openreg._get_device_index)

    def module_name(self):
        return OWN_MODULE

    def python_type(self):
        return openreg.device


def _current_stream(device=None):
    if device is None:
        return torch.accelerator.current_stream()
    return torch.accelerator.current_stream(device)


# What Dynamo traces in place of functions of torch.openreg: it supports torch.accelerator's.
_TRACED = {
    openreg.current_stream: _current_stream,
    openreg.set_stream: lambda stream: torch.accelerator.set_stream(stream),
    openreg.stream: lambda stream: stream,  # a context manager itself
    openreg.current_device: lambda: torch.accelerator.current_device_index(),
}


def register():
    register_interface_for_device(OWN_NAME, Interface)
    for index in range(_C._device_count()):
        register_interface_for_device(f"{OWN_NAME}:{index}", Interface)
    register_device_context_manager(openreg.device, DeviceVariable)
    UserDefinedClassVariable._in_graph_classes().update({openreg.Stream, openreg.Event})
    for function, traced in _TRACED.items():
        substitute_in_graph(function, skip_signature_check=True)(traced)


def _stored_in_place(store, *objects):
    """A backward pass of PyTorch 2.15 takes its streams and events from the list that it imported,
    which each call of a compiled function replaces: it would use those of another graph."""
    imported = graph_bytecode_inputs.index_to_external_object_weakref
    store(*objects)
    imported[:] = graph_bytecode_inputs.index_to_external_object_weakref
    graph_bytecode_inputs.index_to_external_object_weakref = imported


def refuse_on_rank_threads():
    """Repeated before each use, because torch._dynamo.reset() forgets it."""
    if _refuse not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_refuse)


def _refuse(_):
    distributed.refuse_on_rank_thread("torch.compile")


_package = Path(__file__).parent.parent
# Treated as PyTorch's own code: traced where compiled code calls it, and not on its own.
trace_rules.add(_package.name)
trace_rules.BUILTIN_INLINE_WHEN_CALLED.add(_package.as_posix())
for _function in (openreg.device_count, openreg.is_available):
    assume_constant_result(_function)
if torch.distributed.is_available():
    from ..openreg import distributed

    refuse_on_rank_threads()
if torch.__version__ >= "2.15":
    wrap("torch._dynamo.graph_bytecode_inputs.store_user_object_weakrefs", _stored_in_place)
if type_name() == OWN_NAME:
    register()  # under --as-cuda these are torch.cuda's, which Dynamo supports
