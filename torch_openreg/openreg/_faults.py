"""Faults on order: ``torch.openreg.testing.inject``."""

import numbers

from .. import _C
from ._utils import device_index

_KINDS = tuple(_C._fault_kinds())  # in the core's order
_MOST_MS = 10_000


class inject:
    """A context in which one of the next operations of a device fails, or all are slow.

    ::

        with torch.openreg.testing.inject("kernel_error", after=2) as fault:
            step()               # its third kernel fails, as kernels fail: later
        assert fault.fired and fault.operation == "aten::addmm"

    Operations are counted when they are called, in the order of the calls. After the context, what
    has not fired is disarmed, and everything works as before; a device that was lost, after
    ``torch.openreg.reset``. Kinds may be nested; the same kind twice on a device is a RuntimeError.

    Args:
        kind: what happens.
            ``"out_of_memory"``: an allocation raises torch.OutOfMemoryError, after cached memory
            went back and queued work was waited for.
            ``"copy_error"``: a copy or fill fails, ``"kernel_error"``: a kernel; the error surfaces
            once, at the next call that synchronises.
            ``"device_lost"``: a kernel or copy loses the device.
            ``"slow_stream"``: each kernel and copy starts `delay_ms` after its turn has come.
        after: how many such operations are spared first.
        device: of which device; a copy between two is the source's. The current device if None.
        delay_ms: for ``"slow_stream"``, 0 to 10000 milliseconds.
    """

    def __init__(self, kind, after=0, device=None, *, delay_ms=None):
        if kind not in _KINDS:
            raise ValueError(f"unknown fault {kind!r}; known are {', '.join(_KINDS)}")
        number = getattr(after, "__index__", lambda: -1)()
        if not 0 <= number < 2**64:
            kind_of = ValueError if hasattr(after, "__index__") else TypeError
            raise kind_of(f"after must be a whole number from 0 to 2**64 - 1, got {after!r}")
        if delay_ms is not None and kind != "slow_stream":
            raise ValueError(f"delay_ms is for 'slow_stream', not for {kind!r}; got {delay_ms}")
        if delay_ms is None:
            delay_ms = 5 if kind == "slow_stream" else 0
        if not isinstance(delay_ms, numbers.Real):
            raise TypeError(f"delay_ms must be a number from 0 to {_MOST_MS}, got {delay_ms!r}")
        if not 0 <= delay_ms <= _MOST_MS:
            raise ValueError(f"delay_ms must be 0 to {_MOST_MS}, got {delay_ms}")
        self.kind = kind
        self.after = number
        self.device = device_index(device)
        self._delay = int(delay_ms * 1_000_000)
        self._outcome = (0, "")
        self._armed = False

    def _key(self):
        return _KINDS.index(self.kind), self.device

    def _look(self):
        if self._armed:
            self._outcome = _C._fault_outcome(*self._key())
        return self._outcome

    @property
    def fired(self):
        """How many operations were struck: 0, or 1; with ``"slow_stream"``, how many are slow."""
        return self._look()[0]

    @property
    def operation(self):
        """What was struck first, such as ``"aten::add"``, ``"Memcpy HtoD"`` or ``"allocation of 512
        bytes"``; None before."""
        return self._look()[1] or None

    def __enter__(self):
        _C._fault_inject(*self._key(), self.after, self._delay)
        self._armed = True
        return self

    def __exit__(self, *exc_info):
        if _C._in_forked_child():  # where no device works, and no fault is
            return False
        self._look()
        self._armed = False
        _C._fault_remove(*self._key())
        return False

    def __repr__(self):
        state = f"struck {self.operation}" if self.fired else "armed" if self._armed else "idle"
        return f"<inject {self.kind!r} on openreg:{self.device}, after {self.after}: {state}>"
