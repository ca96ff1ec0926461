"""Devices: their number, the current one, and their properties."""

import contextlib
import operator

import torch

from .. import _C, _transit
from . import _stray
from ._lazy import _lazy_init, init
from ._utils import OWN_NAME, DeviceContext, a_device, device_index, is_ours

__all__ = [
    "can_device_access_peer",
    "clock_rate",
    "configure",
    "current_device",
    "device",
    "device_count",
    "device_factories",
    "device_of",
    "fallback_stats",
    "get_arch_list",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_gencode_flags",
    "get_sync_debug_mode",
    "hang_report",
    "has_half",
    "ipc_collect",
    "is_available",
    "is_bf16_supported",
    "is_tf32_supported",
    "power_draw",
    "reset",
    "set_device",
    "set_sync_debug_mode",
    "synchronize",
    "temperature",
    "utilization",
]


def device_count():
    """The number of openreg devices; 0 if they cannot be made. Does not use a device."""
    return _C._device_count()


def is_available():
    """Whether there is an openreg device. Does not use it."""
    return _C._device_count() > 0


def _get_device(device):
    """The torch.device that `device`, a name or an index, names."""
    if isinstance(device, str):
        return torch.device(device)
    return torch.device(OWN_NAME, device) if isinstance(device, int) else device


def current_device():
    """The index of the calling thread's current device."""
    return _C._get_device()


def _names_none(device):
    """Whether torch.cuda treats it as no device at all. The caller handles None."""
    index = device.idx if isinstance(device, DeviceContext) else device
    return isinstance(index, int) and index < 0


def set_device(device):
    """Makes `device` current for the calling thread and initializes it. A negative index does
    nothing. OPENREG_CHECK_STRAY_CONTEXT=warn or error tells of another device that the process has
    used before."""
    if not _names_none(device):
        index = device_index(device)
        _exchange_device(index)
        _stray.check(index, stacklevel=3)


def _exchange_device(device):
    """Makes the device with the index `device` current and initializes it; returns the previous
    current device. A negative index changes nothing and returns -1. PyTorch's own code calls it."""
    if device < 0:
        return -1
    before = _C._exchange_device(device)
    if not _C._is_active(device):
        init()
    return before


def _maybe_exchange_device(device):
    """_exchange_device without the initialization."""
    return _C._exchange_device(device) if device >= 0 else -1


class _DeviceGuard(DeviceContext):
    """``torch.openreg.device`` of a valid `index`."""

    def __init__(self, index):
        self.idx = index
        self.prev_idx = -1

    def __enter__(self):
        self.prev_idx = _exchange_device(self.idx)

    def __exit__(self, *exc_info):
        if self.prev_idx >= 0:
            _C._exchange_device(self.prev_idx)
        return False


class device(_DeviceGuard):
    """A context in which `device` is current and initialized. The previous device is current again
    after it, also after an exception. None and a negative index change nothing. As an argument it
    stands for the device that it selects."""

    def __init__(self, device):
        self.idx = -1 if device is None or _names_none(device) else device_index(device)
        self.prev_idx = -1


class device_of(device):
    """A context in which the device of a tensor or storage, `obj`, is current. An `obj` that is not
    on an openreg device changes nothing."""

    def __init__(self, obj):
        super().__init__(obj.device if is_ours(obj.device) else None)


def synchronize(device=None):
    """Waits until every stream of `device`, and every collective on it, has finished the work
    queued so far.

    The error of a failed kernel is raised here, with its type: once, except that a lost device
    raises torch.AcceleratorError at every call. Does nothing on a device that has not been used
    yet.
    """
    __tracebackhide__ = True
    _synchronize(device_index(device))


def _synchronize(index):
    __tracebackhide__ = True
    if _C._in_forked_child() or _C._is_active(index):
        _C._synchronize(index)


@contextlib.contextmanager
def internal_waits():
    """In the block, set_sync_debug_mode does not apply to this thread: a tool waits in it, and not
    the program."""
    _C._internal_waits(True)
    try:
        yield
    finally:
        _C._internal_waits(False)


