"""Devices: how many, which is current, what they are."""

import torch

from .. import _C
from ._lazy import _lazy_init
from ._utils import device_index


def device_count():
    """The number of openreg devices; 0 if they cannot be made. No use of a device."""
    return _C._device_count()


def is_available():
    """Whether there is an openreg device. No use of it."""
    return _C._device_count() > 0


def current_device():
    """The index of the calling thread's current device."""
    return _C._get_device()


def set_device(device):
    """Makes `device` current for the calling thread. A negative index is a no-op."""
    if isinstance(device, int) and device < 0:
        return
    _C._set_device(device_index(device))


class device:
    """A context in which `device` is current; the device from before is current again after it,
    also when it is left by an exception. None and a negative index are no-ops."""

    def __init__(self, device):
        no_op = device is None or (isinstance(device, int) and device < 0)
        self.idx = -1 if no_op else device_index(device)
        self.prev_idx = -1

    def __enter__(self):
        if self.idx >= 0:
            self.prev_idx = _C._exchange_device(self.idx)

    def __exit__(self, *exc_info):
        if self.idx >= 0:
            _C._set_device(self.prev_idx)
        return False


class device_of(device):
    """A context in which the device of a tensor or storage is current; a no-op if that is not an
    openreg device."""

    def __init__(self, obj):
        super().__init__(obj.device if obj.device.type == "openreg" else None)


def synchronize(device=None):
    """Blocks until every stream of the device has finished what is queued so far.

    The error of a failed kernel surfaces here. A no-op on a device not used yet.
    """
    index = device_index(device)
    if _C._in_forked_child() or _C._is_active(index):
        _C._synchronize(index)


def reset(device=None):
    """Drops the work queued on the device, completes its events, clears its error and empties its
    cache. A task that is running is waited for. Tensors, streams, events and generators stay valid;
    the contents of tensors are undefined. It brings a lost device (torch.AcceleratorError) back."""
    _C._reset(device_index(device))


def get_device_properties(device=None):
    """The device's properties: name, total_memory, factory, lanes, host_cores and more."""
    return _C._get_device_properties(device_index(device))


def get_device_name(device=None):
    """The device's name, such as ``/openreg:1``."""
    return get_device_properties(device).name


def get_device_capability(device=None):
    """What the device can do: a dictionary with the set ``supported_dtypes``."""
    return torch._C._accelerator_getDeviceCapability(device_index(device))


def can_device_access_peer(device, peer_device):
    """Whether a kernel or copy of `device` may reach memory of `peer_device` directly."""
    return _C._can_access_peer(device_index(device), device_index(peer_device))


def is_bf16_supported(including_emulation=True):
    """Whether the device computes in bfloat16: yes."""
    return True


def is_tf32_supported():
    """Whether the device computes in TF32: no, float32 is float32."""
    return False


def get_arch_list():
    """The architectures that kernels were compiled for: none, the kernels are the CPU's."""
    return []


def get_gencode_flags():
    """The compiler's flags for those architectures: none."""
    return ""


def _no_sensor(quantity):
    def read(device=None):
        device_index(device)
        raise NotImplementedError(f"an openreg device is simulated and has no {quantity} to read")

    read.__name__ = read.__qualname__ = quantity.replace(" ", "_")
    read.__doc__ = f"Raises NotImplementedError: a simulated device has no {quantity} to read."
    return read


clock_rate = _no_sensor("clock rate")
power_draw = _no_sensor("power draw")
temperature = _no_sensor("temperature")
utilization = _no_sensor("utilization")


def configure(device_count, name_prefix=""):
    """Makes the devices: so many of each type, before anything else has made or counted them.

    ::

        torch.openreg.configure({"openreg": 4})

    Args:
        device_count: a dictionary from device type to number, 0 to 64. A type that is not named
            gets what it gets without this call: one "CPU", ``OPENREG_DEVICE_COUNT`` of "openreg".
        name_prefix: what names begin with; the devices are then ``<prefix>/openreg:0`` and so on.

    Raises RuntimeError where the devices are there already (any use of a device, also asking for
    their number, makes them), where a number is out of range and where no factory makes the type.
    """
    for kind, count in device_count.items():
        if not isinstance(kind, str) or isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"expected a device type and a whole number, got {kind!r}: {count!r}")
    _C._add_devices(dict(device_count), name_prefix)


def device_factories():
    """The registered device factories, a dictionary each: type, name, priority, plugin (the path of
    the library that it came from, or ""), whether it serves, that is, makes the devices of its
    type, and the names of these devices."""
    return _C._factories()


def fallback_stats(reset=False):
    """Which way operators went: a dictionary from an operator's name to how often (``count``) and
    for how long in all (``seconds``) it was ``asynchronous`` (queued; the time is that of its
    kernels), ``waited`` for, or ``copying`` its tensors to the CPU and back. `reset` starts anew.
    Does not synchronise: what is queued and has not run yet is not counted yet."""
    return _C._fallback_stats(reset)


def hang_report():
    """What every stream that has work is doing and what it waits for, as text: its next task and
    operator, the event or value it waits for, and streams that wait for each other. Waits for
    nothing. ``OPENREG_WATCHDOG_S`` prints it when nothing goes on; for the host's own stacks there
    is ``faulthandler``."""
    return _C._hang_report()


_SYNC_DEBUG_MODES = {"default": 0, "warn": 1, "error": 2}


def set_sync_debug_mode(debug_mode):
    """What becomes of calls that make the host wait for a device, in the whole process.

    Args:
        debug_mode: "default" or 0: nothing; "warn" or 1: a UserWarning; "error" or 2: a
            RuntimeError, before anything is queued. Both name the operator or the call.

    They are: operators whose result is a number or has a size that depends on data (``item``,
    ``nonzero``, a mask as index), operators that the device waits for at each call (of sparse
    tensors, of other libraries), copies to pageable memory, copies that do not say ``non_blocking``
    (but for small ones from pageable memory, which are copied at the call), ``empty_cache`` and
    allocations that had to wait for memory; and, where ``torch.cuda`` says nothing,
    ``synchronize`` of devices, streams and events.
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
    """The mode that set_sync_debug_mode has set, as a number."""
    return _C._get_sync_debug_mode()


def _sleep(nanoseconds):
    """Queues a kernel on the current stream that does nothing for that long."""
    if nanoseconds < 0:
        raise ValueError(f"nanoseconds must be 0 or more, got {nanoseconds}")
    _lazy_init()
    _C._sleep(int(nanoseconds))
