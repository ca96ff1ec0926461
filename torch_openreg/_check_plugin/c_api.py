"""The C interface of the library, as the checks of a plugin use it."""

import contextlib
import ctypes
import os
import re

HERE = os.path.dirname(os.path.abspath(__file__))
LIBRARY = os.path.join(os.path.dirname(HERE), "lib", "libopenreg.so.0")

SUCCESS, OUT_OF_MEMORY, NOT_READY, LAUNCH_FAILURE, DEVICE_LOST = 0, 2, 7, 19, 21
EXTERNAL = 2  # orEventExternal
KernelFn = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class Properties(ctypes.Structure):
    """orDeviceProperties."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("name", ctypes.c_char * 64),
        ("factory", ctypes.c_char * 64),
        ("total_memory", ctypes.c_size_t),
        *((name, ctypes.c_int) for name in ("index", "numa_node", "lanes", "host_cores")),
        *((name, ctypes.c_int) for name in ("can_map", "integrated")),
        ("model", ctypes.c_char * 64),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    )


class Factory(ctypes.Structure):
    """orFactoryInfo."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("type", ctypes.c_char * 32),
        ("name", ctypes.c_char * 64),
        ("plugin", ctypes.c_char * 256),
        ("priority", ctypes.c_int),
        ("serves", ctypes.c_int),
    )


class Launch(ctypes.Structure):
    """orLaunch."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("stream", ctypes.c_uint64),
        ("fn", KernelFn),
        ("args", ctypes.c_void_p),
        ("args_size", ctypes.c_size_t),
        ("drop", ctypes.c_void_p),
        ("accesses", ctypes.c_void_p),
        ("access_count", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("flags", ctypes.c_uint),
        ("queued", ctypes.c_void_p),
    )


class OperatorKernel(ctypes.Structure):
    """orOperatorKernel."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("accepts", ctypes.c_void_p),
        ("run", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
    )


class Refused(Exception):
    """A call of the library that returned an error."""

    def __init__(self, call, code, text):
        super().__init__(text)
        self.call, self.code = call, code