def synchronize_all():
    """Synchronises every device that has been used, also after the error of one. The first error is
    raised at the end, with the others as its notes. For tools: set_sync_debug_mode does not
    apply."""
    __tracebackhide__ = True  # pytest shows where the program has called, not this
    errors = []
    for index in range(_C._device_count()):
        try:
            with internal_waits():
                _synchronize(index)  # a test may have replaced torch.device
        except Exception as error:
            errors.append(error)
    if errors:
        first, *others = errors
        for other in others if hasattr(first, "add_note") else ():  # Python 3.11
            first.add_note(f"and {type(other).__name__}: {other}")
        raise first


def reset(device=None):
    """Cancels the work queued on `device`, completes its events, clears its error and empties its
    cache. Waits for the task that is running. Tensors, streams, events and generators stay valid,
    but the contents of tensors are undefined. A lost device (torch.AcceleratorError) can be used
    again afterwards."""
    _C._reset(device_index(device))


def _uuid(properties):
    """A name of the device that is the same in every process of this machine until it boots."""
    import uuid

    with open("/proc/sys/kernel/random/boot_id") as boot:
        return uuid.uuid5(uuid.UUID(boot.read().strip()), f"{OWN_NAME}:{properties.index}")


_C._DeviceProperties.uuid = property(_uuid)


def get_device_properties(device=None):
    """The properties of `device`, as attributes: name, total_memory, factory, lanes, host_cores,
    uuid and more. They never change: two calls for one device return equal objects. The uuid is
    different for each device, and the same in every process of the machine."""
    return _C._get_device_properties(device_index(device))


def get_device_name(device=None):
    """The name of `device`, such as ``/openreg:1``."""
    return get_device_properties(device).name


def get_device_capability(device=None):
    """The abilities of `device`: a dictionary with the set ``supported_dtypes``."""
    return torch._C._accelerator_getDeviceCapability(device_index(device))


def can_device_access_peer(device, peer_device):
    """Whether a kernel or copy of `device` may access memory of `peer_device` directly. It may not
    where ``OPENREG_PEER_ACCESS`` is 0."""
    return _C._can_access_peer(device_index(device), device_index(peer_device))


def is_bf16_supported(including_emulation=True):
    """Whether the device computes in bfloat16: True, whatever `including_emulation` is."""
    return True


def is_tf32_supported():
    """Whether the device computes in TF32: False, float32 stays float32."""
    return False


has_half = True


def _is_compiled():
    """Whether PyTorch was built for the device: True, the package's kernels are PyTorch's."""
    return True


def ipc_collect():
    """Returns memory that was shared with other processes and that none of them holds any more, and
    unmaps other processes' memory of which this one holds nothing."""
    _transit.end_lost()
    _C._ipc_collect()


def get_arch_list():
    """The architectures that kernels were compiled for: an empty list, as the kernels are the
    CPU's."""
    return []


def get_gencode_flags():
    """The compiler's flags for those architectures: an empty string."""
    return ""


def _no_sensor(quantity):
    def read(device=None):
        device_index(device)
        raise NotImplementedError(f"{a_device()} is simulated and has no {quantity} to read")

    read.__name__ = read.__qualname__ = quantity.replace(" ", "_")
    read.__doc__ = (
        f"Raises NotImplementedError: a simulated `device` has no {quantity} that could be read."
    )
    return read


clock_rate = _no_sensor("clock rate")
power_draw = _no_sensor("power draw")
temperature = _no_sensor("temperature")
utilization = _no_sensor("utilization")


