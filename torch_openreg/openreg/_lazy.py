"""First use, and fork."""

import threading

from .. import _C
from . import _stray
from ._utils import OWN_NAME

_lock = threading.RLock()
_called = False
_queued = []


def _is_in_bad_fork():
    """Whether this is a forked child of a process that had used a device."""
    return _C._in_forked_child()


def is_initialized():
    """Whether this process has used a device. The call does not use one."""
    if _is_in_bad_fork():
        return False
    return any(_C._is_active(i) for i in range(_C._device_count()))


def init():
    """Initializes the current device, which otherwise happens at its first use.

    Raises RuntimeError in a forked child of a process that had used a device, and if there is none.
    """
    _lazy_init()
    _C._initialize()


def _lazy_init():
    """PyTorch calls it before it makes a tensor on the device. Starts nothing itself."""
    global _called
    if _called and not _queued and not _is_in_bad_fork():
        return
    with _lock:
        if _is_in_bad_fork():
            raise RuntimeError(
                f"Cannot re-initialize {OWN_NAME} in forked subprocess.\n"
                f"To use {OWN_NAME} with multiprocessing, you must use the 'spawn' start method"
            )
        if not _called:
            _called = True
            _stray.note_first_use()
            _C._register_operators()
            from .._patches import compat, quantized, refusals  # not a part of `import torch`

            for patches in (refusals, quantized, compat):
                patches.on_first_use()
        while _queued:  # if one raises, the rest stay for the next use
            _queued.pop(0)()


def _lazy_call(function, **_):
    """Calls `function` at the first use of the device, or at once after that. PyTorch's other
    arguments (``seed=True``) are about the order of the calls, which is kept as given."""
    with _lock:
        if not _called:
            _queued.append(function)
            return
    function()
