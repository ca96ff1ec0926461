"""``torch.cuda`` and its submodules, name by name.

Each of their functions and classes has one of three fates. It is exchanged for what
``torch.openreg`` has under its name, or for one of this file; or it is kept, if it calls others
that are exchanged; or it raises. So no name is left that searches for a GPU.
"""

import contextlib
import functools
import importlib
import itertools
import pkgutil
import sys
import threading
import types

import torch
import torch.cuda

from .. import _C, openreg
from .._patches import replace
from ..openreg import _messages

_BY_NAME = "in this process cuda is the simulated device openreg"

# What to use instead, by the name or the module that raises.
_INSTEAD = {
    "torch.cuda.cudart": "the runtime is libopenreg.so.0, whose functions openreg.h declares",
    "torch.cuda._utils": "there is no compiler for it: write the kernel with PyTorch's operators",
    "torch.cuda._compile_kernel": "there is no compiler for it: write the kernel with PyTorch's "
    "operators",
    "torch.cuda.jiterator": "there is no compiler for it: write the kernel with PyTorch's "
    "operators",
    "torch.cuda.nccl": "use torch.distributed with the backend nccl, which is openreg's here",
    "torch.cuda.current_blas_handle": "there is no cuBLAS: call torch.mm and the like",
    "torch.cuda.current_solver_handle": "there is no cuSOLVER: call torch.linalg",
    "torch.cuda.CUDAGraph": "NVIDIA's libraries cannot reach the graph: debug_dump() draws it",
    "torch.cuda.graphs": "NVIDIA's libraries cannot reach the graph: debug_dump() draws it",
    "torch.cuda._graph_annotations": "NVIDIA's tools see no graph of openreg's: debug_dump() draws "
    "it",
    "torch.cuda.get_device_properties": "a simulated device has a name, a capability, memory and "
    "processors, and no parts of NVIDIA's",
    "torch.cuda.profiler": "use torch.profiler",
    "torch.backends.cuda": "there are no libraries of NVIDIA's for it to set",
    "torch.utils.cpp_extension": "there is no compiler for CUDA's code; C++ sources are compiled",
    "torch.distributed.ProcessGroupNCCL": "the backend nccl is openreg's here, with Gloo's options",
    "torch.Tensor.__cuda_array_interface__": "only tasks of the device reach its memory",
    "torch.cuda._gpu_trace": "torch.openreg.sanitizer and torch.profiler watch the device",
    "torch.cuda.memory": "see torch.openreg.memory for what there is",
    "torch.cuda.gds": "read the file into pinned memory, and copy",
    "torch.cuda.tunable": "the kernels are the CPU's: there is nothing to tune",
    "torch.cuda.green_contexts": "a simulated device has no multiprocessors to divide",
}


def refusal(name, defined=None):
    """Returns the exception that names what is not supported, and an alternative. `defined` is the
    place of its definition, if that differs."""
    found = [
        prefix
        for prefix in _INSTEAD
        if any(f"{known}.".startswith(f"{prefix}.") for known in (name, defined or name))
    ]
    instead = _INSTEAD[max(found, key=len)] if found else "see docs/cuda.md"
    text = f"{name} is not supported: {_BY_NAME}; {instead}"
    return NotImplementedError(_messages.sentence(text, len("NotImplementedError: ")))


def refusing(name, value, defined=None):
    """Replaces a function or class by one that raises when it is called."""
    if isinstance(value, type):
        # Programs use it in isinstance() and derive from it.
        def __new__(cls, *args, **kwargs):
            raise refusal(name, defined)

        return type(value.__name__, (), {"__new__": __new__, "__module__": value.__module__})

    @functools.wraps(value)
    def refuse(*args, **kwargs):
        raise refusal(name, defined)

    return refuse


# ---- Names that torch.openreg does not have ----


def _get_device_capability(device=None):
    """The first generation with bfloat16. PyTorch's Python code checks its other abilities by
    functions of their own."""
    properties = openreg.get_device_properties(device)
    return properties.major, properties.minor


def _nothing():
    """Does nothing. CUDA's starts NVIDIA's tools."""


@contextlib.contextmanager
def _no_profile():
    yield


def _enable_sanitizer():
    """Raises, as CUDA's does. A sanitizer that is already on keeps its mode."""
    if not openreg.sanitizer.is_enabled():
        openreg.sanitizer.enable()


