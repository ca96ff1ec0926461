"""The parts of PyTorch with CUDA's name outside ``torch.cuda`` and tensors."""

import functools
import logging
import sys

import torch

from .. import _C
from .._patches import replace, wrap
from .._registration import _import_after
from ..openreg._utils import OWN_NAME
from ._names import refusal, refusing

VERSION = "12.8"  # what a program reads as the version of CUDA


def _profiler():
    """Maps activities and kinds of device with CUDA's name to those of the device."""
    from torch.autograd import DeviceType
    from torch.autograd.profiler import ProfilerState
    from torch.profiler import ProfilerActivity

    replace("torch.profiler.ProfilerActivity.CUDA", ProfilerActivity.PrivateUse1)
    replace("torch.autograd.DeviceType.CUDA", DeviceType.PrivateUse1)

    def for_the_device(init, profile, *args, **kwargs):
        init(profile, *args, **kwargs)
        if getattr(profile, "use_device", None) == "cuda":
            fallback = "" if kwargs.get("use_kineto") else "_FALLBACK"
            profile.profiler_kind = getattr(ProfilerState, f"KINETO_PRIVATEUSE1{fallback}")

    wrap("torch.autograd.profiler.profile.__init__", for_the_device)
    # NVIDIA's tools, which would receive the ranges, are absent.
    replace("torch.autograd.profiler.emit_nvtx.__enter__", lambda self: self)
    replace("torch.autograd.profiler.emit_nvtx.__exit__", lambda self, *exc_info: None)


def _autocast():
    """Autocast compares its argument with the device's name, now "cuda". A program may still pass
    "openreg"."""

    def by_name(function, first, device_type, *args, **kwargs):
        device_type = "cuda" if device_type == OWN_NAME else device_type
        return function(first, device_type, *args, **kwargs)

    wrap("torch.amp.autocast_mode.autocast.__init__", by_name)
    wrap("torch.amp.autocast_mode._cast", by_name)


def _backends():
    """Switches keep their values. The libraries that they control are absent."""
    replace("torch.backends.cuda.is_built", lambda: True)
    if torch.version.cuda is None:
        replace("torch.version.cuda", VERSION)
        # A module that counts operations warns at that point that there is no Triton.
        logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)
    cudnn = sys.modules["torch.backends.cudnn"]
    module = torch.backends.cudnn
    for place in {id(cudnn): cudnn, id(module): module}.values():
        place.is_available = lambda: False
        place.is_acceptable = lambda tensor: False
        place.version = lambda: None

    replace("torch.backends.cuda.cuFFTPlanCache", _PlanCache)
    for kind in ("linalg", "blas"):
        _keep_preferred(kind)
    for library in ("cublas", "cublaslt"):
        name = f"torch.backends.cuda.{library}_workspace_size"
        theirs = getattr(torch.backends.cuda, name.rpartition(".")[2], None)
        if theirs is not None:
            replace(name, refusing(name, theirs))


class _PlanCache:
    """There are no plans. The limit is kept; it starts at 4096 as on CUDA."""

    size = property(lambda self: 0)

    def __init__(self, device_index):
        self.device_index, self.max_size = device_index, 4096

    def clear(self):
        pass


def _keep_preferred(kind):
    """A library that is preferred on CUDA. PyTorch refuses one that it was built without."""
    preferred = getattr(torch._C, f"_get_{kind}_preferred_backend")()

    def keep(backend):
        nonlocal preferred
        preferred = backend

    replace(f"torch._C._set_{kind}_preferred_backend", keep)
    replace(f"torch._C._get_{kind}_preferred_backend", lambda: preferred)


def _properties():
    kind = _C._DeviceProperties
    kind.major, kind.minor, kind.is_multi_gpu_board = 8, 0, 0
    kind.__getattr__ = _no_property


def _no_property(properties, name):
    raise AttributeError(str(refusal(f"torch.cuda.get_device_properties.{name}")))


def _checkpoints():
    """Loads from a process that used the device's own name."""

    def load(storage, location):
        if location.partition(":")[0] != OWN_NAME:
            return None
        return torch.serialization.default_restore_location(
            storage, location.replace(OWN_NAME, "cuda", 1)
        )

    torch.serialization.register_package(27, lambda storage: None, load)


def _compiled_graphs():
    """A compiled function copies what it replays, so the start of a step needs no announcement."""
    replace("torch.compiler.cudagraph_mark_step_begin", lambda: None)
    # Read by torch._inductor.cudagraph_trees, which torch.compiler.reset() imports.
    replace("torch._C._cuda_CUDAAllocator_AllocatorState", object)


def _c_functions():
    """Functions of torch._C that PyTorch's Python code calls outside torch.cuda."""
    from .. import openreg

    functions = {
        "_cuda_clearCublasWorkspaces": lambda: None,
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        "_cuda_emptyCache": openreg.empty_cache,
        "_cuda_exchangeDevice": torch.cuda._exchange_device,
        "_cuda_getCompiledVersion": lambda: int(torch.version.cuda.replace(".", "0")) * 10,
        "_cuda_getCurrentRawStream": lambda index: openreg.current_stream(index).cuda_stream,
        "_cuda_getDevice": openreg.current_device,
        "_cuda_getDeviceCount": openreg.device_count,
        "_cuda_hasPrimaryContext": lambda index: _C._is_active(_C._check_index(index)),
        "_cuda_isCurrentStreamCapturing": openreg.is_current_stream_capturing,
        "_cuda_isInBadFork": openreg._is_in_bad_fork,
        "_cuda_maybeExchangeDevice": torch.cuda._maybe_exchange_device,
        "_cuda_resetCublasLtWorkspaceSize": lambda: None,
        "_cuda_resetCublasWorkspaceSize": lambda: None,
        "_cuda_setDevice": openreg.set_device,
        "_cuda_setStream": torch.cuda._set_stream_by_id,
        "_cuda_synchronize": openreg.synchronize,
    }
    for name, function in functions.items():
        # An object of its own: torch._dynamo has a rule for each, and a different one for
        # torch.cuda's.
        replace(f"torch._C.{name}", functools.partial(function))


def install():
    _backends()
    _properties()
    _profiler()
    _autocast()
    _compiled_graphs()
    _checkpoints()
    _c_functions()
    _import_after("torch.utils.cpp_extension", "torch_openreg._as_cuda._extensions")
    _import_after("torch.testing._internal.common_device_type", "torch_openreg._as_cuda._testing")
    _import_after("torch.utils._triton", "torch_openreg._triton.availability")
    _import_after("triton.compiler", "torch_openreg._triton.install")
    _import_after("torch._inductor.config", "torch_openreg._as_cuda._inductor")
