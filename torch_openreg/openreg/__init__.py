"""``torch.openreg``: the device module.

It has the names that ``torch.cuda`` and ``torch.xpu`` share, with their meaning, and a few of its
own: ``reset``, ``configure``, ``device_factories``, ``fallback_stats``, ``hang_report``,
``testing`` and ``_sleep``.
docs/module.md has every name of ``torch.cuda`` and what became of it here.

Asking for the number of devices, for their properties, for the current device or for a random
state, and seeding, are no use of a device. The first allocation, copy or stream with work is.

A parameter ``device`` takes a ``torch.device``, a string or an index; None and ``"openreg"`` are
the current device. An index out of range raises RuntimeError, a device of another type ValueError,
and anything else TypeError.
"""

import importlib

from torch import AcceleratorError as AcceleratorError
from torch import OutOfMemoryError as OutOfMemoryError

from . import _typed, amp, graphs, memory, random, sparse, streams
from . import _utils as _utils
from . import comm as comm
from ._lazy import (
    _is_in_bad_fork as _is_in_bad_fork,
)
from ._lazy import (
    _lazy_call as _lazy_call,
)
from ._lazy import (
    _lazy_init as _lazy_init,
)
from ._lazy import (
    init,
    is_initialized,
)
from ._mempool import graph_pool_handle
from ._utils import _get_device_index as _get_device_index
from .amp import get_amp_supported_dtype
from .device import _DeviceGuard as _DeviceGuard
from .device import _exchange_device as _exchange_device
from .device import _get_device as _get_device
from .device import _is_compiled as _is_compiled
from .device import _maybe_exchange_device as _maybe_exchange_device
from .device import _sleep as _sleep
from .device import (
    can_device_access_peer,
    clock_rate,
    configure,
    current_device,
    device,
    device_count,
    device_factories,
    device_of,
    fallback_stats,
    get_arch_list,
    get_device_capability,
    get_device_name,
    get_device_properties,
    get_gencode_flags,
    get_sync_debug_mode,
    hang_report,
    has_half,
    ipc_collect,
    is_available,
    is_bf16_supported,
    is_tf32_supported,
    power_draw,
    reset,
    set_device,
    set_sync_debug_mode,
    synchronize,
    temperature,
    utilization,
)
from .graphs import (
    Graph,
    graph,
    is_current_stream_capturing,
    make_graphed_callables,
)
from .memory import *  # noqa: F403 (its own list says what)
from .random import _get_generator as _get_generator
from .random import _get_rng_state_offset as _get_rng_state_offset
from .random import _set_rng_state_offset as _set_rng_state_offset
from .random import (
    default_generators,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from .streams import (
    Event,
    ExternalStream,
    Stream,
    StreamContext,
    current_stream,
    default_stream,
    get_stream_from_external,
    set_stream,
    stream,
)
from .streams import _set_stream_by_id as _set_stream_by_id

# Imported when they are first asked for, so that `import torch` does not take the time.
_LATER = ("sanitizer", "testing")
SUBMODULES = ("_utils", "amp", "comm", "graphs", "memory", "random", "sparse", "streams", *_LATER)

_TYPED = _typed.tensor_classes("torch.openreg") | _typed.storage_classes()
globals().update(_TYPED)


def __getattr__(name):
    # torch.utils.checkpoint asks whether there is a random state to keep.
    if name == "_initialized":
        return is_initialized()
    if name in _LATER:
        return importlib.import_module(f"torch.openreg.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *_LATER})


__all__ = [
    *memory.__all__,
    *_TYPED,
    *_LATER,
    "Event",
    "ExternalStream",
    "Graph",
    "Stream",
    "StreamContext",
    "amp",
    "can_device_access_peer",
    "clock_rate",
    "configure",
    "current_device",
    "current_stream",
    "default_generators",
    "default_stream",
    "device",
    "device_count",
    "device_factories",
    "device_of",
    "fallback_stats",
    "get_amp_supported_dtype",
    "get_arch_list",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_gencode_flags",
    "get_rng_state",
    "get_rng_state_all",
    "get_stream_from_external",
    "get_sync_debug_mode",
    "graph",
    "graph_pool_handle",
    "graphs",
    "hang_report",
    "has_half",
    "init",
    "initial_seed",
    "ipc_collect",
    "is_available",
    "is_bf16_supported",
    "is_current_stream_capturing",
    "is_initialized",
    "is_tf32_supported",
    "make_graphed_callables",
    "manual_seed",
    "manual_seed_all",
    "memory",
    "power_draw",
    "random",
    "reset",
    "seed",
    "seed_all",
    "sparse",
    "set_device",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "set_sync_debug_mode",
    "stream",
    "streams",
    "synchronize",
    "temperature",
    "utilization",
]
