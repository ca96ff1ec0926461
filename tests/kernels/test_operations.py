"""Each operation of Triton's language, compiled to C++, against eager PyTorch: at -O0, where the
compiler changes nothing, and at -O3."""

import ctypes
import functools
import re
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

import triton_programs  # noqa: E402
from triton.language.extra.cuda import libdevice  # noqa: E402

from torch_openreg._triton import cpp  # noqa: E402
from torch_openreg._triton.operations import OPERATIONS  # noqa: E402

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
FLOAT8 = (torch.float8_e5m2, torch.float8_e4m3fn)
CASES = {}


class Case:
    """A kernel, its arguments, and what is expected of the tensors that it writes."""

    def __init__(self, kernel, make, grid=(1,), constants=None, options=None):
        self.kernel, self.make, self.grid = kernel, make, grid
        self.constants, self.options = constants or {}, options or {}
        torch.manual_seed(0)
        self.arguments, self.expected = make()
        text = triton_programs.ttir(kernel, self.arguments, self.constants, **self.options)
        self.source = cpp.generate(text)

    def check(self, function):
        arguments = [a.clone() if isinstance(a, torch.Tensor) else a for a in self.arguments]
        function(*triton_programs.pack(self.source, arguments, self.grid))
        for at, (value, tolerance) in self.expected.items():
            result = arguments[at]
            if value.dtype in FLOAT8:
                result, value = result.view(torch.uint8), value.view(torch.uint8)
            torch.testing.assert_close(
                result, value, rtol=tolerance, atol=tolerance, equal_nan=True
            )


def case(name, kernel, make, **others):
    CASES[name] = kernel, make, others


@pytest.fixture(scope="module")
def cases():
    return {name: Case(kernel, make, **others) for name, (kernel, make, others) in CASES.items()}


@pytest.fixture(scope="module")
def entry(cases, tmp_path_factory):
    """Gives the entry of a case among others, which are compiled together."""
    libraries = {}

    def find(name, group):
        names = groups()[group]
        if group not in libraries:
            texts, folder = [cases[n].source.run for n in names], tmp_path_factory.mktemp("triton")
            libraries[group] = triton_programs.build(texts, [group.split()[0]], folder)
        return libraries[group][f"openreg_entry_{names.index(name)}"]

    return find


def groups():
    """All at -O0; at -O3, which is slow to compile, each kernel with one type."""
    first = {}
    for name in CASES:
        first.setdefault(name.split("-torch")[0], name)
    quick = list(first.values())
    rest = [name for name in CASES if name not in quick]
    return {"-O0": list(CASES), "-O3": quick, "-O3 the rest": rest}


# ---- arithmetic ----


@triton.jit
def arithmetic(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, a + b)
    tl.store(out + N + i, a - b)
    tl.store(out + 2 * N + i, a * b)
    tl.store(out + 3 * N + i, -a)
    tl.store(out + 4 * N + i, tl.maximum(a, b))
    tl.store(out + 5 * N + i, tl.minimum(a, b))
    tl.store(out + 6 * N + i, tl.where(a > b, a, b * 2))
    tl.store(out + 7 * N + i, tl.abs(a))
    tl.store(out + 8 * N + i, a % b)


def _arithmetic(dtype, count=64):
    def make():
        if dtype.is_floating_point:
            a, b = torch.randn(count).to(dtype), torch.randn(count).to(dtype)
            a[0] = a[1] = b[1] = b[2] = float("nan")
        else:
            information = torch.iinfo(dtype)
            a = torch.randint(information.min, information.max, (count,), dtype=dtype)
            b = torch.randint(1, 100, (count,), dtype=dtype)
        results = [a + b, a - b, a * b, -a]
        results += [torch.fmax(a, b), torch.fmin(a, b)]
        results += [torch.where(a > b, a, b * 2), a.abs(), torch.fmod(a, b)]
        return [a, b, torch.zeros(9 * count, dtype=dtype)], {2: (torch.cat(results), 0)}

    return make


for _dtype in (*FLOATS, *INTEGERS):
    case(f"arithmetic-{_dtype}", arithmetic, _arithmetic(_dtype), constants={"N": 64})


@triton.jit
def unfused(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, a * b - a)


def _unfused():
    a, b = torch.randn(256), torch.randn(256)
    return [a, b, torch.zeros(256)], {2: (a * b - a, 0)}


case("unfused", unfused, _unfused, constants={"N": 256})


