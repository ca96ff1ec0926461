"""Streams and events."""

import ctypes
import threading
import weakref

import torch

from .. import _C
from ._utils import OWN_MODULE, OWN_NAME, a_device, device_index, is_ours, type_name

__all__ = [
    "Event",
    "ExternalStream",
    "Stream",
    "StreamContext",
    "current_stream",
    "default_stream",
    "get_stream_from_external",
    "set_stream",
    "stream",
]

_DEVICE_TYPE = int(torch._C._autograd.DeviceType.PrivateUse1)


def _name(stream):
    return (stream.stream_id, stream.device_index)


def _name_or_current(stream):
    if stream is None:
        return _name(current_stream())
    _check_type(stream, torch.Stream)
    return _name(stream)


def _check_type(value, kind):
    # torch.Stream and torch.Event would read an object of any other type as one of theirs.
    if not isinstance(value, kind):
        raise TypeError(f"expected a torch.{kind.__name__}, got {type(value).__name__}")


def _check_stream(stream):
    _check_type(stream, torch.Stream)
    if not is_ours(stream.device):
        raise ValueError(f"expected a stream of {a_device()}, got one of '{stream.device}'")
    _C._check_stream(_name(stream))


class Stream(torch.Stream):
    """A queue of one device's work. Two streams are ordered only where the program requests it.

    Args:
        device: the device; None is the current one.
        priority: 0 is the least urgent, and lower numbers are more urgent. A number outside the
            device's range is taken as the nearest inside.
        name: its name in reports; None: they show the line that made it. A value that is not a
            string raises TypeError. For a new stream only.
        kwargs: torch.Stream's arguments that name an existing stream.

    Streams come from a pool, in turn, so two objects may name one stream. They compare equal then.
    As a context manager, a stream is current inside: see StreamContext.
    """

    def __new__(cls, device=None, priority=0, *, name=None, **kwargs):
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        if name is not None and not isinstance(name, str):
            raise TypeError(f"a stream's name is a string, not {name!r}")
        where = torch.device(OWN_NAME, device_index(device))
        stream = super().__new__(cls, device=where, priority=priority, **kwargs)
        if name:
            _C._name_stream(stream.openreg_stream, name)
        return stream

    @property
    def priority(self):
        """The effective priority, which is 0 or negative."""
        return _C._stream_priority(_name(self))

    @staticmethod
    def priority_range():
        """(the least urgent priority, the most urgent one), of every device: 0 and a negative
        number. Does not use a device."""
        return _C._stream_priority_range()

    @property
    def openreg_stream(self):
        """The runtime's handle (``orStream_t``), for code that calls libopenreg itself."""
        return _C._stream_handle(_name(self))

    @property
    def _as_parameter_(self):
        """For a call of libopenreg through ctypes."""
        return ctypes.c_uint64(self.openreg_stream)

    def wait_event(self, event):
        """Makes work queued on this stream from now on wait for the newest record of `event`. The
        host does not wait. An argument that is not a torch.Event raises TypeError."""
        _check_type(event, torch.Event)
        if isinstance(event, _SharedEvent):
            event.wait(self)
        else:
            super().wait_event(event)

    def wait_stream(self, stream):
        """Makes work queued on this stream from now on wait for all work queued on `stream` so far.
        The host does not wait. An argument that is not a torch.Stream raises TypeError."""
        _check_type(stream, torch.Stream)
        super().wait_stream(stream)

    def record_event(self, event=None):
        """Records `event`, or a new one if it is None, after the work queued so far, and returns
        it."""
        event = Event() if event is None else event
        _check_type(event, torch.Event)
        event.record(self)
        return event

    def __repr__(self):
        return f"<{OWN_MODULE}.Stream device={self.device} stream_id={self.stream_id}>"


class ExternalStream(Stream):
    """A stream that other code has made with ``orStreamCreate``, and will destroy.

    Args:
        stream_ptr: the handle (``orStream_t``), also as ``native_handle`` returns it. A value that
            is not an integer raises TypeError, a number outside 64 bits ValueError.
        device: its device; None is the current one. A device other than the handle's own raises
            RuntimeError; any use after the stream was destroyed raises it too.
    """

    def __new__(cls, stream_ptr, device=None):
        if not isinstance(stream_ptr, int):
            raise TypeError(f"expected a stream's handle, got {type(stream_ptr).__name__}")
        if not 0 <= stream_ptr < 2**64:
            raise ValueError(f"a stream's handle is from 0 to 2**64 - 1, got {stream_ptr}")
        index = device_index(device)
        stream_id = _C._stream_from_external(stream_ptr, index)
        return super().__new__(
            cls, stream_id=stream_id, device_index=index, device_type=_DEVICE_TYPE
        )


