"""Triton's driver for the device, and what Triton calls to launch a kernel."""

import logging
import warnings

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase, decompose_descriptor
from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime.autotuner import OutOfResources

from .. import _C, openreg
from .._patches import wrap
from ..openreg._utils import type_name
from . import library
from .backend import CAPABILITY
from .checks import Checks

_log = logging.getLogger("torch_openreg.triton")


def _is_composite(kind):
    return isinstance(kind, tuple) or kind.startswith("tensordesc")


def _flattened(kind, value):
    """The arguments of the compiled function that one of the kernel's becomes."""
    if isinstance(kind, tuple):
        for inner, part in zip(kind, value, strict=True):
            yield from _flattened(inner, part)
    elif kind.startswith("tensordesc"):
        yield from decompose_descriptor(value)
    elif kind != "constexpr":
        yield value


def launcher(source, metadata):
    """Makes the function that Triton calls for each launch, with the grid, the stream and so on,
    and with the kernel's arguments."""
    kinds = tuple(source.signature.values())
    roles = metadata.roles
    composite = any(map(_is_composite, kinds))
    if not composite:
        rest = iter(roles)
        roles = "".join("." if kind == "constexpr" else next(rest) for kind in kinds)
    launch = _C._triton_launcher(
        f"triton::{metadata.name}", roles, metadata.asserts, Checks(metadata)
    )
    if not composite:
        return launch

    def launch_flattened(*given):
        call, values = given[: -len(kinds)], given[-len(kinds) :]
        flat = (
            v for kind, value in zip(kinds, values, strict=True) for v in _flattened(kind, value)
        )
        launch(*call, *flat)

    return launch_flattened


class Utils:
    """What Triton and libraries ask of a device: the values of a card of that capability."""

    @staticmethod
    def get_device_properties(device):
        return {
            "max_shared_mem": 166912,
            "max_num_regs": 65536,
            "multiprocessor_count": openreg.get_device_properties(device).multi_processor_count,
            "warpSize": 32,
            "sm_clock_rate": 1410000,
            "mem_clock_rate": 1215000,
            "mem_bus_width": 5120,
        }

    @staticmethod
    def load_binary(name, kernel, shared, device):
        loaded = library.load(kernel)
        registers, spills, threads = 32, 0, 1024
        return loaded, library.address(loaded, "openreg_entry"), registers, spills, threads

    @staticmethod
    def unload_module(module):
        """Tasks may be queued that call it."""


class Driver(DriverBase):
    launcher_cls = staticmethod(launcher)
    get_current_device = staticmethod(_C._current_device_index)
    set_current_device = staticmethod(openreg.set_device)
    get_current_stream = staticmethod(_C._current_stream_handle)

    def __init__(self):
        self.utils = Utils()
        self._target = GPUTarget("cuda", CAPABILITY, 32)

    @classmethod
    def is_active(cls):
        return True

    def map_python_to_cpp_type(self, ty):
        return "void *" if ty.startswith("*") else {"fp64": "double", "fp32": "float"}.get(ty, ty)

    def get_current_target(self):
        return self._target

    def get_device_capability(self, device=None):
        return divmod(CAPABILITY, 10)

    def get_active_torch_device(self):
        return torch.device(type_name(), self.get_current_device())

    def get_device_interface(self):
        return getattr(torch, type_name())

    def get_benchmarker(self):
        from triton.testing import do_bench

        return do_bench

    def get_empty_cache_for_benchmark(self):
        # The CPU's caches are not emptied between the runs of a benchmark.
        return torch.empty(1, dtype=torch.int, device=self.get_active_torch_device())

    def clear_cache(self, cache):
        cache.zero_()


class _Taken(dict):
    """The arguments of a launch for which a configuration is taken."""


def _warn_of_trials(tuner, updated):
    """No trial runs here, so nothing else shows that trials would change an argument."""
    names = [n for n in updated if n not in (*tuner.restore_value, *tuner.reset_to_zero)]
    if names:
        code = tuner.base_fn.__code__
        warnings.warn(
            f"{code.co_filename}:{code.co_firstlineno}: {tuner.base_fn.__name__} reads and writes "
            f"{', '.join(names)}. On a card triton.autotune runs each of {len(tuner.configs)} "
            f"configurations with these arguments, and the trials change what the launch reads. "
            f"Pass restore_value={names} or reset_to_zero={names}.",
            stacklevel=2,
        )


def _tune_at_once(bench, tuner, /, *args, config, **options):
    """Times of the CPU say nothing about a card, and a run of a configuration writes its outputs.
    So the first configuration that compiles is taken, and none runs before that."""
    if tuner._do_bench is not None and not (tuner.num_warmups or tuner.num_reps):
        return bench(tuner, *args, config=config, **options)  # the program's own benchmark
    if isinstance(tuner.nargs, _Taken):
        return [float("inf")] * 3
    if config.pre_hook:  # may set what is compiled for, as the blocks of tensor descriptors
        config.pre_hook({**tuner.nargs, **options, **config.all_kwargs()})
    try:
        kernel = tuner.fn.run(*args, **{**options, **config.all_kwargs(), "warmup": True})
    except (OutOfResources, CompileTimeAssertionFailure):
        return [float("inf")] * 3
    if openreg.sanitizer.is_enabled():
        _warn_of_trials(tuner, kernel.metadata.updated)
    tuner.nargs = _Taken(tuner.nargs)
    _log.info("%s: autotune took %s, the first that compiles", tuner.base_fn.__name__, config)
    return [0.0] * 3


wrap("triton.runtime.autotuner.Autotuner._bench", _tune_at_once)
