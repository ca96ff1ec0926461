"""``torch.openreg``: the device module.

It has the names that ``torch.cuda`` and ``torch.xpu`` share, with their meaning, and a few of its
own: ``reset``, ``configure``, ``device_factories``, ``fallback_stats``, ``hang_report``,
``testing`` and ``_sleep``.
docs/module.md has every name of ``torch.cuda`` and its counterpart here.

A query for the number of devices, their properties, the current device or a random state does not
use a device, and seeding does not either. The first allocation, copy or stream with work does.

A parameter ``device`` takes a ``torch.device``, a string or an index; None and ``"openreg"`` are
the current device. An index out of range raises RuntimeError, a device of another type ValueError,
and anything else TypeError.
"""

import importlib

from torch import AcceleratorError as AcceleratorError
from torch import OutOfMemoryError as OutOfMemoryError

from . import _typed, amp, comm, graphs, memory, random, sparse, streams  # noqa: F401
from . import device as _device_module
from ._lazy import _is_in_bad_fork, _lazy_call, _lazy_init, init, is_initialized  # noqa: F401
from ._utils import OWN_MODULE, _get_device_index  # noqa: F401
from .amp import get_amp_supported_dtype
from .device import *  # noqa: F403 (their own lists say what)
from .device import (  # noqa: F401 (PyTorch's code asks for these)
    _DeviceGuard,
    _exchange_device,
    _get_device,
    _is_compiled,
    _maybe_exchange_device,
    _sleep,
)
from .graphs import *  # noqa: F403
from .memory import *  # noqa: F403
from .random import *  # noqa: F403
from .random import _get_generator, _get_rng_state_offset, _set_rng_state_offset  # noqa: F401
from .streams import *  # noqa: F403
from .streams import _set_stream_by_id  # noqa: F401

# Imported at their first access, to keep `import torch` fast.
_LATER = ("sanitizer", "testing")
SUBMODULES = ("_utils", "amp", "comm", "graphs", "memory", "random", "sparse", "streams", *_LATER)

_TYPED = _typed.tensor_classes(OWN_MODULE) | _typed.storage_classes()
globals().update(_TYPED)


def __getattr__(name):
    # torch.utils.checkpoint reads it to see whether there is a random state to keep.
    if name == "_initialized":
        return is_initialized()
    if name in _LATER:
        return importlib.import_module(f"{OWN_MODULE}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _inductor_backend_init():
    """Called by the first compilation from PyTorch 2.15 on; before, Inductor's import does it."""
    importlib.import_module("torch_openreg._compile.inductor")


def __dir__():
    return sorted({*globals(), *_LATER})


__all__ = [
    *_device_module.__all__,
    *graphs.__all__,
    *memory.__all__,
    *random.__all__,
    *streams.__all__,
    *_TYPED,
    *_LATER,
    "amp",
    "get_amp_supported_dtype",
    "graphs",
    "init",
    "is_initialized",
    "memory",
    "random",
    "sparse",
    "streams",
]