def configure(device_count, name_prefix=""):
    """Creates the devices, with a number for each type. Call it before any other call that creates
    or counts them.

    ::

        torch.openreg.configure({"openreg": 4})

    Args:
        device_count: a dictionary from device type to number, 0 to 64. A type that is not named
            keeps its default: one "CPU", and of "openreg" ``OPENREG_DEVICE_COUNT``, or if that is
            not set what the plugin counts, or two.
        name_prefix: the start of the names; the devices are then ``<prefix>/openreg:0`` and so on.

    Raises RuntimeError if the devices exist already (any use of a device creates them, and a query
    for their number does too), if a number is out of range or if no factory makes the type;
    TypeError for anything but a dictionary from names to whole numbers.
    """
    for kind, count in device_count.items():
        if not isinstance(kind, str) or isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"expected a device type and a whole number, got {kind!r}: {count!r}")
    _C._add_devices(dict(device_count), name_prefix)


def device_factories():
    """The registered device factories. Each is a dictionary with ``type``, ``name``, ``priority``,
    ``plugin`` (the path of the library that it came from, or ``""``), ``serves`` (whether it makes
    the devices of its type) and ``devices`` (their names)."""
    return _C._factories()


def fallback_stats(reset=False):
    """Counts the ways in which operators ran.

    Returns a dictionary from an operator's name to how often (``count``) and for how long in all
    (``seconds``) it was ``asynchronous`` (queued; the time is that of the CPU's kernels),
    ``waited`` for, or ``copying`` its tensors to the CPU and back. Does not wait, so queued work
    that has not run yet is not counted, unless it is for a device's own kernel.

    Args:
        reset: whether counting starts anew after this call.
    """
    return _C._fallback_stats(reset)


def hang_report():
    """What every stream with work does and what it waits for, as text.

    It has the lines on which the program's threads wait for a device, and names each stream's next
    task and operator, and what that task waits for. The call does not wait. With
    ``OPENREG_WATCHDOG_S`` the same text is printed when no stream makes progress; whole stacks come
    from ``faulthandler``.
    """
    from . import _texts

    return _texts.hang_report(_C._hang_report())


_SYNC_DEBUG_MODES = {"default": 0, "warn": 1, "error": 2}


def set_sync_debug_mode(debug_mode):
    """Sets what happens at calls that make the host wait for a device, in the whole process.

    Args:
        debug_mode: ``"default"`` or 0: nothing; ``"warn"`` or 1: a UserWarning; ``"error"`` or 2: a
            RuntimeError, before anything is queued. Both name the operator or the call. Another
            value raises RuntimeError, another type TypeError.

    These calls are: operators whose result is a number or has a size that depends on data
    (``item``, ``nonzero``, a mask as index), operators that the device waits for at each call (of
    sparse tensors, of other libraries), copies to pageable memory, copies without ``non_blocking``
    (except small ones from pageable memory, which are copied during the call), ``empty_cache`` and
    allocations that had to wait for memory. Unlike ``torch.cuda``, ``synchronize`` of devices,
    streams and events counts too.
    """
    if isinstance(debug_mode, str):
        if debug_mode not in _SYNC_DEBUG_MODES:
            raise RuntimeError(
                f"invalid value of debug_mode '{debug_mode}', expected one of `default`, `warn`, "
                "`error`"
            )
        debug_mode = _SYNC_DEBUG_MODES[debug_mode]
    elif not isinstance(debug_mode, int):
        raise TypeError(f"debug_mode is 0, 1, 2, 'default', 'warn' or 'error', not {debug_mode!r}")
    _C._set_sync_debug_mode(debug_mode)


def get_sync_debug_mode():
    """The mode set by set_sync_debug_mode, as a number from 0 to 2."""
    return _C._get_sync_debug_mode()


def _sleep(nanoseconds):
    """Queues a kernel on the current stream that does nothing for `nanoseconds`, an integer. A
    negative number raises ValueError, another type TypeError, as with torch.cuda."""
    try:
        nanoseconds = operator.index(nanoseconds)
    except TypeError:
        raise TypeError(f"nanoseconds is an integer, got {nanoseconds!r}") from None
    if nanoseconds < 0:
        raise ValueError(f"nanoseconds must be 0 or more, got {nanoseconds}")
    _lazy_init()
    _C._sleep(nanoseconds)