def _exchange_sanitizer():
    """CUDA's sanitizer does not see our events, and would report what they order as a race. PyTorch
    has switched it on at its import where TORCH_CUDA_SANITIZER is set."""
    theirs = torch.cuda._sanitizer.cuda_sanitizer
    if theirs.enabled:
        theirs.disable()
        _enable_sanitizer()
    kind = "torch.cuda._sanitizer.CUDASanitizer"
    replace(f"{kind}.enable", lambda self: _enable_sanitizer())
    replace(f"{kind}.disable", lambda self: openreg.sanitizer.disable())


_OURS = {
    "torch.cuda._sanitizer.enable_cuda_sanitizer": _enable_sanitizer,
    "torch.cuda.get_device_capability": _get_device_capability,
    "torch.cuda.graphs.CUDAGraph": openreg.Graph,
    "torch.cuda.memory.max_memory_cached": openreg.max_memory_reserved,
    "torch.cuda.memory.memory_cached": openreg.memory_reserved,
    "torch.cuda.nccl.is_available": lambda tensors: False,
    # PyTorch's own code calls these for a group of that name, also for an error's text.
    "torch.cuda.nccl.version": lambda: (2, 27, 3),
    "torch.cuda.profiler.profile": _no_profile,
    "torch.cuda.profiler.start": _nothing,
    "torch.cuda.profiler.stop": _nothing,
}

# They call functions that are exchanged, or are classes without a device.
_KEPT = {
    "torch.cuda.CudaError",
    "torch.cuda.DeferredCudaCallError",
    "torch.cuda._CudaBase",
    "torch.cuda._get_device",
    "torch.cuda.cudart",
    "torch.cuda.check_error",
    "torch.cuda._get_generator",
    "torch.cuda._get_rng_state_offset",
    "torch.cuda._set_rng_state_offset",
    "torch.cuda._utils._get_device_index",
    "torch.cuda.cudaStatus",
}
_KINDS = "BFloat16 Bool Byte Char ComplexDouble ComplexFloat Double Float Half Int Long Short"
_KEPT |= {f"torch.cuda.{kind}Storage" for kind in _KINDS.split()}
_KEPT_MODULES = (
    "amp",
    "_memory_viz",
    "_sanitizer",
    "nvtx",
    "jiterator",
    "_device_limits",
    "_pin_memory_utils",
)


def _is_theirs(value):
    """Whether torch.cuda defines the function or class."""
    return callable(value) and (getattr(value, "__module__", None) or "").startswith("torch.cuda")


def _translation(module, last, value, ours):
    """What replaces the attribute `last` of a module of torch.cuda from now on."""
    # By the place of its definition, whichever module has imported it.
    defined = f"{value.__module__}.{getattr(value, '__name__', last)}"
    if defined in _OURS:
        return _OURS[defined]
    if defined in _KEPT or module.rpartition(".")[2] in _KEPT_MODULES:
        return value
    for place in ours:
        if last in vars(place):
            return vars(place)[last]
    return refusing(f"{module}.{last}", value, defined)


def _modules():
    """Yields torch.cuda and its submodules, each with the modules that its names are taken from."""
    yield torch.cuda, [openreg]
    for info in pkgutil.iter_modules(torch.cuda.__path__):
        if info.name in ("amp", "comm"):  # over torch.amp and torch.nn.parallel
            continue
        module = importlib.import_module(f"torch.cuda.{info.name}")
        same = vars(openreg).get(info.name)
        yield module, [same, openreg] if isinstance(same, types.ModuleType) else [openreg]


def _exchange():
    """Returns what was exchanged, by the identity of the original."""
    exchanged = {}
    for module, ours in list(_modules()):  # all are imported before the first change
        for last, value in list(vars(module).items()):
            if not _is_theirs(value):
                continue
            new = exchanged.get(id(value), (None, None))[1]
            if new is None:
                new = _translation(module.__name__, last, value, ours)
            if new is not value:
                exchanged[id(value)] = (value, new)
                replace(f"{module.__name__}.{last}", new)
    return exchanged


