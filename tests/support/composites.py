"""A search for operators whose kernel reads the device's memory on the host.

Many operators have one composite kernel for all backends. Each is called with random arguments made
from its schema: on the CPU first, in a forked child; then, with those that the CPU took and some
that it refused, on the device, whose memory faults.

    python composites.py                # all of them, in half an hour
    python composites.py aten::range    # those whose names begin so
    python composites.py --write        # and writes the list that test_composites.py reads
"""

import argparse
import os
import random
import re
import resource
import select
import signal
import sys
import time
import warnings
from pathlib import Path

import torch

LIST = Path(__file__).with_suffix(".txt")
NAMESPACES = ("aten::", "quantized::", "sparse::")
TRIES, ENOUGH = 2000, 10  # calls on the CPU, and how many of them have to be taken
REFUSED = 10  # calls that the CPU refuses are made on the device, too: so many
SECONDS = 0.3  # of the processor, for an operator on the CPU
LIMIT = 60  # of time, for a child


def schemas():
    """By the operator's name with its overload."""
    return {
        f"{s.name}.{s.overload_name}" if s.overload_name else s.name: s
        for s in torch._C._jit_get_all_schemas()
    }


def is_composite(name):
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(name, "CompositeExplicitAutograd") or has(name, "CompositeImplicitAutograd")


def has_tensors(schema):
    return any("Tensor" in str(a.type) for a in [*schema.arguments, *schema.returns])


def generated():
    """Overloads with out= that PyTorch makes of the operator without: these call that and copy."""
    packaged = Path(torch.__file__).parent.parent / "torchgen/packaged/ATen/native"
    text = (packaged / "native_functions.yaml").read_text()
    lines = re.findall("autogen: *(.*)", text)
    return {f"aten::{name}" for line in lines for name in line.replace(" ", "").split(",")}


def composites():
    """The names of the operators that have tensors and one kernel for all backends."""
    left_out, known = generated(), schemas()
    return sorted(
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(NAMESPACES)
        and name not in left_out
        and name in known
        and has_tensors(known[name])
        and is_composite(name)
    )


def reads_list():
    """The names on the list, by whether the search has called them."""
    text = LIST.read_text()
    called, _, not_called = text.partition("# not called\n")
    return [
        {
            f"aten::{name}" if "::" not in name else name
            for line in part.splitlines()
            if not line.startswith("#")
            for name in line.split()
        }
        for part in (called, not_called)
    ]


# ---- arguments ----

DTYPES = [torch.float32] * 6 + [torch.int64] * 3
DTYPES += [torch.int32, torch.bool, torch.int8, torch.uint8, torch.float16, torch.bfloat16]
DTYPES += [torch.float64, torch.complex64]
INDICES = [torch.int64, torch.int64, torch.int32]
SHAPES = [(), (1,), (2,), (3,), (4,), (16,), (0,), (2, 2), (4, 4), (2, 3), (3, 4), (1, 4), (16, 16)]
SHAPES += [(2, 30), (2, 3, 4), (4, 4, 4), (1, 4, 4), (2, 30, 30), (1, 1, 4, 4), (2, 3, 4, 4)]
SHAPES += [(2, 4, 4, 4), (1, 3, 3, 2), (1, 2, 4, 4, 4)]
TEXTS = {
    "mode": ["mean", "sum", "constant", "reflect", "nearest", "bilinear", "reduced", "complete"],
    "reduce": ["sum", "mean", "amax", "amin", "prod"],
    "ord": ["fro", "nuc"],
    "p": ["fro", "nuc"],
    "equation": ["ij,jk->ik", "ii->i", "i,i->", "ij->ji"],
    "UPLO": ["L", "U"],
    "interpolation": ["linear", "lower"],
    "side": ["left", "right"],
    "rounding_mode": ["floor", "trunc"],
    "indexing": ["ij", "xy"],
    "norm": ["forward", "ortho", "backward"],
    "driver": ["gels", "gelsd"],
    "approximate": ["none", "tanh"],
    "padding": ["valid", "same"],
}


class CannotMake(Exception):
    """An argument of a type that is not made here."""


