"""Tools for tests of asynchronous code."""

import sys
import threading

import torch

from ... import _C
from .. import _texts
from .._lazy import _lazy_init
from .._utils import device_index
from ._faults import inject as inject
from ._schedules import Exploration as Exploration
from ._schedules import explore as explore
from ._schedules import schedule as schedule

if torch.distributed.is_available():
    from ._ranks import run_ranks as run_ranks


class gate:
    """Holds streams until it is opened, from any thread.

    ::

        with torch.openreg.testing.gate() as gate:
            gate.wait()          # the current stream goes no further than here
            y = x + 1            # queued
            assert not torch.openreg.current_stream().query()
        torch.openreg.synchronize()

    A stream that waits holds no thread, so any number of gates may be closed. The end of the
    context opens the gate, and the end of the object does too: its streams would otherwise wait
    for ever.

    Args:
        device: the device whose current stream wait() holds by default; None is the current device.
    """

    def __init__(self, device=None):
        self._event = None
        _lazy_init()
        self._device = device_index(device)
        self._lock = threading.Lock()
        self._event = _C._external_event_create(self._device)
        self._open = False
        _texts.gates[self._event] = _texts.caller()

    def wait(self, stream=None):
        """Makes work queued on `stream` after this call wait for the gate; the host does not wait.
        It may be a stream of any device; None is the current stream of the gate's device."""
        if stream is None:
            stream = torch.accelerator.current_stream(self._device)
        _C._external_event_wait(self._event, (stream.stream_id, stream.device_index))

    def open(self):
        """Releases every stream that waits. Opening an open gate does nothing."""
        with self._lock:
            if self._open:
                return
            self._open = True
        _C._external_event_signal(self._event)

    @property
    def is_open(self):
        """Whether the gate has been opened."""
        return self._open

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.open()
        return False

    def __del__(self, _is_finalizing=sys.is_finalizing):  # the module may be empty by then
        # At the end of the process nothing is woken up any more.
        if self._event is None or _is_finalizing() or _C._in_forked_child():
            return
        self.open()
        _texts.gates.pop(self._event, None)
        _C._external_event_destroy(self._event)