@triton.jit
def integers(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, a // b)
    tl.store(out + N + i, a & b)
    tl.store(out + 2 * N + i, a | b)
    tl.store(out + 3 * N + i, a ^ b)
    tl.store(out + 4 * N + i, ~a)
    tl.store(out + 5 * N + i, a << (b & 7))
    tl.store(out + 6 * N + i, a >> (b & 7))
    tl.store(out + 7 * N + i, (a == b).to(out.dtype.element_ty))
    tl.store(out + 8 * N + i, (a < b).to(out.dtype.element_ty))
    tl.store(out + 9 * N + i, (a >= b).to(out.dtype.element_ty))


def _integers(dtype):
    def make():
        information = torch.iinfo(dtype)
        a = torch.randint(information.min, information.max, (64,), dtype=dtype)
        b = torch.randint(1, 100, (64,), dtype=dtype)
        b[:4] = a[:4] = torch.tensor([1, 2, 3, 4])
        results = [torch.div(a, b, rounding_mode="trunc"), a & b, a | b, a ^ b, ~a]
        results += [a << (b & 7), a >> (b & 7), a == b, a < b, a >= b]
        out = torch.cat([result.to(dtype) for result in results])
        return [a, b, torch.zeros(640, dtype=dtype)], {2: (out, 0)}

    return make


for _dtype in INTEGERS:
    case(f"integers-{_dtype}", integers, _integers(_dtype), constants={"N": 64})


@triton.jit
def functions_of_floats(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    p = tl.abs(a) + 0.5
    tl.store(out + i, tl.exp(a))
    tl.store(out + N + i, tl.exp2(a))
    tl.store(out + 2 * N + i, tl.log(p))
    tl.store(out + 3 * N + i, tl.log2(p))
    tl.store(out + 4 * N + i, tl.sqrt(p))
    tl.store(out + 5 * N + i, tl.rsqrt(p))
    tl.store(out + 6 * N + i, tl.sin(a))
    tl.store(out + 7 * N + i, tl.cos(a))
    tl.store(out + 8 * N + i, tl.erf(a))
    tl.store(out + 9 * N + i, tl.floor(a))
    tl.store(out + 10 * N + i, tl.ceil(a))
    tl.store(out + 11 * N + i, tl.sigmoid(a))
    tl.store(out + 12 * N + i, tl.fma(a, p, a))
    tl.store(out + 13 * N + i, libdevice.tanh(a))
    tl.store(out + 14 * N + i, libdevice.pow(p, a))
    tl.store(out + 15 * N + i, libdevice.atan2(a, p))
    tl.store(out + 16 * N + i, libdevice.log1p(p))
    tl.store(out + 17 * N + i, tl.clamp(a, -1.0, 1.0))
    tl.store(out + 18 * N + i, a / p)


def _functions(dtype):
    def make():
        a = torch.cat([torch.randn(64) * 3, torch.linspace(-100, 100, 64)]).to(dtype)
        p = a.abs() + 0.5
        t = torch
        results = [t.exp(a), t.exp2(a), t.log(p), t.log2(p), t.sqrt(p), t.rsqrt(p), t.sin(a)]
        results += [t.cos(a), t.erf(a), t.floor(a), t.ceil(a), t.sigmoid(a)]
        results += [a.double() * p.double() + a.double(), t.tanh(a), t.pow(p, a), t.atan2(a, p)]
        results += [t.log1p(p), a.clamp(-1, 1), a / p]
        out = t.cat([result.to(dtype) for result in results])
        tolerance = 1e-14 if dtype == torch.float64 else 2e-6
        return [a, torch.zeros(19 * 128, dtype=dtype)], {1: (out, tolerance)}

    return make


for _dtype in (torch.float32, torch.float64):
    case(f"functions-{_dtype}", functions_of_floats, _functions(_dtype), constants={"N": 128})


@triton.jit
def convert(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


def _convert(source, target):
    def make():
        if source in FLOAT8:
            a = torch.arange(256).to(torch.uint8).view(source)
        elif source.is_floating_point and target.is_floating_point:
            a = torch.cat([torch.randn(128), torch.randn(96) * 300, torch.randn(24) * 1e-6])
            ends = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 448, 465, 1e9]
            a = torch.cat([a, torch.tensor(ends)]).to(source)
        elif source.is_floating_point:
            a = torch.randn(256).mul(30).to(source)
            a = a.abs() if target == torch.uint8 else a
        else:
            information = torch.iinfo(source)
            a = torch.randint(information.min, information.max, (256,), dtype=source)
        return [a, torch.zeros(256, dtype=target)], {1: (a.to(target), 0)}

    return make


for _source in (*FLOATS, *FLOAT8, torch.int8, torch.int64, torch.int32):
    for _target in (*FLOATS, *FLOAT8, torch.int8, torch.int32):
        if _source == _target or (_source in FLOAT8 and not _target.is_floating_point):
            continue
        if _target in FLOAT8 and (not _source.is_floating_point or _source in FLOAT8):
            continue
        _name = f"convert-{_source}-{_target}"
        case(_name, convert, _convert(_source, _target), constants={"N": 256})


@triton.jit
def unsigned(x, y, out, floats, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i).to(tl.uint32, bitcast=True), tl.load(y + i).to(tl.uint32, bitcast=True)
    tl.store(out + i, a // b)
    tl.store(out + N + i, a % b)
    tl.store(out + 2 * N + i, a >> 3)
    tl.store(out + 3 * N + i, (a > b).to(tl.int32))
    tl.store(out + 4 * N + i, tl.umulhi(a, b))
    tl.store(out + 5 * N + i, tl.maximum(a, b))
    tl.store(floats + i, a.to(tl.float64))
    tl.store(floats + N + i, (a.to(tl.float64) * 0.5).to(tl.uint32).to(tl.float64))
    tl.store(floats + 2 * N + i, libdevice.brev(tl.load(x + i)).to(tl.float64))


def _unsigned():
    x, y = torch.randint(-(2**31), 2**31, (2, 64), dtype=torch.int32)
    a, b = x.long() & 0xFFFFFFFF, y.long() & 0xFFFFFFFF
    results = [
        a // b,
        a % b,
        a >> 3,
        a > b,
        torch.tensor([(p * q) >> 32 for p, q in zip(a.tolist(), b.tolist(), strict=True)]),
    ]
    results += [torch.maximum(a, b)]
    out = torch.cat([((r.long() + 2**31) % 2**32 - 2**31).int() for r in results])
    brev = [int(f"{value:032b}"[::-1], 2) for value in a.tolist()]
    brev = torch.tensor([v - 2**32 if v >= 2**31 else v for v in brev])
    floats = torch.cat([a.double(), (a.double() / 2).floor(), brev.double()])
    arguments = [x, y, torch.zeros(384).int(), torch.zeros(192).double()]
    return arguments, {2: (out, 0), 3: (floats, 0)}


case("unsigned", unsigned, _unsigned, constants={"N": 64})


@triton.jit
def libdevice_of_large_numbers(x, n, out, whole, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(n + i)
    tl.store(out + i, libdevice.norm3d(a, a, -a))
    tl.store(out + N + i, libdevice.norm4d(a, a, -a, a))
    tl.store(out + 2 * N + i, libdevice.rnorm3d(a, a, -a))
    tl.store(out + 3 * N + i, libdevice.rnorm4d(a, a, -a, a))
    tl.store(whole + i, libdevice.mul24(b, b + 1))
    unsigned = b.to(tl.uint32, bitcast=True)
    tl.store(whole + N + i, libdevice.mul24(unsigned, unsigned + 1))


@triton.jit
def libdevice_of_half_turns(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    sin, cos = libdevice.sinpi(a), libdevice.cospi(a)
    tl.store(out + i, sin)
    tl.store(out + N + i, cos)
    tl.store(out + 2 * N + i, tl.where(sin == 0, 1, tl.where(cos == 0, 2, 0)))


def _half_turns(dtype):
    x = torch.tensor([0, 1, -1, 2, 7, 1e6, 0.5, -0.5, 1.5, 2.5, 0.25, -0.75, 1.3, 7.9, 1e-30])
    x = torch.cat([x, torch.tensor([float("inf")])]).to(dtype)
    turn = (x.double() % 2 * torch.pi).masked_fill(x.isinf(), float("nan"))
    zeros = torch.tensor([1.0] * 6 + [2.0] * 4 + [0.0] * 6)  # 1: of the sine, 2: of the cosine
    out = torch.cat([turn.sin(), turn.cos(), zeros]).to(dtype)
    return [x, torch.zeros(48, dtype=dtype)], {1: (out, 2e-7)}


for _dtype in (torch.float32, torch.float64):
    _make = functools.partial(_half_turns, _dtype)
    case(f"half turns-{_dtype}", libdevice_of_half_turns, _make, constants={"N": 16})


def _large_numbers():
    x = torch.tensor([1.5, 1e30, 1e-30, 3e38 / 4])
    n = torch.tensor([7, -3, 0x7F123456, -(2**24) - 5])
    a, low = x.double().abs(), [(n + k) & 0xFFFFFF for k in (0, 1)]
    signed = [torch.where(k >= 2**23, k - 2**24, k) for k in low]
    out = torch.cat([a * 3**0.5, a * 2, 1 / (a * 3**0.5), 1 / (a * 2)]).float()
    whole = torch.cat([signed[0] * signed[1], low[0] * low[1]])
    whole = (whole + 2**31) % 2**32 - 2**31
    arguments = [x, n.int(), torch.zeros(16), torch.zeros(8).int()]
    return arguments, {2: (out, 1e-6), 3: (whole.int(), 0)}


case(
    "libdevice_of_large_numbers",
    libdevice_of_large_numbers,
    _large_numbers,
    constants={"N": 4},
)


@triton.jit
def conditions(x, out, N: tl.constexpr):
    """Tensors of bool, and NaN in every comparison."""
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = tl.load(x + N - 1 - i)
    tl.store(out + i, a < b)
    tl.store(out + N + i, a <= b)
    tl.store(out + 2 * N + i, a == b)
    tl.store(out + 3 * N + i, a != b)
    tl.store(out + 4 * N + i, not a >= b)
    tl.store(out + 5 * N + i, (a > 0) & (b > 0) | (a == a))
    tl.store(out + 6 * N + i, tl.load(out + i) ^ True)
    tl.store(out + 7 * N + i, (tl.sum((a > 0).to(tl.int32)) > 3) & (i >= 0))


def _conditions():
    a = torch.randn(16)
    a[2] = a[5] = float("nan")
    a[7] = a[8]
    b = a.flip(0)
    some = torch.full((16,), bool((a > 0).sum() > 3))
    results = [
        a < b,
        a <= b,
        a == b,
        a != b,
        ~(a >= b),
        (a > 0) & (b > 0) | (a == a),
        ~(a < b),
        some,
    ]
    return [a, torch.zeros(128, dtype=torch.bool)], {1: (torch.cat(results), 0)}


case("conditions", conditions, _conditions, constants={"N": 16})


# ---- reductions and scans ----


@triton.jit
def _two(a, i, b, j):
    return tl.maximum(a, b), i + j


@triton.jit
def reductions(x, out, index, AXIS: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    R: tl.constexpr = N if AXIS == 0 else M
    a = tl.load(x + i)
    o = tl.arange(0, R)
    tl.store(out + o, tl.sum(a, AXIS))
    tl.store(out + R + o, tl.max(a, AXIS))
    tl.store(out + 2 * R + o, tl.min(a, AXIS))
    tl.store(index + o, tl.argmax(a, AXIS))
    tl.store(index + R + o, tl.argmin(a, AXIS))
    best, total = tl.reduce((a, (a * 4).to(tl.int32)), AXIS, _two)
    tl.store(out + 3 * R + o, best)
    tl.store(index + 2 * R + o, total)
    tl.store(out + 4 * R, tl.sum(a))
    tl.store(index + 3 * R, tl.xor_sum((a * 4).to(tl.int32).reshape(M * N), 0))


def _reductions(dtype, axis, shape):
    def make():
        a = (torch.randint(-40, 40, shape) / 4).to(dtype)
        if not dtype.is_floating_point:
            a = torch.randint(-40, 40, shape, dtype=dtype)
        r = shape[1 - axis]
        fours = (a * 4).int()
        total = a.sum() if dtype.is_floating_point else a.sum().to(dtype)
        out = torch.cat([a.sum(axis), a.amax(axis), a.amin(axis), a.amax(axis), total[None]])
        exclusive = fours.flatten()[0]
        for value in fours.flatten()[1:]:
            exclusive = exclusive ^ value
        index = [a.argmax(axis), a.argmin(axis), fours.sum(axis), exclusive[None]]
        arguments = [a, torch.zeros(4 * r + 1, dtype=dtype), torch.zeros(3 * r + 1).int()]
        return arguments, {1: (out.to(dtype), 1e-6), 2: (torch.cat(index).int(), 0)}

    return make


for _dtype in (torch.float32, torch.int32, torch.float64):
    for _axis in (0, 1):
        for _shape in ((4, 64), (16, 8)):
            _constants = {"AXIS": _axis, "M": _shape[0], "N": _shape[1]}
            _name = f"reductions-{_dtype}-{_axis}-{_shape}"
            case(_name, reductions, _reductions(_dtype, _axis, _shape), constants=_constants)


@triton.jit
def _linear(a, b, c, d):
    return a * c, b * c + d


@triton.jit
def scans(x, out, AXIS: tl.constexpr, REVERSE: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    a = tl.load(x + i)
    tl.store(out + i, tl.cumsum(a, AXIS, REVERSE))
    tl.store(out + M * N + i, tl.cumprod(a, AXIS, REVERSE))
    first, second = tl.associative_scan((a, a * 0.5), AXIS, _linear, REVERSE)
    tl.store(out + 2 * M * N + i, first)
    tl.store(out + 3 * M * N + i, second)


def _scans(axis, reverse):
    def make():
        a = torch.rand(16, 32) + 0.5
        b = a.flip(axis) if reverse else a
        second, rows = [], b.unbind(axis)
        for row in rows:
            second.append(row * 0.5 if not second else second[-1] * row + row * 0.5)
        results = [b.cumsum(axis), b.cumprod(axis), b.cumprod(axis), torch.stack(second, axis)]
        results = [result.flip(axis) if reverse else result for result in results]
        return [a, torch.zeros(4 * 512)], {1: (torch.cat([r.flatten() for r in results]), 1e-4)}

    return make


for _axis in (0, 1):
    for _reverse in (False, True):
        _constants = {"AXIS": _axis, "REVERSE": _reverse, "M": 16, "N": 32}
        case(f"scans-{_axis}-{_reverse}", scans, _scans(_axis, _reverse), constants=_constants)


@triton.jit
def long_scans(x, out, REVERSE: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    tl.store(out + i, tl.cumsum(a, 0, REVERSE))
    tl.store(out + N + i, tl.cumprod(a, 0, REVERSE))


def _long_scans(dtype, reverse):
    """Rounded for each element, a sum stays where an element is half of its last bit."""

    def make():
        a = (1 + torch.rand(2048) / 1024).to(dtype)
        sums = a.flip(0).float().cumsum(0) if reverse else a.float().cumsum(0)
        products = a.flip(0).float().cumprod(0) if reverse else a.float().cumprod(0)
        results = [result.flip(0) if reverse else result for result in (sums, products)]
        return [a, torch.zeros(4096, dtype=dtype)], {1: (torch.cat(results).to(dtype), 2**-9)}

    return make


for _dtype in (torch.float16, torch.bfloat16):
    for _reverse in (False, True):
        _make, _constants = _long_scans(_dtype, _reverse), {"REVERSE": _reverse, "N": 2048}
        case(f"long-scans-{_dtype}-{_reverse}", long_scans, _make, constants=_constants)


@triton.jit
def plus(a, b):
    return a + b


@triton.jit
def long_sums(x, out, N: tl.constexpr):
    i, rows = tl.arange(0, N), tl.arange(0, 4)
    tl.store(out + rows, tl.reduce(tl.load(x + rows[:, None] * N + i), 1, plus))
    tl.store(out + 4 + rows, tl.reduce(tl.load(x + i[:, None] * 4 + rows), 0, plus))
    tl.store(out + 8, tl.reduce(tl.load(x + i), 0, plus))


def _long_sums(dtype):
    """As for scans, where the sum stays at 256 or at 2048."""

    def make():
        a = (1 + torch.rand(4 * 16384) / 1024).to(dtype)
        wide = a.float()
        sums = [wide.view(4, -1).sum(1), wide.view(-1, 4).sum(0), wide[:16384].sum()[None]]
        return [a, torch.zeros(9, dtype=dtype)], {1: (torch.cat(sums).to(dtype), 2**-9)}

    return make


for _dtype in (torch.float16, torch.bfloat16):
    case(f"long-sums-{_dtype}", long_sums, _long_sums(_dtype), constants={"N": 16384})


@triton.jit
def towards_zero(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    to = out.dtype.element_ty
    tl.store(out + i, tl.load(x + i).to(to, fp_downcast_rounding="rtz"))


def _towards_zero(dtype):
    def make():
        about = torch.finfo(dtype)
        special = [0.0, -0.0, 1e-30, -1e-30, about.max * 1.001, -about.max * 1.001]
        x = torch.randn(1024) * torch.tensor(2.0).pow(torch.randint(-24, 8, (1024,)))
        x[: len(special)] = torch.tensor(special)
        steps = about.eps * 2.0 ** (torch.frexp(x)[1] - 1).double()
        steps = steps.clamp(min=about.smallest_normal * about.eps)
        expected = (torch.trunc(x.double() / steps) * steps).clamp(about.min, about.max)
        return [x, torch.zeros(1024, dtype=dtype)], {1: (expected.float().to(dtype), 0)}

    return make


for _dtype in (torch.float16, torch.bfloat16, torch.float8_e5m2):
    case(f"towards-zero-{_dtype}", towards_zero, _towards_zero(_dtype), constants={"N": 1024})


@triton.jit
def scatters(x, index, out, sums, loaded, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    at = tl.load(index + m * N + n)
    rows = tl.broadcast_to(m, (M, N))
    tl.store(out + at, rows)
    tl.atomic_add(sums + at, tl.broadcast_to(tl.load(x + m), (M, N)))
    tl.store(loaded + m * N + n, tl.load(x + at, mask=at % 2 == 0, other=rows))


def _scatters():
    """Addresses without a gap between rows, and values that are the same along a row."""
    x, index = torch.randint(0, 1000, (128,)).int(), torch.randperm(128).int()
    rows, at = torch.arange(8).repeat_interleave(16).int(), index.long()
    zeros, results = torch.zeros(128).int(), {}
    results[2] = zeros.index_put((at,), rows), 0
    results[3] = zeros.index_put((at,), x[:8].repeat_interleave(16)), 0
    results[4] = torch.where(at % 2 == 0, x[at], rows), 0
    return [x, index, zeros, zeros.clone(), zeros.clone()], results


case("scatters", scatters, _scatters, constants={"M": 8, "N": 16})


# ---- shapes ----


@triton.jit
def shapes(x, out, M: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    flat = tl.arange(0, M * N)
    transposed = tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
    a = tl.load(x + i)
    S: tl.constexpr = M * N
    tl.store(out + transposed, tl.trans(a))
    tl.store(out + S + flat, tl.reshape(tl.trans(a), (S,)))
    left, right = tl.split(tl.reshape(a, (M, N // 2, 2)))
    half = tl.arange(0, M)[:, None] * (N // 2) + tl.arange(0, N // 2)[None, :]
    tl.store(out + 2 * S + half, left + right)
    tl.store(
        out + 3 * S + flat, tl.interleave(tl.reshape(left, (S // 2,)), tl.reshape(right, (S // 2,)))
    )
    tl.store(out + 4 * S + flat, tl.ravel(tl.join(left, right * 2)))
    tl.store(out + 5 * S + i, tl.broadcast_to(tl.sum(a, 1)[:, None], (M, N)) + a)
    tl.store(out + 6 * S + i, tl.flip(a, 1))
    tl.store(
        out + 7 * S + flat,
        tl.cat(tl.reshape(left, (S // 2,)), tl.reshape(right, (S // 2,)), can_reorder=True),
    )
    tl.store(out + 8 * S + flat, tl.ravel(tl.permute(tl.reshape(a, (M, N // 4, 4)), (2, 0, 1))))


def _shapes(dtype):
    def make():
        a = torch.arange(512).reshape(16, 32).to(dtype)
        pairs = a.reshape(16, 16, 2)
        left, right = pairs.unbind(-1)
        results = [a.T, a.T, torch.cat([(left + right).flatten(), torch.zeros(256)]), a]
        results += [torch.stack([left, right * 2], -1), a.sum(1, keepdim=True).to(dtype) + a]
        results += [a.flip(1), torch.cat([left.flatten(), right.flatten()])]
        results += [a.reshape(16, 8, 4).permute(2, 0, 1)]
        out = torch.cat([r.flatten().to(dtype) for r in results])
        return [a, torch.zeros(9 * 512, dtype=dtype)], {1: (out, 0)}

    return make


for _dtype in (torch.float32, torch.int64):
    case(f"shapes-{_dtype}", shapes, _shapes(_dtype), constants={"M": 16, "N": 32})


@triton.jit
def orders(x, i, out, counts, N: tl.constexpr):
    at = tl.arange(0, N)
    a, index = tl.load(x + at), tl.load(i + at)
    tl.store(out + at, tl.sort(a))
    tl.store(out + N + at, tl.sort(a, descending=True))
    tl.store(out + 2 * N + at, tl.gather(a, index, 0))
    tl.store(out + 3 * N + tl.arange(0, 8), tl.topk(a, 8))
    tl.store(counts + tl.arange(0, 16), tl.histogram(index, 16))
    tl.store(counts + 16 + tl.arange(0, 16), tl.histogram(index, 16, mask=at < 32))


def _orders():
    a, index = torch.randn(64), torch.randint(0, 16, (64,), dtype=torch.int32)
    falling = a.sort(descending=True)[0]
    out = torch.cat([a.sort()[0], falling, a[index.long()], falling[:8]])
    counts = torch.cat([index.bincount(minlength=16), index[:32].bincount(minlength=16)]).int()
    return [a, index, torch.zeros(200), torch.zeros(32).int()], {2: (out, 0), 3: (counts, 0)}


case("orders", orders, _orders, constants={"N": 64})


@triton.jit
def chooses(x, index, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.gather(tl.load(x + i), tl.load(index + i), 0))


def _bytes():
    x, index = torch.randn(256), torch.arange(256).flip(0).to(torch.uint8)
    return [x, index, torch.zeros(256)], {2: (x.flip(0), 0)}


case("gather-uint8", chooses, _bytes, constants={"N": 256})


@triton.jit
def returns_nothing(x):
    wanted = False
    if wanted:
        return x


@triton.jit
def undefined(x, out):
    i = tl.arange(0, 4)
    tl.store(out + i, tl.load(x + i))
    tl.store(out + 4, returns_nothing(tl.load(x)))
    tl.store(out + 5 + i, returns_nothing(tl.load(x + i)))
    tl.store(out + 9, 3.0)


def _undefined():
    x = torch.randn(4)
    return [x, torch.ones(10)], {1: (torch.cat([x, torch.zeros(5), torch.tensor([3.0])]), 0)}


case("undefined", undefined, _undefined)


# ---- products ----


@triton.jit
def product(x, y, z, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, T: tl.constexpr):
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    a = tl.load(x + m * K + k[None, :])
    if T:
        b = tl.trans(tl.load(y + tl.arange(0, N)[:, None] * K + k[None, :]))
    else:
        b = tl.load(y + k[:, None] * N + n)
    c = tl.load(z + m * N + n)
    tl.store(out + m * N + n, tl.dot(a, b, c, out_dtype=z.dtype.element_ty))


def _product(dtype, total, shape, transposed):
    def make():
        m, n, k = shape
        if dtype.is_floating_point:
            a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
            c = torch.randn(m, n).to(total)
        else:
            a, b = (torch.randint(-128, 127, s, dtype=dtype) for s in ((m, k), (k, n)))
            c = torch.randint(-9, 9, (m, n), dtype=total)
        exact = (a.double() @ b.double() + c.double()).to(total)
        given = b.T.contiguous() if transposed else b
        tolerance = {torch.float64: 1e-12, torch.int32: 0, torch.float16: 2e-2}.get(total, 1e-4)
        return [a, given, c, torch.zeros(m, n, dtype=total)], {3: (exact, tolerance)}

    return make


_PRODUCTS = [
    (torch.float32, torch.float32, (16, 16, 16), False),
    (torch.float32, torch.float32, (64, 32, 32), True),
    (torch.float32, torch.float32, (32, 64, 64), False),
    (torch.float16, torch.float32, (32, 32, 64), False),
    (torch.float16, torch.float16, (16, 32, 16), False),
    (torch.bfloat16, torch.float32, (32, 16, 32), True),
    (torch.float8_e5m2, torch.float32, (32, 32, 32), False),
    (torch.float64, torch.float64, (16, 32, 16), False),
    (torch.int8, torch.int32, (32, 32, 32), False),
]
for _dtype, _total, _shape, _transposed in _PRODUCTS:
    _constants = {**dict(zip("MNK", _shape, strict=False)), "T": _transposed}
    _make = _product(_dtype, _total, _shape, _transposed)
    case(f"product-{_dtype}-{_total}-{_shape}", product, _make, constants=_constants)


@triton.jit
def batched_product(x, y, out, B: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, B)[:, None, None] * N * N + tl.arange(0, N)[None, :, None] * N
    i += tl.arange(0, N)[None, None, :]
    tl.store(out + i, tl.dot(tl.load(x + i), tl.load(y + i)))


def _batched():
    a, b = torch.randn(4, 16, 16), torch.randn(4, 16, 16)
    return [a, b, torch.zeros(4, 16, 16)], {2: (a @ b, 1e-5)}


case("product-batched", batched_product, _batched, constants={"B": 4, "N": 16})


# ---- memory ----


@triton.jit
def tiles(x, out, rows, columns, stride, step, N: tl.constexpr):
    """A tile in the middle of a tensor: masked at both ends, read in several orders."""
    r, c = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    i = r * N + c
    S: tl.constexpr = N * N
    inside = (r < rows) & (c >= 2) & (c < columns)
    tl.store(out + i, tl.load(x + r * stride + c, mask=inside, other=-1.0))
    tl.store(out + S + i, tl.load(x + c * stride + r))
    tl.store(out + 2 * S + i, tl.load(x + (r % 5) * stride + (c + 3) % 7))
    tl.store(out + 3 * S + i, tl.load(x + r * step * stride + c * step, mask=c < columns // 2))
    tl.store(out + 4 * S + i, tl.load(x + c + 0 * r), mask=r > c)
    tl.store(out + 5 * S + c * N + r, tl.load(x + r * stride + c), mask=r <= c)
    last = tl.load(x + (rows - 1) * stride + tl.arange(0, N), mask=tl.arange(0, N) < 0)
    tl.store(out + 6 * S + tl.arange(0, N), last)
    tl.store(out + 6 * S + N + tl.arange(0, 1), tl.load(x + tl.arange(0, 1) + 3))
    odd = tl.load(x + r * stride + c, mask=(r + c) % 2 == 1, other=x.to(tl.int64) * 0 + 5)
    tl.store(out + 7 * S + i, odd)


def _tiles():
    x = torch.randn(40, 40)
    rows, columns, n = 11, 13, 16
    r, c = torch.arange(n)[:, None], torch.arange(n)[None, :]
    inside = (r < rows) & (c >= 2) & (c < columns)
    tile = x[:n, :n]
    results = [torch.where(inside, tile, torch.tensor(-1.0)), tile.T]
    results += [x[(r % 5), (c + 3) % 7]]
    results += [torch.where(c < columns // 2, x[2 * r, 2 * c], torch.tensor(0.0))]
    results += [torch.where(r > c, tile[0] + 0 * r, torch.tensor(0.0))]
    results += [torch.where(r <= c, tile, torch.tensor(0.0)).T]
    results += [torch.cat([torch.zeros(16), x[0, 3:4], torch.zeros(239)])]
    results += [torch.where((r + c) % 2 == 1, tile, torch.tensor(5.0))]
    out = torch.cat([result.flatten() for result in results])
    return [x, torch.zeros(8 * 256), rows, columns, 40, 2], {1: (out, 0)}


case("tiles", tiles, _tiles, constants={"N": 16})


@triton.jit
def wrapping(x, out, big, N: tl.constexpr):
    """Offsets of 32 bits that wrap on their way, and at the end."""
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + (i + big + big + 20)))
    hashed = (i * 1640531527 + big) & 63
    tl.store(out + N + i, tl.load(x + hashed))
    below = (big + i) < 0
    tl.store(out + 2 * N + i, below.to(tl.float32))


def _wrapping():
    x, big = torch.randn(128), 2**31 - 8
    i = torch.arange(64)
    hashed = (i * 1640531527 + big) & 63
    below = (((big + i) + 2**31) % 2**32 - 2**31) < 0
    out = torch.cat([x[i + 4], x[hashed], below.float()])
    return [x, torch.zeros(192), big], {1: (out, 0)}


case("wrapping", wrapping, _wrapping, constants={"N": 64})


@triton.jit
def aliases(x, n, N: tl.constexpr):
    """A tile is read whole before any of it is written."""
    i = tl.arange(0, N)
    a = tl.load(x + i)
    tl.store(x + i + 1, a * 2)
    tl.store(x + 2 * N - i, a + tl.load(x + i))


def _aliases():
    x = torch.arange(130).float()
    out = x.clone()
    a = out[:64].clone()
    out[1:65] = a * 2
    out[torch.arange(128, 64, -1)] = a + out[:64]
    return [x, 64], {0: (out, 0)}


case("aliases", aliases, _aliases, constants={"N": 64})


@triton.jit
def atomics(x, out, old, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    tl.atomic_add(out + i % 4, a)
    tl.atomic_max(out + 4 + i % 4, a)
    tl.atomic_min(out + 8 + i % 4, a)
    before = tl.atomic_add(out + 12, 1, mask=tl.program_id(0) % 2 == 0)
    tl.store(old + tl.program_id(0), before.to(old.dtype.element_ty))


def _atomics(dtype):
    def make():
        x = torch.randint(-50, 50, (64,)).to(dtype)
        folded = x.reshape(16, 4)
        out = torch.cat([folded.sum(0) * 4, folded.amax(0), folded.amin(0), torch.tensor([2])])
        zero = torch.tensor([0, 0, 0, 0, -99, -99, -99, -99, 99, 99, 99, 99, 0]).to(dtype)
        return [x, zero, torch.zeros(4, dtype=dtype)], {1: (out.to(dtype), 0)}

    return make


for _dtype in (torch.float32, torch.int32, torch.int64, torch.float64):
    case(f"atomics-{_dtype}", atomics, _atomics(_dtype), grid=(4,), constants={"N": 64})


@triton.jit
def atomic_bits(x, out, lock, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    tl.atomic_and(out + i * 0, a)
    tl.atomic_or(out + 1 + i * 0, a)
    tl.atomic_xor(out + 2 + i * 0, a)
    tl.atomic_xchg(out + 3, 7)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    count = tl.load(out + 4, volatile=True)
    tl.store(out + 4, count + 1)
    tl.atomic_xchg(lock, 0)


def _atomic_bits():
    x = torch.randint(0, 2**30, (16,), dtype=torch.int32)
    conjunction, disjunction = x[0], x[0]
    for value in x[1:]:
        conjunction, disjunction = conjunction & value, disjunction | value
    out = torch.tensor([conjunction, disjunction, 0, 7, 64]).int()
    start = torch.tensor([-1, 0, 0, 0, 0]).int()
    return [x, start, torch.zeros(1).int()], {1: (out, 0)}


case("atomic-bits", atomic_bits, _atomic_bits, grid=(64,), constants={"N": 16})


@triton.jit
def descriptors(x, out, rows, columns, N: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [N, N])
    target = tl.make_tensor_descriptor(out, [rows, columns], [columns, 1], [N, N])
    for at in range(0, columns, N):
        target.store([4, at], source.load([4, at]) * 2)


def _descriptors():
    x = torch.randn(10, 40)
    out = torch.zeros(10, 40)
    out[4:] = x[4:] * 2
    return [x, torch.zeros(10, 40), 10, 40], {1: (out, 0)}


case("descriptors", descriptors, _descriptors, constants={"N": 16})


# ---- control ----


@triton.jit(noinline=True)
def _called(a, n):
    if n > 2:
        return a * n
    return a + 1


@triton.jit
def control(x, out, n, N: tl.constexpr):
    p = tl.program_id(0)
    if p >= n:
        return
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(x + N + i)
    for _ in range(n):
        a, b = b, a + b
    total = tl.zeros([N], tl.float32)
    pointers = x + i
    for k in range(0, 4, 2):
        total += tl.load(pointers)
        if k > 0:
            total *= 2
        pointers += N // 2
    steps = 0
    while steps * steps < p * 10:
        steps += 1
        a += 1
    if p == 1:
        b = -b
    elif p == 2:
        b = b * 3
    count = 0
    for k in range(n, 0, -1):
        for j in tl.static_range(2):
            count += k * j
    out += p * 3 * N
    tl.store(out + i, a + steps)
    tl.store(out + N + i, b + count)
    tl.store(out + 2 * N + i, total + _called(p, n))


def _control():
    x, n, N = torch.arange(64).float(), 3, 32
    out = torch.zeros(5, 3, N)
    for p in range(n):
        a, b = x[:N], x[N:]
        for _ in range(n):
            a, b = b, a + b
        total = (x[:N] + x[16 : 16 + N]) * 2
        steps = 0
        while steps * steps < p * 10:
            steps += 1
            a = a + 1
        b = -b if p == 1 else b * 3 if p == 2 else b
        out[p, 0], out[p, 1], out[p, 2] = a + steps, b + 6, total + p * n
    return [x, torch.zeros(5, 3, N), n], {1: (out, 0)}


case("control", control, _control, grid=(5,), constants={"N": 32})


@triton.jit
def carried(x, out, n, N: tl.constexpr):
    """What a round hands on is computed from what the round before left, in any order."""
    i = tl.arange(0, N)
    step = 1
    p, q = x + i, x + i
    a, b = tl.load(x + i), tl.load(x + i) * 0
    c = b.to(tl.int32)
    for k in range(n):
        c += step
        step, b, a, p = step * 2, a * step, b + a * step, p + step
        q += k
    inside = step > 5
    tl.store(out + i, tl.load(p, mask=(i < 9) & inside))
    tl.store(out + N + i, tl.load(q, mask=(i < 9) & (n > 50)))
    tl.store(out + 2 * N + i, a)
    tl.store(out + 3 * N + i, b + step)
    tl.store(out + 4 * N + i, c.to(tl.float32))


def _carried():
    x, n, N = torch.randn(64), 3, 16
    step, p, q, a, b, c = 1, 0, 0, x[:N], x[:N] * 0, x[:N] * 0
    for k in range(n):
        c = c + step
        step, b, a, p = step * 2, a * step, b + a * step, p + step
        q += k
    first = torch.where(torch.arange(N) < 9, x[p : p + N], torch.zeros(N))
    out = torch.cat([first, torch.zeros(N), a, b + step, c])
    return [x, torch.ones(5 * N), n], {1: (out, 1e-6)}


case("carried", carried, _carried, constants={"N": 16})


@triton.jit
def _greater(a, b):
    if a > b:
        return a - b
    return b


@triton.jit
def mapped(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    tl.store(out + i, tl.map_elementwise(_greater, a, -a))


def _mapped():
    x = torch.randn(32)
    return [x, torch.zeros(32)], {1: (torch.where(x > -x, x + x, -x), 0)}


case("mapped", mapped, _mapped, constants={"N": 32})


@triton.jit
def _swapped(a, b, c, d):
    if a > b:
        return b, a, c - d, d
    return a, b, c, d


@triton.jit
def packed(x, y, out, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, 4)[None, :]
    a, b = tl.map_elementwise(_swapped, tl.load(x + 4 * i + j), tl.load(y + i), pack=2)
    tl.store(out + 4 * i + j, a)
    tl.store(out + 4 * N + 4 * i + j, b)


def _packed():
    x, y = torch.randn(16, 2, 2), torch.randn(16)
    first, second = x.unbind(-1)
    c = y[:, None].expand(16, 2)
    c = torch.stack([torch.where(first > second, torch.zeros(()), c), c], -1)
    out = torch.cat([x.sort(-1).values.flatten(), c.flatten()])
    return [x, y, torch.zeros(128)], {2: (out, 0)}


case("packed", packed, _packed, constants={"N": 16})


@triton.jit
def pointer_table(table, x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    each = tl.load(table + i % 2).to(tl.pointer_type(tl.float32))
    tl.store(out + i, tl.load(each + i))
    tl.store(out + N, ((x + 3).to(tl.int64) - x.to(tl.int64)).to(tl.float32))


_TABLE = [torch.randn(16), torch.randn(16)]


def _pointer_table():
    each = torch.stack(_TABLE, -1).flatten()
    even = torch.arange(16) % 2 == 0
    out = torch.cat([torch.where(even, *_TABLE), torch.tensor([12.0])])
    table = torch.tensor([tensor.data_ptr() for tensor in _TABLE])
    return [table, each, torch.zeros(17)], {2: (out, 0)}


case("pointer_table", pointer_table, _pointer_table, constants={"N": 16})


@triton.jit
def flags(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.atomic_store(x + i, i, mask=i < 5)
    tl.extra.cuda.gdc_wait()
    tl.store(out + i, tl.atomic_poll(x + i, i, timeout_ns=1000).to(tl.int32))
    tl.store(out + N, tl.atomic_poll(x + 2, 2).to(tl.int32))
    tl.store(out + N + 1, tl.atomic_load(x + 4))


def _flags():
    i = torch.arange(8).int()
    stored, found = torch.where(i < 5, i, -1), torch.cat([i < 5, torch.tensor([1, 4])]).int()
    return [torch.full((8,), -1).int(), torch.zeros(10).int()], {0: (stored, 0), 1: (found, 0)}


if hasattr(tl, "atomic_load"):  # since Triton 3.9
    case("flags", flags, _flags, constants={"N": 8})


@triton.jit
def rows_by_index(x, out, index, columns, N: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [N, columns], [columns, 1], [1, N])
    target = tl.make_tensor_descriptor(out, [N, columns], [columns, 1], [1, N])
    sums = tl.make_tensor_descriptor(out + N * columns, [N, columns], [columns, 1], [N, N])
    places = tl.load(index + tl.arange(0, N))
    rows = source.gather(places, 4)
    target.scatter(rows, N - 1 - places, 4)
    sums.atomic_add([0, 4], rows)


def _rows_by_index():
    x, index = torch.randn(16, 24), torch.randperm(16).int()
    rows = x[index.long(), 4:20]
    out = torch.zeros(2, 16, 24)
    out[0, 15 - index.long(), 4:20] = rows
    out[1, :, 4:20] = 1 + rows
    start = torch.zeros(2, 16, 24)
    start[1, :, 4:20] = 1
    return [x, start, index, 24], {1: (out, 0)}


case("rows_by_index", rows_by_index, _rows_by_index, constants={"N": 16})


@triton.jit
def saturates(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    tl.store(out + i, a.to(tl.uint32).to(tl.int64))
    b = libdevice.float2uint_rn(a).to(tl.uint32, bitcast=True)
    tl.store(out + N + i, b.to(tl.int64))


def _saturates():
    x = torch.tensor([5e9, -1.0, 4294967040.0, float("nan")])
    out = torch.tensor([2**32 - 1, 0, 4294967040, 0] * 2)
    return [x, torch.zeros(8).long()], {1: (out, 0)}


case("saturates", saturates, _saturates, constants={"N": 4})


@triton.jit(noinline=True)
def written_elsewhere(x):
    tl.store(x, -1.0)


@triton.jit
def loaded_before_it_is_written(x, out, n, S: tl.constexpr, N: tl.constexpr):
    i, on = tl.arange(0, N), tl.arange(0, N) < n
    a = tl.load(x + i)
    tl.store(x + i + 1, a + 1)
    x += S
    tl.store(x + i, tl.load(x + i, mask=on) * 2, mask=on)
    x += S
    a = tl.load(x + i)
    tl.store(x + i, a * 0)
    tl.store(out + i, a)
    x += S
    a = tl.load(x + i)
    tl.store(x, 5.0)
    tl.store(out + N + i, a)
    x += S
    a = tl.load(x + i)
    tl.atomic_add(x + i, a)
    tl.store(out + 2 * N + i, a)
    x += S
    a = tl.load(x + i)
    for k in range(n - 2, n):
        tl.store(x + i, a + k)
    tl.store(out + 3 * N + i, a)
    x += S
    a = tl.load(x + i)
    tl.store(x + i + 1, a, mask=a > 0)
    x += S
    a, b = tl.load(x + i), tl.load(x + i)
    for _ in range(n - 2, n):
        tl.store(x + i, a + b)
        b, a = a, tl.load(x + i)
    tl.store(x + i, a + b)
    x += S
    a = tl.load(x + i)
    written_elsewhere(x + n)
    tl.store(out + 4 * N + i, a)
    x += S
    tl.store(x + N - 1 - i, tl.load(x + i))
    x += S
    a = tl.load(x + N + i)
    rows = tl.arange(0, 2)[:, None] * N
    tl.store(x + rows + i[None, :], a[None, :] * 2)
    x += S
    a = tl.load(x + i)
    tl.store(x + i, tl.trans(a.reshape(4, N // 4)).reshape(N))
    x += S
    a = tl.load(x + 4 + i)
    tl.store(x + i, a, mask=i >= 4)


def _loaded_before_it_is_written():
    n, N, S = 13, 32, 70
    x = torch.randn(13, S)
    y, first = x.clone(), x[:, :N]
    out = first[[2, 3, 4, 5, 8]].clone()
    y[0, 1 : N + 1] = first[0] + 1
    y[1, :n] = 2 * first[1, :n]
    y[2, :N] = 0
    y[3, 0] = 5
    y[4, :N] = 2 * first[4]
    y[5, :N] = first[5] + n - 1
    y[6, 1 : N + 1] = torch.where(first[6] > 0, first[6], x[6, 1 : N + 1])
    y[7, :N] = 5 * first[7]
    y[8, n] = -1
    y[9, :N] = first[9].flip(0)
    y[10, : 2 * N] = 2 * x[10, N : 2 * N].repeat(2)
    y[11, :N] = first[11].view(4, N // 4).t().flatten()
    y[12, 4:N] = x[12, 8 : N + 4]
    return [x, torch.zeros(5, N), n], {0: (y, 1e-6), 1: (out, 0)}


case(
    "loaded before it is written",
    loaded_before_it_is_written,
    _loaded_before_it_is_written,
    constants={"S": 70, "N": 32},
)


@triton.jit
def random_numbers(out, seed, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.rand(seed, i))
    tl.store(out + N + i, tl.randint(seed, i).to(tl.float32))


def _random():
    # As Triton's interpreter gives them: Philox with ten rounds.
    key, words = (7, 0), []
    for c0 in range(32):
        c, k = [c0, 0, 0, 0], list(key)
        for _ in range(10):
            a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
            k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
        words.append(c[0])
    signed = torch.tensor([w - 2**32 if w >= 2**31 else w for w in words]).int()
    uniform = torch.where(signed < 0, -signed - 1, signed).float() * 4.6566127342e-10
    return [torch.zeros(64), 7], {0: (torch.cat([uniform, torch.tensor(words).float()]), 1e-7)}


case("random", random_numbers, _random, constants={"N": 32})


@pytest.mark.parametrize(
    "group, name",
    [
        pytest.param(group, name, marks=[pytest.mark.slow] * (group == "-O3 the rest"))
        for group, names in groups().items()
        for name in names
    ],
)
def test_operation_matches_eager(group, name, cases, entry):
    cases[name].check(entry(name, group))


# ---- failures, output and refusals ----


def _compiled(tmp_path, kernel, arguments, grid=(1,), constants=None, **options):
    """The source, and a function that runs it."""
    source = cpp.generate(triton_programs.ttir(kernel, arguments, constants or {}, **options))
    library = triton_programs.build([source.run], ["-O1"], tmp_path)

    def run(*given):
        library.openreg_entry_0(*triton_programs.pack(source, given or arguments, grid))

    return source, library, run


@triton.jit
def prints(x, N: tl.constexpr):
    a = tl.load(x + tl.arange(0, N))
    tl.device_print("begins")
    tl.device_print("a: ", a)
    tl.device_print("", tl.zeros((1, 16), tl.int16), hex=True)
    tl.device_print('say "100%"', tl.program_id(0), tl.sum(a) / 2)


def test_device_print_prints_in_order_with_program_and_index(tmp_path, capfd):
    _, _, run = _compiled(tmp_path, prints, [torch.tensor([1, -2]).int()], (2,), {"N": 2})
    run()
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr().out.splitlines() == [
        line
        for p in (0, 1)
        for line in (
            f"pid ({p}, 0, 0) begins",
            f"pid ({p}, 0, 0) idx (0) a: 1",
            f"pid ({p}, 0, 0) idx (1) a: -2",
            *(f"pid ({p}, 0, 0) idx (0, {i:2}): 0x0000" for i in range(16)),
            f'pid ({p}, 0, 0) idx () say "100%": (operand 0) {p}',
            f'pid ({p}, 0, 0) idx () say "100%": (operand 1) -0.500000',
        )
    ]


@triton.jit
def assembly(x):
    i = tl.arange(0, 16)
    a = tl.load(x + i)
    b = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [a], tl.int32, True, 1)
    tl.store(x + i, b)


@triton.jit
def clock(x):
    tl.store(x, tl.extra.cuda.globaltimer())


@triton.jit
def pointer_of_either(x, out):
    tl.store(out, tl.where(tl.load(out) > 0, x, out).to(tl.int64))


@pytest.mark.parametrize(
    "kernel, arguments, line, reason",
    [
        (assembly, [torch.zeros(16).int()], 3, "inline assembly: mov.b32"),
        (clock, [torch.zeros(1).long()], 1, "inline assembly: mov.u64 $0, %globaltimer;"),
        (
            pointer_of_either,
            [torch.zeros(1).long()] * 2,
            1,
            "tt.ptr_to_int of a pointer that",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_has_no_counterpart_is_refused_with_its_line(kernel, arguments, line, reason):
    text = triton_programs.ttir(kernel, arguments, {})
    first = kernel.fn.__code__.co_firstlineno + 1  # behind the decorator
    with pytest.raises(NotImplementedError) as error:
        cpp.generate(text)
    assert f"{kernel.fn.__name__} ({__file__}:{first + line}): " in str(error.value)
    assert reason in str(error.value)


# Of TritonOps.td: what the front end turns into other operations before C++ is made, what
# control.py reads as the form of a function, and what docs/triton.md says is refused.
REWRITTEN = {"make_tensor_descriptor"} | {
    f"descriptor_{name}" for name in ("load", "store", "reduce", "gather", "scatter")
}
REFUSED = {"dot_scaled", "elementwise_inline_asm"}


DEFINITIONS = Path(triton.__file__).parent / "include/triton/Dialect/Triton/IR/TritonOps.td"


@pytest.mark.skipif(not DEFINITIONS.exists(), reason="Triton's wheel has them since 3.9")
def test_every_operation_of_triton_is_implemented_or_refused_by_name():
    names = set(re.findall(r'\bTT_Op<\s*"([\w.]+)"', DEFINITIONS.read_text()))
    assert len(names) > 50
    assert names - {"func"} - REWRITTEN <= {name.removeprefix("tt.") for name in OPERATIONS}
    page = (Path(__file__).parents[2] / "docs/triton.md").read_text()
    refused = page.partition("Refused by name:")[2].partition("\n\n")[0]
    assert REFUSED.issubset(re.findall(r"`([a-z_]+)`", refused))


@triton.jit
def asserts(x, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.device_assert(tl.load(x + i) < n, "too large")
    tl.store(x + i, n * 65536 + i)


def _caught(tmp_path, source):
    """A function that gives an entry's error: C++ catches it, since ctypes cannot."""
    catch = """
extern "C" int caught(void *const *pointers, const int64_t *numbers, char *text) {
  try {
    openreg_entry(pointers, numbers);
  } catch (std::exception &error) {
    strcpy(text, error.what());
  }
  return *text != 0;
}"""
    library = triton_programs.build(
        [source.run + catch], ["-O1", "-include", "exception"], tmp_path
    )

    def error(*arguments):
        message = ctypes.create_string_buffer(1000)
        library.caught(*triton_programs.pack(source, arguments, (1,)), message)
        return message.value.decode()

    return error


def test_asserts_and_overflows_name_their_line(tmp_path):
    x = torch.arange(16).int()
    text = triton_programs.ttir(asserts, [x, 8], {"N": 16}, debug=True, sanitize_overflow=True)
    error, line = _caught(tmp_path, cpp.generate(text)), asserts.fn.__code__.co_firstlineno
    for n, expected in ((8, f"{__file__}:{line + 3}: too large"), (40000, "overflow"), (20, "")):
        x.copy_(torch.arange(16))
        said = error(x, n)
        assert expected in said if expected else not said
        assert (x == torch.arange(16)).all() == bool(expected)  # what comes after does not run


@pytest.mark.parametrize("wrong", [8, -1])
def test_gather_refuses_an_index_outside_of_the_tile(tmp_path, wrong):
    x, index, out = torch.randn(8), torch.arange(8).flip(0), torch.zeros(8)
    source = cpp.generate(triton_programs.ttir(chooses, [x, index, out], {"N": 8}))
    error = _caught(tmp_path, source)
    assert not error(x, index, out) and torch.equal(out, x.flip(0))
    index[5] = wrong
    line = chooses.fn.__code__.co_firstlineno + 3
    said = f"{__file__}:{line}: tl.gather has index {wrong}, allowed are 0 to 7"
    assert error(x, index, out.zero_()) == said and not out.any()


# ---- traces ----


@triton.jit
def gathers(x, index, out, n, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    at = tl.load(index + i, mask=i < n)
    value = tl.load(x + at, mask=i < n)
    tl.store(out + i, value, mask=i < n)


def _traced(tmp_path, kernel, arguments, grid, constants, readable=True):
    source = cpp.generate(triton_programs.ttir(kernel, arguments, constants))
    library = triton_programs.build([source.trace], ["-O1"], tmp_path)
    return source, triton_programs.Trace(source, library.openreg_trace_0, arguments, grid, readable)


@pytest.mark.parametrize("readable", [True, False])
def test_trace_tells_exact_elements_where_indices_may_be_read(tmp_path, readable):
    index = torch.tensor([3, 3, 17, 20] * 5)[:18].int()
    arguments = [torch.zeros(32), index, torch.zeros(20), 18]
    source, trace = _traced(tmp_path, gathers, arguments, (3,), {"N": 8}, readable)
    within = torch.arange(20) < 18
    assert trace.record.bad == 0 and trace.record.races == 0
    assert trace.reads[1].tolist() == [True] * 18
    assert trace.writes[2].tolist() == within.tolist()
    (site,) = source.data_dependent
    (load,) = source.data_dependent[site]
    first = gathers.fn.__code__.co_firstlineno
    assert [source.sites[load][1], source.sites[site][1]] == [first + 3, first + 4]
    assert trace.blind[load] is not readable
    if readable:
        assert trace.reads[0].nonzero().flatten().tolist() == [3, 17, 20]
    else:
        assert not trace.reads[0].any()


@triton.jit
def follows(x, index, N: tl.constexpr):
    i = tl.arange(0, N)
    at = tl.load(index + i)
    tl.store(index + i, at + 1)
    tl.store(x + tl.load(index + i), 1.0)


def test_trace_does_not_read_what_the_kernel_writes(tmp_path):
    arguments = [torch.zeros(8), torch.zeros(4).int()]
    source, trace = _traced(tmp_path, follows, arguments, (1,), {"N": 4})
    (site,) = source.data_dependent
    assert source.sites[site][1] == follows.fn.__code__.co_firstlineno + 5
    assert all(trace.blind[load] for load in source.data_dependent[site])
    assert not trace.writes[0].any()


@triton.jit
def follows_choice(x, index, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + tl.gather(tl.load(x + i), tl.load(index + i), 0), 1.0)


def test_trace_reads_nothing_by_a_wrong_index_of_gather(tmp_path):
    x, index = torch.arange(8).flip(0), torch.arange(8)
    index[3] = 1 << 40  # the launch fails: the trace takes 0 for what is there
    _, trace = _traced(tmp_path, follows_choice, [x, index, torch.zeros(8)], (1,), {"N": 8})
    assert trace.writes[2].tolist() == [n != 4 for n in range(8)]


@triton.jit
def faults(x, out, n, STEP: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0) * STEP + tl.arange(0, N)
    tl.store(out + i, tl.load(x + i), mask=i < n)


@pytest.mark.parametrize("step, size, bad, races", [(8, 24, 0, 0), (8, 20, 4, 0), (6, 24, 0, 4)])
def test_trace_finds_what_is_out_of_bounds_and_races_of_programs(tmp_path, step, size, bad, races):
    arguments = [torch.zeros(size), torch.zeros(24), 24]
    source, trace = _traced(tmp_path, faults, arguments, (3,), {"N": 8, "STEP": step})
    record = trace.record
    assert (record.bad, record.races) == (bad, races)
    if bad:
        assert (record.first_bad.argument, record.first_bad.offset) == (0, 4 * size)
        assert (record.first_bad.program, record.first_bad.kind) == (2, 0)
    if races:
        hit = record.first_race
        assert (hit.argument, hit.program, hit.other, hit.offset, hit.kind) == (1, 1, 0, 24, 1)
        assert source.sites[hit.site][1] == faults.fn.__code__.co_firstlineno + 3