def get_stream_from_external(data_ptr, device=None):
    """The stream that other code has made, with the handle `data_ptr`, on `device`: see
    ExternalStream."""
    return ExternalStream(data_ptr, device)


class Event(torch.Event):
    """A position in a stream's work that other streams and the host can wait for.

    Args:
        enable_timing: whether elapsed_time can be used.
        blocking: ignored, as a waiting host always sleeps.
        interprocess: other processes can use the event too, by its ipc_handle(). Such an event
            takes no time: with `enable_timing`, ValueError.
        external: not supported: True raises NotImplementedError.
        device: only checked. An event belongs to the device of its first record.

    ``query()`` and ``wait()`` do not make the host wait; ``synchronize()`` does.
    """

    def __new__(
        cls, enable_timing=False, blocking=False, interprocess=False, external=False, device=None
    ):
        if interprocess:
            if enable_timing:
                raise ValueError("an event for several processes cannot take the time")
            cls = _SharedEvent if cls is Event else cls
        if external:
            raise NotImplementedError(
                f"{type_name()} events cannot be external:\n"
                "  in a capture, record() and wait() are order between its streams, and no part of "
                "the graph"
            )
        # An event belongs to no device before its first record, so its own is not queried.
        where = OWN_NAME if device is None else torch.device(OWN_NAME, device_index(device))
        event = super().__new__(cls, device=where, enable_timing=enable_timing, blocking=blocking)
        if interprocess:
            event._open(_C._ipc_event_create(device_index(device)), None, own=True)
        return event

    def ipc_handle(self):
        """Bytes by which another process opens the event: see from_ipc_handle. An event that was
        made without ``interprocess=True`` raises RuntimeError."""
        raise RuntimeError("the event was made without interprocess=True, so it has no handle")

    @classmethod
    def from_ipc_handle(cls, device, handle):
        """The event of another process, which lives until its maker destroys it. `device` is the
        one whose streams record it here."""
        return _open_shared(device_index(device), handle)

    @property
    def _as_parameter_(self):
        """For a call of libopenreg through ctypes, once it has been recorded."""
        return ctypes.c_uint64(self.event_id)

    def record(self, stream=None):
        """Records the position after the work queued so far on `stream`; None is the current
        stream. The host does not wait."""
        if stream is not None:
            _check_type(stream, torch.Stream)
        super().record(stream)

    def wait(self, stream=None):
        """Makes work queued on `stream` from now on wait for the newest record. The host does not
        wait. None is the current stream; it may be a stream of another device."""
        if stream is not None:
            _check_type(stream, torch.Stream)
        super().wait(stream)

    def elapsed_time(self, end_event):
        """Milliseconds from this event to `end_event`. Raises ValueError if one of them is not
        timed or not recorded, and RuntimeError if one is not finished: it does not wait."""
        return _C._elapsed_time(self, end_event)

    def __repr__(self):
        what = f"{self.event_id:#x}" if self.event_id else "not recorded"
        return f"<{OWN_MODULE}.Event {what}>"


