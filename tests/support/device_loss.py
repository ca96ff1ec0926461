"""Loses a device: libc's atoi as a kernel, which returns the error that its arguments spell."""

import ctypes
import itertools

import torch

_core = ctypes.CDLL("libopenreg.so.0")
_core.orGetErrorName.restype = ctypes.c_char_p
_NAME = b"aten::lost"  # the core keeps the pointer

CODE = next(
    code for code in itertools.count() if _core.orGetErrorName(code) == b"orErrorDeviceLost"
)


class _Launch(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("stream", ctypes.c_uint64),
        ("fn", ctypes.c_void_p),
        ("args", ctypes.c_char_p),
        ("args_size", ctypes.c_size_t),
        ("drop", ctypes.c_void_p),
        ("accesses", ctypes.c_void_p),
        ("access_count", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("flags", ctypes.c_uint),
    )


def queue_loss(device=0):
    """Queues the kernel on the device's current stream; returns what the launch returned."""
    launch = _Launch(ctypes.sizeof(_Launch), torch.openreg.current_stream(device).openreg_stream)
    launch.fn = ctypes.cast(ctypes.CDLL(None).atoi, ctypes.c_void_p)
    launch.args = b"%d" % CODE
    launch.args_size = len(launch.args) + 1
    launch.name = _NAME
    return _core.orLaunchKernelEx(ctypes.byref(launch))


def lose(device=0):
    """The device is lost when this returns."""
    with torch.openreg.stream(torch.openreg.Stream(device)):
        assert queue_loss(device) in (0, CODE)
        try:
            torch.openreg.current_stream(device).synchronize()
        except torch.AcceleratorError:
            return
    raise AssertionError("the device was not lost")