def _exchange_imported(exchanged):
    """Replaces what other modules imported from torch.cuda earlier."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch_openreg") or not isinstance(module, types.ModuleType):
            continue
        for last, value in list(vars(module).items()):
            found = exchanged.get(id(value))
            if found is not None and found[0] is value:
                setattr(module, last, found[1])


class _Ranges:
    """NVTX's functions, as ranges in a profile of torch.profiler."""

    def __init__(self):
        self._local = threading.local()
        self._started, self._numbers = {}, itertools.count(1)

    def _open(self):
        if not hasattr(self._local, "open"):
            self._local.open = []
        return self._local.open

    def rangePushA(self, message):
        inside = self._open()
        inside.append(torch.profiler.record_function(message))
        inside[-1].__enter__()
        return len(inside) - 1

    def rangePop(self):
        inside = self._open()
        if not inside:
            return -2  # as NVTX
        inside.pop().__exit__(None, None, None)
        return len(inside)

    def rangeStartA(self, message):
        number = next(self._numbers)
        self._started[number] = message
        return number

    def rangeEnd(self, number):
        self._started.pop(number, None)

    def markA(self, message):
        with torch.profiler.record_function(message):
            pass

    def deviceRangeStart(self, message, stream=0):
        raise refusal("torch.cuda.nvtx._device_range_start")

    def deviceRangeEnd(self, handle, stream=0):
        raise refusal("torch.cuda.nvtx._device_range_end")


class _Runtime:
    """What torch.cuda.cudart() returns. Existing memory can be pinned; the rest raises."""

    class cudaError(int):
        success = 0

    _TEXTS = types.MappingProxyType(
        {
            0: "no error",
            1: "invalid argument",
            712: "part or all of the requested memory range is already mapped",
            713: "pointer does not correspond to a registered memory region",
        }
    )

    def cudaGetErrorString(self, error):
        return self._TEXTS[error]

    def cudaHostRegister(self, ptr, size, flags):
        return self.cudaError(_C._host_register(ptr, size))

    def cudaHostUnregister(self, ptr):
        return self.cudaError(_C._host_unregister(ptr))

    def cudaProfilerStart(self):
        return self.cudaError(0)

    cudaProfilerStop = cudaProfilerStart

    def __getattr__(self, name):
        if not name.startswith("cuda"):
            raise AttributeError(name)
        raise refusal(f"torch.cuda.cudart.{name}")


def _name_types():
    """Classes of one dtype: PyTorch's storages take the name of their module, which is the
    device's."""
    for name, value in list(vars(openreg).items()):
        if isinstance(value, type(openreg.FloatTensor)):
            value.is_cuda = True
        elif name.endswith("Storage"):
            setattr(openreg, name, getattr(torch.cuda, name))
    for function in (openreg.amp.custom_fwd, openreg.amp.custom_bwd):
        function.keywords["device_type"] = "cuda"


def _handle_of(stream):
    """The handle, as in CUDA: 0 for a default stream."""
    return stream.openreg_stream if stream.stream_id else 0


def _name_handles():
    """Adds attributes with the library's handles, under the names of CUDA's."""
    openreg.Stream.cuda_stream = property(_handle_of)
    openreg.Event.cuda_event = property(lambda self: self.event_id)
    new = openreg.ExternalStream.__new__

    def new_or_default(cls, stream_ptr, device=None):
        if stream_ptr != 0:
            return new(cls, stream_ptr, device)
        default = openreg.default_stream(device)
        return openreg.Stream.__new__(
            cls,
            stream_id=default.stream_id,
            device_index=default.device_index,
            device_type=default.device_type,
        )

    openreg.ExternalStream.__new__ = new_or_default


def _name_graphs(cudas):
    """Adds what only CUDA's class has, with its argument names."""
    for name in ("raw_cuda_graph", "raw_cuda_graph_exec", "get_graph_data"):
        theirs = getattr(cudas, name, None)
        if theirs is not None:
            setattr(openreg.Graph, name, refusing(f"torch.cuda.CUDAGraph.{name}", theirs))
    dump = openreg.Graph.debug_dump
    openreg.Graph.debug_dump = lambda self, debug_path: dump(self, debug_path)


class _Module(types.ModuleType):
    """torch.cuda's. It stores in this variable what CUDA's library would have reported."""

    @property
    def _initialized(self):
        return openreg.is_initialized()


def install():
    torch.cuda.__class__ = _Module
    _name_graphs(torch.cuda.CUDAGraph)
    exchanged = _exchange()
    replace("torch.cuda.nvtx._nvtx", _Ranges())
    replace("torch.cuda._cudart", _Runtime())
    # Modules create such functions at their import.
    call = torch.cuda.jiterator._JittedFunction.__call__
    replace("torch.cuda.jiterator._JittedFunction.__call__", refusing("torch.cuda.jiterator", call))
    _exchange_sanitizer()
    replace("torch.cuda.default_generators", openreg.default_generators)
    # torch.autocast calls it.
    replace("torch.cuda.get_amp_supported_dtype", openreg.get_amp_supported_dtype)
    _exchange_imported(exchanged)
    _name_types()
    _name_handles()