class Api:
    """Calls of the library. Before each, `report` gets a step: the function of the plugin's table
    that it leads to, and what it does; `last` keeps the two."""

    def __init__(self, report):
        self._library = ctypes.CDLL(LIBRARY)
        for name in ("orGetErrorName", "orGetLastErrorMessage"):
            getattr(self._library, name).restype = ctypes.c_char_p
        self.report = report
        self.last = "", ""
        self._kept = []  # callbacks and names that queued work may still use

    def step(self, function, text):
        self.last = function, text
        self.report("step", function, text)

    def call(self, name, *arguments):
        """Calls a function with pointers and handles as numbers."""
        code = getattr(self._library, name)(
            *(ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments)
        )
        if code:
            text = self._library.orGetLastErrorMessage().decode(errors="replace")
            if code == NOT_READY:
                text = self._library.orGetErrorName(code).decode()
            raise Refused(name, code, text)

    def code(self, name, *arguments):
        """What the function returns."""
        try:
            self.call(name, *arguments)
        except Refused as refused:
            return refused.code
        return SUCCESS

    def _get(self, name, *arguments, kind=ctypes.c_uint64):
        value = kind()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def device_count(self):
        self.step("create_devices", "making the devices")
        return self._get("orGetDeviceCount", kind=ctypes.c_int)

    def properties(self, device):
        self.step("properties", f"asking device {device} for its properties")
        found = Properties(size=ctypes.sizeof(Properties))
        self.call("orGetDeviceProperties", ctypes.byref(found), device)
        return found

    def factories(self):
        found = []
        while True:
            info = Factory(size=ctypes.sizeof(Factory))
            if self.code("orGetFactoryInfo", len(found), ctypes.byref(info)):
                return found
            found.append(info)

    def operators(self):
        """The names of the operators that the plugin has kernels for."""
        kernels, count = ctypes.POINTER(OperatorKernel)(), ctypes.c_size_t()
        self.call("orGetOperatorKernels", ctypes.byref(kernels), ctypes.byref(count))
        return [kernels[i].name.decode() for i in range(count.value)]

    @contextlib.contextmanager
    def on(self, device):
        """Makes a device the current one of the thread."""
        before = self._get("orGetDevice", kind=ctypes.c_int)
        self.call("orSetDevice", device)
        try:
            yield
        finally:
            self.call("orSetDevice", before)

    def alloc(self, size, device=0):
        self.step("alloc", f"allocating {size} bytes on device {device}")
        with self.on(device):
            return self._get("orMalloc", size)

    def free(self, *addresses):
        for address in addresses:
            self.step("free", f"freeing memory at {address:#x}")
            self.call("orFree", address)

    def pinned(self, size):
        """Pinned host memory, as an array of bytes."""
        self.step("alloc_host", f"allocating {size} bytes of pinned memory")
        return (ctypes.c_ubyte * size).from_address(self._get("orMallocHost", size))

    def copy(self, to, source, size, stream=0):
        """Queues a copy on a stream; without one, waits for it."""
        self.step("copy", f"copying {size} bytes from {source:#x} to {to:#x}")
        if stream:
            self.call("orMemcpyAsync", to, source, size, 4, stream)
        else:
            self.call("orMemcpy", to, source, size, 4)

    def set(self, to, value, size, stream=0):
        self.step("set", f"setting {size} bytes at {to:#x} to {value}")
        if stream:
            self.call("orMemsetAsync", to, value, size, stream)
        else:
            self.call("orMemset", to, value, size)

    def write(self, to, data):
        """Copies bytes of ordinary host memory to the device."""
        source = ctypes.create_string_buffer(data, len(data))
        self.copy(to, ctypes.addressof(source), len(data))

    def read(self, source, size):
        into = ctypes.create_string_buffer(size)
        self.copy(ctypes.addressof(into), source, size)
        return into.raw

    def stream(self, device=0):
        with self.on(device):
            return self._get("orStreamCreate")

    def event(self, device=0):
        with self.on(device):
            return self._get("orEventCreate")

    def gate(self):
        """An event that the check completes itself."""
        return self._get("orEventCreateWithFlags", EXTERNAL)

    def open(self, gate):
        self.call("orEventSignal", gate, SUCCESS)

    def record(self, event, stream):
        self.call("orEventRecord", event, stream)

    def wait(self, stream, event):
        self.call("orStreamWaitEvent", stream, event)

    def kernel(self, stream, function, name="check"):
        """Queues a Python function that returns an error code."""
        self.step("compute", f"running the kernel {name!r}")
        fn, text = KernelFn(lambda _: function() or SUCCESS), ctypes.c_char_p(name.encode())
        self._kept.append((fn, text))
        launch = Launch(size=ctypes.sizeof(Launch), stream=stream, fn=fn, name=text)
        self.call("orLaunchKernelEx", ctypes.byref(launch))

    def mapped(self, address, size):
        """In a kernel: the bytes that it may use for the device's memory."""
        self.step("map", f"mapping {size} bytes at {address:#x}")
        found = ctypes.c_void_p()
        self.call("orMapForKernel", ctypes.byref(found), address, size)
        return (ctypes.c_ubyte * size).from_address(found.value)

    def synchronize(self, stream=0, device=0):
        """Waits for a stream, or for all of a device."""
        with self.on(device):
            if stream:
                self.call("orStreamSynchronize", stream)
            else:
                self.call("orDeviceSynchronize")

    def pending(self, stream):
        return self.code("orStreamQuery", stream) == NOT_READY

    def reset(self, device=0):
        self.step("reset", f"resetting device {device}")
        with self.on(device):
            self.call("orDeviceReset")


# What a failure's text names -> the function of the table.
_NAMES = (
    (
        r"\b(alloc|free|alloc_host|free_host|map|reset|properties|count_devices) of the device "
        r"factory",
        None,
    ),
    (r"\bcannot make \d+ devices", "create_devices"),
    (r"\bcounts -?\d+ devices|\bcannot count its devices", "count_devices"),
    (r"\b(Memcpy \w+|copy \w+)\b", "copy"),
    (r"\bMemset\b", "set"),
    (r"\baten::", "run"),
    (r"\bkernel ", "compute"),
)


def function_of(text):
    """The function of the plugin's table that a text of the library is about, or None."""
    for pattern, name in _NAMES:
        found = re.search(pattern, text)
        if found:
            return name or found[1]
    return None