class _SharedEvent(Event):
    """An event of several processes."""

    def _open(self, moment, index, own):
        self._moment = moment
        self._index = index  # None: of the first record or handle
        if own:
            weakref.finalize(self, _C._ipc_event_destroy, moment).atexit = False

    @property
    def device(self):
        """Without an index before the first record."""
        return torch.device(OWN_NAME if self._index is None else f"{OWN_NAME}:{self._index}")

    def ipc_handle(self):
        """Bytes by which another process opens the event. One that was never recorded belongs to
        the current device from then on."""
        from .. import _sharing

        if self._index is None:
            self._index = device_index()
        return _sharing.event_handle(self._moment)

    def record(self, stream=None):
        """See Event.record."""
        name = _name_or_current(stream)
        if self._index not in (None, name[1]):
            raise RuntimeError(
                f"the event belongs to {type_name()}:{self._index} and cannot be recorded on a "
                f"stream of {type_name()}:{name[1]}"
            )
        _C._ipc_event_record(self._moment, name)
        self._index = name[1]

    def wait(self, stream=None):
        """See Event.wait."""
        _C._ipc_event_wait(self._moment, _name_or_current(stream))

    def query(self):
        """Whether the newest record, of any process, is complete."""
        return _C._ipc_event_query(self._moment)

    def synchronize(self):
        """Waits for the newest record, of any process."""
        _C._ipc_event_synchronize(self._moment, device_index(self._index))

    def __reduce__(self):
        from .. import _sharing

        return _open_shared, (self._index, _sharing.event_handle(self._moment))

    def __repr__(self):
        return f"<{OWN_MODULE}.Event {self._moment.hex()[:12]} of several processes>"


def _open_shared(index, handle):
    from .. import _sharing

    event = torch.Event.__new__(_SharedEvent, device=OWN_NAME)
    event._open(_sharing.open_event(handle), index, own=False)
    return event


def _mend_handles():
    """``torch.Event.from_ipc_handle`` for events of openreg devices. PyTorch's opens none."""
    from_handle = torch.Event.from_ipc_handle

    def from_ipc_handle(cls, device, ipc_handle):
        device = torch.device(device)
        if not is_ours(device):
            return from_handle(device, ipc_handle)
        return Event.from_ipc_handle(device, ipc_handle)

    _C._set_event_from_handle(classmethod(from_ipc_handle))


class _Entered(threading.local):
    """What was current before each context that the thread has entered, the innermost last."""

    def __init__(self):
        self.before = {}


_entered = _Entered()


def _enter(stream):
    name = _name(stream)
    before = _C._enter_stream(name)
    _entered.before.setdefault(name, []).append(before)


def _exit(stream):
    before = _entered.before.get(_name(stream))
    if not before:
        raise RuntimeError("this thread has no stream's context to leave")
    _C._leave_stream(*before.pop())


class StreamContext:
    """A context in which `stream` is current on its device, and its device is current. The previous
    ones are current again after it. None changes nothing."""

    def __init__(self, stream):
        if stream is not None:
            _check_stream(stream)
        self.stream = stream

    def __enter__(self):
        if self.stream is not None:
            _enter(self.stream)

    def __exit__(self, *exc_info):
        if self.stream is not None:
            _exit(self.stream)


def _mend_contexts():
    """``with stream`` for streams of openreg devices.

    PyTorch's own does nothing where the stream is current on its device, although another device
    may be current. It makes a bad stream's device current before it raises. And it keeps the
    previous stream in the stream object, which threads may share.
    """
    enter, exit_ = torch.Stream.__enter__, torch.Stream.__exit__

    def __enter__(self):
        if self.device_type != _DEVICE_TYPE:
            return enter(self)
        _enter(self)
        return self

    def __exit__(self, *exc_info):
        if self.device_type != _DEVICE_TYPE:
            return exit_(self, *exc_info)
        return _exit(self)

    _C._set_stream_context(__enter__, __exit__)


_mend_contexts()
_mend_handles()


def stream(stream):
    """A context in which `stream` is current: see StreamContext."""
    return StreamContext(stream)


def set_stream(stream):
    """Makes `stream` current on its device, and its device current, for the calling thread. None
    changes nothing."""
    if stream is None:
        return
    _check_stream(stream)
    torch.accelerator.set_stream(stream)


def _set_stream_by_id(stream_id, device_index, device_type):
    """set_stream for the stream of that name. PyTorch's own code calls it."""
    name = {"device_index": device_index, "device_type": device_type}
    set_stream(torch.Stream(stream_id=stream_id, **name))


def current_stream(device=None):
    """The stream on which the calling thread queues work for `device`."""
    current = torch.accelerator.current_stream(device_index(device))
    return _wrap(current.stream_id, current.device_index)


def default_stream(device=None):
    """The default stream of `device`, which always exists."""
    return _wrap(0, device_index(device))


def _wrap(stream_id, index):
    return Stream(stream_id=stream_id, device_index=index, device_type=_DEVICE_TYPE)
