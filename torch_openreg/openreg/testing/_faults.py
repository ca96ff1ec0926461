"""Faults on order: ``torch.openreg.testing.inject``."""

import operator
from numbers import Real

from ... import _C
from .._utils import device_index, type_name

_KINDS = tuple(_C._fault_kinds())  # in the core's order
_MOST_MS = 10_000


class inject:
    """A context in which one of the next operations of a device fails, or all of them are slow.

    ::

        with torch.openreg.testing.inject("kernel_error", after=2) as fault:
            step()               # its third kernel fails, as kernels fail: later
        assert fault.fired and fault.operation == "aten::addmm"

    Operations are counted when they are called, in the order of the calls. The end of the context
    disarms a fault that has not fired; a device that was lost works again after
    ``torch.openreg.reset``. Contexts of different kinds may be nested; the same kind twice on
    one device raises RuntimeError. An argument of the wrong type raises TypeError, a wrong value
    ValueError.

    Args:
        kind: what happens.
            ``"out_of_memory"``: an allocation raises torch.OutOfMemoryError, after cached memory
            was returned and queued work was waited for.
            ``"copy_error"``: a copy or fill fails, ``"kernel_error"``: a kernel fails. The error is
            raised once, at the next call that synchronises.
            ``"device_lost"``: a kernel or copy loses the device.
            ``"slow_stream"``: each kernel and copy starts `delay_ms` after its turn has come.
        after: how many such operations are spared first.
        device: the device; None is the current one. A copy between two devices is the source's.
        delay_ms: for ``"slow_stream"`` only: 0 to 10000 milliseconds, 5 if it is not given.
    """

    def __init__(self, kind, after=0, device=None, *, delay_ms=None):
        if kind not in _KINDS:
            raise ValueError(f"unknown fault {kind!r}; known are\n  {', '.join(_KINDS)}")
        if not hasattr(after, "__index__"):
            raise TypeError(f"after must be a whole number, got {after!r}")
        after = operator.index(after)
        if not 0 <= after < 2**64:
            raise ValueError(f"after must be 0 to 2**64 - 1, got {after}")
        if delay_ms is not None and kind != "slow_stream":
            raise ValueError(f"delay_ms is for 'slow_stream', not for {kind!r}; got {delay_ms}")
        if delay_ms is None:
            delay_ms = 5 if kind == "slow_stream" else 0
        if not isinstance(delay_ms, Real):
            raise TypeError(f"delay_ms must be a number, got {delay_ms!r}")
        if not 0 <= delay_ms <= _MOST_MS:
            raise ValueError(f"delay_ms must be 0 to {_MOST_MS}, got {delay_ms}")
        self.kind = kind
        self.after = after
        self.device = device_index(device)
        self._delay = int(delay_ms * 1_000_000)
        self._outcome = (0, "")
        self._armed = self._was_armed = False

    def _key(self):
        return _KINDS.index(self.kind), self.device

    def _look(self):
        if self._armed:
            self._outcome = _C._fault_outcome(*self._key())
        return self._outcome

    @property
    def fired(self):
        """The number of operations in which the fault was injected, which is 0 or 1; with
        ``"slow_stream"``, the number of slow ones."""
        return self._look()[0]

    @property
    def operation(self):
        """The first operation in which it was injected, such as ``"aten::add"``, ``"Memcpy HtoD"``
        or ``"allocation of 512 bytes"``. None before that."""
        return self._look()[1] or None

    def __enter__(self):
        _C._fault_inject(*self._key(), self.after, self._delay)
        self._armed = self._was_armed = True
        return self

    def __exit__(self, *exc_info):
        if _C._in_forked_child():  # no device works there, and no fault exists
            return False
        self._look()
        self._armed = False
        _C._fault_remove(*self._key())
        return False

    def __repr__(self):
        state = f"injected into {self.operation or 'nothing'}" if self._was_armed else "idle"
        state = "armed" if self._armed and not self.fired else state
        return f"<inject {self.kind!r} on {type_name()}:{self.device}, after {self.after}: {state}>"