class Arguments:
    """The same for one seed, on any device."""

    def __init__(self, seed, device):
        self.device = device
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        choice = self.random.choice
        self.shape, self.dtype = choice(SHAPES), choice(DTYPES)
        # How often a tensor is like the others, and how often an argument has its default.
        self.same_shape, self.same_dtype = choice([0, 0.5, 0.9, 1]), choice([0.5, 0.9, 1])
        self.defaults = choice([0, 0.5, 0.9, 1])

    def of(self, schema):
        positional, named = [], {}
        for argument in schema.arguments:
            given = not argument.has_default_value() or self.random.random() >= self.defaults
            value = self._value_of(argument) if given else argument.default_value
            if not argument.kwarg_only:
                positional.append(value)
            elif given:
                named[argument.name] = value
        return positional, named

    def _value_of(self, argument):
        choice, optional = self.random.choice, "Optional" in str(argument.type)
        real = str(argument.real_type)
        if "ScalarType" in real:
            return choice([None, *DTYPES] if optional else DTYPES)
        if "Layout" in real:
            return None if optional else torch.strided
        if "MemoryFormat" in real:
            return choice([None, torch.contiguous_format] if optional else [torch.preserve_format])
        if argument.name == "device":
            return torch.device(self.device)
        if argument.name == "pin_memory":
            return None
        return self._make(argument.type, argument.name, argument.N)

    def _make(self, kind, name, length=None):
        choice, text = self.random.choice, str(kind)
        if text == "Tensor":
            return self._tensor(name)
        if text.startswith("Optional["):
            return choice([None, self._make(kind.getElementType(), name, length)])
        if text.startswith("List["):
            if length is None or self.random.random() < 0.2:
                length = choice([0, 1, 1, 2, 2, 2, 3, 4])
            return [self._make(kind.getElementType(), name) for _ in range(length)]
        values = {
            "int": [0, 1, 2] if "reduction" in name else [0, 1, 1, 1, 2, 2, 3, 4, -1, 8, 16],
            "float": [0.0, 0.5, 1.0, 2.0, 1e-5, 0.16],
            "number": [0, 1, 2, 0.5, 3.0],
            "bool": [False, True],
            "str": TEXTS.get(name, ["mean", "sum", "linear", "none", "nearest", "tanh"]),
            "Device": [torch.device(self.device)],
            "Generator": [torch.Generator(self.device)],
        }.get({"SymInt": "int", "Scalar": "number"}.get(text, text))
        if values is None:
            raise CannotMake(text)
        return choice(values)

    def _tensor(self, name):
        choice = self.random.choice
        shape = self.shape if self.random.random() < self.same_shape else choice(SHAPES)
        dtype = self.dtype if self.random.random() < self.same_dtype else choice(DTYPES)
        if re.search("index|indices|offset|lengths|target|sobol|quasi|repeats", name.lower()):
            dtype = choice([dtype, *INDICES])
        if "mask" in name.lower():
            dtype, shape = choice([dtype, torch.bool]), choice([shape, shape[:1]])
        if dtype.is_floating_point or dtype.is_complex:
            tensor = torch.randn(shape).to(dtype)
        elif dtype is torch.bool:
            tensor = torch.randn(shape) > 0
        else:
            tensor = torch.randint(0, choice([1, 2, 4, 10]), shape).to(dtype)
        return tensor.to(self.device)


# ---- the search ----


def call(name, schema, seed, device):
    """Whether the operator has taken its arguments."""
    namespace, rest = name.split("::")
    base, _, overload = rest.partition(".")
    operator = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    try:
        positional, named = Arguments(seed, device).of(schema)
        operator(*positional, **named)
        if device != "cpu":
            torch.accelerator.synchronize()
        return True
    except Exception:
        return False


def in_child(body):
    """What `body(say)` said in a forked child, a line each; what that wrote on stderr; the signal
    that has ended it, or 0. No device has been used here, so the child may."""
    reads, writes = os.pipe()
    error = os.memfd_create("stderr")
    pid = os.fork()
    if not pid:
        os.dup2(error, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        torch.set_num_threads(1)
        body(lambda line: os.write(writes, f"{line}\n".encode()))
        os._exit(0)
    os.close(writes)
    said, end = b"", time.monotonic() + LIMIT
    while True:
        if not select.select([reads], [], [], max(0, end - time.monotonic()))[0]:
            os.kill(pid, signal.SIGKILL)
            end = time.monotonic() + LIMIT
        part = os.read(reads, 1 << 16)
        if not part:
            break
        said += part
    os.close(reads)
    status = os.waitpid(pid, 0)[1]
    with open(error, "rb") as file:
        file.seek(0)
        written = file.read().decode(errors="replace")
    return said.decode().split("\n"), written, status & 0x7F


def on_the_cpu(name, schema):
    """Seeds whose arguments the CPU takes, and those that it refuses. What ends a process there,
    by bad indices for one, says nothing of a device."""
    taken, refused, begin = [], [], 0
    for _ in range(5):

        def body(say, begin=begin):
            stop, count = time.process_time() + SECONDS, 0
            for seed in range(begin, TRIES):
                say(f"? {seed}")
                good = call(name, schema, seed, "cpu")
                say(f"{'+' if good else '-'} {seed}")
                count += good
                if count == ENOUGH or time.process_time() > stop:
                    break

        lines, _, ended_by = in_child(body)
        told = [(line[0], int(line[2:])) for line in lines if line]
        taken += [seed for sign, seed in told if sign == "+"]
        refused += [seed for sign, seed in told if sign == "-"]
        if not ended_by or not told:
            break
        begin = told[-1][1] + 1
    return taken[:ENOUGH], refused[:REFUSED]


def search(names):
    """Yields (name, how many calls the CPU took, the report of a host access or None)."""
    known = schemas()
    for name in names:
        taken, refused = on_the_cpu(name, known[name])

        def body(say, name=name, seeds=(*taken, *refused)):
            for seed in seeds:
                call(name, known[name], seed, "openreg")

        written = in_child(body)[1]
        reports = [line for line in written.splitlines() if line.startswith("openreg: SIGSEGV")]
        yield name, len(taken), reports[0] if reports else None


def write_list(called, not_called):
    def filled(names):
        line = ""
        for name in names:
            name = name.removeprefix("aten::")
            if len(line) + len(name) >= 100:
                yield line
                line = ""
            line = f"{line} {name}".strip()
        yield line

    version = torch.__version__.split("+")[0]
    head = f"# Composite operators of PyTorch {version}: tests/support/composites.py --write"
    LIST.write_text("\n".join([head, *filled(called), "# not called", *filled(not_called), ""]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="the beginnings of names; default: all")
    parser.add_argument("--write", action="store_true", help="write the list, if all are searched")
    options = parser.parse_args()
    names = [n for n in composites() if n.startswith(tuple(options.names) or "")]
    if options.write and options.names:
        parser.error("--write: the list is of all of them")
    called, not_called, found = [], [], []
    for name, taken, report in search(names):
        (called if taken else not_called).append(name)
        if report:
            found.append(name)
            print(f"{name}: {report}", flush=True)
    print(f"{len(called)} called, {len(not_called)} not called, {len(found)} read on the host")
    if options.write:
        write_list(called, not_called)
    return bool(found)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
