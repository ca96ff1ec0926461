"""Compiles Triton kernels to C++ without a driver, many in one library, and calls them on CPU
tensors."""

import ctypes
import hashlib
import subprocess
import warnings

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

from torch_openreg._triton import cpp

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from triton._C.libtriton import ir

TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e5m2: "fp8e5",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}


def _signature(value):
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def ttir(kernel, arguments, constants, **options):
    """The TTIR of a kernel, as the backend for a card of capability 8.0 gets it."""
    names = kernel.arg_names
    given = iter(arguments)
    signature = {n: "constexpr" if n in constants else _signature(next(given)) for n in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    target = GPUTarget("cuda", 80, 32)
    backend = make_backend(target)
    floats = ("fp8e5", "fp8e4nv", "fp8e4b15")
    options = backend.parse_options({"supported_fp8_dtypes": floats, **options})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(kernel, signature, values)
    functions = backend.get_codegen_implementation(options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = source.make_ir(target, options, functions, backend.get_module_map(), context)
        return backend.make_ttir(module, {}, options, 80).str()


def build(texts, flags, folder):
    """A library of C++ sources, whose entries get the number of their source behind their name."""
    parts = ['#include "trace.h"']
    for at, text in enumerate(texts):
        for entry in ("openreg_entry", "openreg_trace"):
            text = text.replace(entry, f"{entry}_{at}")
        parts.append(f"namespace source_{at} {{\n{text}\n}}")
    source = "\n".join(parts)
    path = folder / hashlib.sha256((source + str(flags)).encode()).hexdigest()[:16]
    path.with_suffix(".cpp").write_text(source)
    command = ["g++", *cpp.FLAGS, *flags, path.with_suffix(".cpp"), "-o", path.with_suffix(".so")]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(path.with_suffix(".so")))


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
def _follow(pointer, place):
    return pointer


def pack(source, arguments, grid, order=0):
    """The arguments of an entry: addresses, and numbers that end with the grid and the order of the
    programs. The CPU's memory has one address for the program and the kernel."""
    pointers, numbers = [], []
    for kind, value in zip(source.arguments, arguments, strict=False):
        if kind.kind == "pointer":
            pointers.append(value.data_ptr())
        elif kind.kind == "float":
            numbers.append(ctypes.c_int64.from_buffer_copy(ctypes.c_double(value)).value)
        else:
            numbers.append(value)
    numbers += [*[*grid, 1, 1][:3], order]
    pointers += [*pointers, ctypes.cast(_follow, ctypes.c_void_p).value]
    return (ctypes.c_void_p * len(pointers))(*pointers), (ctypes.c_int64 * len(numbers))(*numbers)


class Hit(ctypes.Structure):
    _fields_ = [
        ("offset", ctypes.c_int64),
        ("argument", ctypes.c_int32),
        ("site", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("program", ctypes.c_int64),
        ("other", ctypes.c_int64),
    ]


class Shadow(ctypes.Structure):
    _fields_ = [
        ("begin", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("shift", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("writer", ctypes.c_void_p),
        ("reader", ctypes.c_void_p),
        ("host", ctypes.c_void_p),
    ]


FIND = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)


class Record(ctypes.Structure):
    _fields_ = [
        ("tensors", ctypes.POINTER(Shadow)),
        ("count", ctypes.c_int64),
        ("find", FIND),
        ("owner", ctypes.c_void_p),
        ("only", ctypes.c_int64),
        ("except_", ctypes.c_int64),
        ("kinds", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("word", ctypes.c_void_p),
        ("stop", ctypes.c_int64),
        ("bad", ctypes.c_int64),
        ("races", ctypes.c_int64),
        ("first_bad", Hit),
        ("first_race", Hit),
        ("program", ctypes.c_int64),
        ("blind", ctypes.c_void_p),
    ]


class Trace:
    """What a trace tells of tensors: `reads` and `writes` by element, the first faults."""

    def __init__(self, source, function, arguments, grid, readable=True):
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        words = [torch.zeros((2, t.numel()), dtype=torch.int32) for t in tensors]
        shadows = (Shadow * len(tensors))()
        for shadow, tensor, word in zip(shadows, tensors, words, strict=False):
            shift = tensor.element_size().bit_length() - 1
            host = tensor.data_ptr() if readable else None
            shadow.begin, shadow.bytes, shadow.shift = tensor.data_ptr(), tensor.nbytes, shift
            shadow.writer, shadow.reader, shadow.host = word[0].data_ptr(), word[1].data_ptr(), host
        blind = torch.zeros(len(source.sites), dtype=torch.uint8)
        nowhere = FIND(lambda record, address: -1)
        anything = {"only": -1, "except_": -1, "kinds": 7}
        self.record = Record(shadows, len(tensors), nowhere, blind=blind.data_ptr(), **anything)
        function(*pack(source, arguments, grid), ctypes.byref(self.record))
        self.writes = [word[0] != 0 for word in words]
        self.reads = [word[1] != 0 for word in words]
        self.blind = blind.bool().tolist()
