"""Random programs over views and dtypes give what native CPU gives: dtype, strides, bits, aliasing
and values.

A program runs step by step on the CPU and on the device, each step on one of four streams of two
devices. What a step makes, maybe a view of what is there or a write into it, is compared before its
kernel has run, the values at the end. A step that the CPU refuses is left out. test_programs.py has
threads, and what goes wrong between streams; here it is what each call promises.

OPENREG_VIEW_PROGRAMS: how many (300; `make conformance` takes 20,000).
OPENREG_VIEW_PROGRAMS_SEED: the first seed (0); a failure names its own.
"""

import os
import random
import warnings
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F

import torch_openreg  # noqa: F401

PROGRAMS = int(os.environ.get("OPENREG_VIEW_PROGRAMS", "300"))
FIRST_SEED = int(os.environ.get("OPENREG_VIEW_PROGRAMS_SEED", "0"))
BATCHES = 10
TENSORS, MOST_TENSORS, STEPS, STREAMS_EACH, MOST_ELEMENTS = 3, 8, 16, 2, 4096
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def dim(draw, x):
    return draw.randrange(-x.dim(), x.dim()) if x.dim() else 0


def memory_format(draw, x):
    formats = [torch.contiguous_format, torch.preserve_format]
    return draw.choice(formats + [torch.channels_last] * (x.dim() == 4))


def narrowed(draw, x):
    if x.numel() == 0 or x.dim() == 0:
        return torch.detach
    d = dim(draw, x)
    size = x.shape[d]
    first = draw.randrange(size)
    step = draw.choice([1, 1, 2, 3])
    index = [slice(None)] * x.dim()
    index[d] = slice(first, draw.randint(first, size), step)
    return lambda t: t[tuple(index)]


# From draws and a tensor: a function of one. What it draws is the same for the CPU and the device.
VIEWS = [
    lambda draw, x: (lambda a, b: lambda t: t.transpose(a, b))(dim(draw, x), dim(draw, x)),
    lambda draw, x: (lambda order: lambda t: t.permute(order))(
        draw.sample(range(x.dim()), x.dim())
    ),
    narrowed,
    narrowed,
    lambda draw, x: (lambda d: lambda t: t.unsqueeze(d))(draw.randint(0, x.dim())),
    lambda draw, x: lambda t: t.squeeze(),
    lambda draw, x: (lambda n: lambda t: t.expand(n, *t.shape))(draw.choice([1, 2])),
    lambda draw, x: (lambda d: lambda t: t.select(d, 0))(dim(draw, x)),
    lambda draw, x: lambda t: t.conj(),
    lambda draw, x: lambda t: t.imag,
    lambda draw, x: lambda t: t.real,
    lambda draw, x: lambda t: torch.view_as_real(t),
    lambda draw, x: torch.detach if x.dtype == torch.bool else torch._neg_view,
    lambda draw, x: lambda t: t.diagonal(),
    lambda draw, x: (lambda d: lambda t: t.unfold(d, 2, 1))(dim(draw, x)),
    lambda draw, x: lambda t: t.view(torch.int32),
    lambda draw, x: lambda t: t.detach(),
    lambda draw, x: lambda t: t.view(-1),
]


def plain(function):
    return lambda draw, x: function


def along(function):
    return lambda draw, x: (lambda d: lambda t: function(t, d))(dim(draw, x))


UNARY = [
    *map(
        plain,
        [
            torch.abs,
            torch.neg,
            torch.erf,
            torch.lgamma,
            torch.angle,
            torch.sqrt,
            torch.exp,
            torch.sigmoid,
            torch.relu,
            torch.logical_not,
            torch.bitwise_not,
            torch.sgn,
            torch.sign,
            torch.reciprocal,
            torch.isnan,
            torch.floor,
            torch.tanh,
            torch.square,
            torch.rsqrt,
            torch.log1p,
            F.gelu,
            F.silu,
            F.softplus,
            F.hardswish,
            F.elu,
            F.leaky_relu,
            F.logsigmoid,
            F.mish,
            torch.clone,
            torch.zeros_like,
            torch.ones_like,
            torch.resolve_conj,
            torch.resolve_neg,
            lambda t: t + 1,
            lambda t: t * 2.5,
            lambda t: 2 - t,
            lambda t: 2**t,
            lambda t: t**2,
            lambda t: t / 3,
            lambda t: t // 2,
            lambda t: t % 3,
            lambda t: t > 1,
            lambda t: t.ne(1.5),
            lambda t: t * 1j,
            lambda t: t.clamp(-1, 1),
            lambda t: t.nan_to_num(),
            lambda t: t.contiguous(),
            lambda t: t.sum(),
            lambda t: t.flip(0),
            lambda t: t.roll(1),
            lambda t: t.tril(),
            # The CPU's looks past the bit.
            lambda t: F.max_pool1d(t.resolve_neg(), 2),
            lambda t: F.avg_pool1d(t, 2),
            lambda t: F.pad(t, (1, 0)),
            lambda t: torch.cat([t, t]),
            lambda t: torch.stack([t, t], -1),
            lambda t: t.repeat(2),
            lambda t: t.reshape(-1),
            lambda t: t.flatten(),
            lambda t: torch.isin(1, t),
            lambda t: t.sort()[0],
            lambda t: t.median(-1)[0],
            lambda t: F.interpolate(t, scale_factor=2),
            lambda t: torch.where(t > 0, t, 0),
            lambda t: t.masked_fill(t != t, 0),
            lambda t: t.aminmax()[0],
        ],
    ),
    *map(
        along,
        [
            torch.sum,
            torch.mean,
            torch.prod,
            torch.amax,
            torch.argmax,
            torch.any,
            torch.all,
            torch.cumsum,
            torch.logsumexp,
            torch.std,
            torch.nansum,
            torch.softmax,
            torch.log_softmax,
            torch.count_nonzero,
            torch.cummax,
            torch.flip,
            torch.unbind,
            torch.diff,
            torch.nanmean,
            torch.norm,
            lambda t, d: t.sum(d, keepdim=True),
            lambda t, d: t.var(d, keepdim=True),
            lambda t, d: t.amin(d, keepdim=True),
            lambda t, d: t.std(d, keepdim=True),
            lambda t, d: torch.index_select(
                t, d, torch.zeros(2, dtype=torch.int64, device=t.device)
            ),
            lambda t, d: torch.cat([t, t], d),
            lambda t, d: torch.linalg.vector_norm(t, dim=d),
            lambda t, d: t.chunk(2, d),
        ],
    ),
    lambda draw, x: (lambda dtype: lambda t: t.to(dtype))(draw.choice(DTYPES)),
    lambda draw, x: (lambda f: lambda t: t.clone(memory_format=f))(memory_format(draw, x)),
    lambda draw, x: (lambda f: lambda t: t.contiguous(memory_format=f))(memory_format(draw, x)),
]
BINARY = [
    torch.add,
    torch.sub,
    torch.mul,
    torch.div,
    torch.ne,
    torch.lt,
    torch.maximum,
    torch.ldexp,
    torch.atan2,
    torch.remainder,
    torch.copysign,
    torch.logical_and,
    torch.fmod,
    torch.floor_divide,
    torch.pow,
    torch.bitwise_xor,
    torch.hypot,
    torch.complex,
    torch.xlogy,
    torch.heaviside,
    torch.rsub,
    torch.dist,
    lambda a, b: torch.add(a, b, alpha=2),
    lambda a, b: torch.where(a > 0, a, b),
    lambda a, b: torch.where(b != 0, 1, a),
    lambda a, b: torch.addcmul(a, b, b),
    lambda a, b: a.lerp(b, 0.5),
    lambda a, b: a @ b,
    lambda a, b: F.mse_loss(a, b, reduction="none"),
    lambda a, b: F.smooth_l1_loss(a, b),
    lambda a, b: torch.cat([a, b]),
    lambda a, b: a.masked_fill(b.bool(), 1),
    lambda a, b: a.expand_as(b) + 1,
    lambda a, b: torch.stack([a, b]),
    lambda a, b: a[b.bool()],
    lambda a, b: torch.outer(a, b),
    lambda a, b: a.copysign(b).nextafter(a),
]
IN_PLACE = [
    lambda a, b: a.add_(b),
    lambda a, b: a.mul_(b),
    lambda a, b: a.sub_(b, alpha=2),
    lambda a, b: a.div_(b),
    lambda a, b: a.copy_(b),
    lambda a, b: a.copy_(b),
    lambda a, b: a.fill_(3),
    lambda a, b: a.zero_(),
    lambda a, b: a.neg_(),
    lambda a, b: a.clamp_(-1, 1),
    lambda a, b: a.abs_(),
    lambda a, b: a.relu_(),
    lambda a, b: a.masked_fill_(b > 0, 2),
    lambda a, b: a.lerp_(b, 0.5),
    lambda a, b: a.pow_(2),
    lambda a, b: a.ldexp_(b),
    lambda a, b: a.logical_not_(),
    lambda a, b: a.ne_(b),
    lambda a, b: a.conj_physical_(),
    lambda a, b: a.addcmul_(b, b),
    lambda a, b: a.cumsum_(0),
    lambda a, b: a.transpose_(0, -1),
    lambda a, b: a.unsqueeze_(0),
    lambda a, b: a.t().add_(1),
    lambda a, b: a.index_fill_(0, _first(a), 2),
    lambda a, b: torch.add(a, 1, out=b),
    lambda a, b: torch.mul(a, a, out=b),
    lambda a, b: torch.neg(a, out=b),
    lambda a, b: torch.sum(a, -1, out=b),
    lambda a, b: torch.angle(a, out=b),
    lambda a, b: torch.abs(a, out=b),
]


def _first(x):
    return torch.zeros(1, dtype=torch.int64, device=x.device)


def drawn(draw, generator):
    sizes = [draw.choice([1, 1, 2, 3, 4, 8]) for _ in range(draw.choice([1, 2, 2, 3, 3, 4]))]
    dtype = draw.choice(DTYPES)
    values = torch.randint(-4, 5, sizes, generator=generator)
    if dtype.is_complex:
        return torch.complex(values.float(), values.flip(0).float() + 0.5)
    return (values / 2 if dtype.is_floating_point else values.abs()).to(dtype)


class Side:
    """The tensors of a program on one side, and on the device the order of its streams."""

    def __init__(self, start, streams=None):
        self.streams = streams
        self.uses = {}  # by storage: the events of the last step that used it
        self.tensors = [t if streams is None else t.to(streams[0][0].device) for t in start]
        if streams is not None:
            torch.openreg.synchronize()  # the copies above

    def run(self, function, operands, chosen):
        """Calls it on the streams that were drawn, one for each device."""
        tensors = [self.tensors[i] for i in operands]
        if self.streams is None:
            return function(*tensors)
        current = [streams[k] for streams, k in zip(self.streams, chosen, strict=True)]
        with ExitStack() as stack:
            for stream in current:
                stack.enter_context(stream)
                for t in tensors:
                    for event in self.uses.get(t.untyped_storage()._cdata, ()):
                        stream.wait_event(event)
                    if t.device == stream.device:
                        t.record_stream(stream)
            result = function(*tensors)
            events = [stream.record_event() for stream in current]
            for t in [*tensors, *flat(result)]:
                self.uses[t.untyped_storage()._cdata] = events
        return result


def flat(result):
    return list(result) if isinstance(result, (list, tuple)) else [result]


def described(x, tensors):
    storage = x.untyped_storage()._cdata
    shared = [i for i, t in enumerate(tensors) if t.untyped_storage()._cdata == storage]
    return (
        x.dtype,
        tuple(x.shape),
        x.stride(),
        x.storage_offset(),
        x.is_conj(),
        x.is_neg(),
        shared,
    )


def state(function, tensors, operands):
    """What a step that is refused must not have changed."""
    values = [repr(tensors[i].tolist()) for i in operands] if function in IN_PLACE else []
    return [described(t, ()) for t in tensors], values


def make_step(draw, tensors):
    """A function of tensors, and which: drawn for what the CPU has."""
    a, b = draw.randrange(len(tensors)), draw.randrange(len(tensors))
    x = tensors[a]
    kind = draw.choices(["view", "unary", "binary", "in place", "move"], [5, 4, 4, 3, 1])[0]
    if kind == "view":
        return draw.choice(VIEWS)(draw, x), [a]
    if kind == "unary":
        return draw.choice(UNARY)(draw, x), [a]
    if kind == "move":
        return None, [a]
    return draw.choice(BINARY if kind == "binary" else IN_PLACE), [a, b]


def copy_to(device):
    return lambda t: t.to(device, copy=True)


def where(function):
    """For the report of a failure: a name, or line and column in this file."""
    code = getattr(function, "__code__", None)
    if code is None:
        return getattr(function, "__name__", "move")
    positions = [p for p in code.co_positions() if p[2] is not None]
    return f"line {positions[-1][0]}, column {positions[-1][2]}"


def check(seed, streams):
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    start = [drawn(draw, generator) for _ in range(TENSORS)]
    cpu, ours = Side([t.clone() for t in start]), Side(start, streams)
    trail = []
    for _ in range(STEPS):
        function, operands = make_step(draw, cpu.tensors)
        chosen = [draw.randrange(STREAMS_EACH) for _ in streams]
        there = {ours.tensors[i].device for i in operands}
        if function is None:
            target = torch.device("openreg", draw.randrange(len(streams)))
            on_cpu, on_device = copy_to("cpu"), copy_to(target)
        elif len(there) > 1 and function not in IN_PLACE[4:6]:
            continue
        else:
            on_cpu = on_device = function
        storages = [cpu.tensors[i].untyped_storage()._cdata for i in operands]
        if len(operands) == 2 and function in IN_PLACE and storages[0] == storages[1]:
            continue  # which elements it reads before it writes them nobody says
        before = state(function, cpu.tensors, operands)
        try:
            expected = cpu.run(on_cpu, operands, chosen)
        except (RuntimeError, IndexError, TypeError, NotImplementedError, ValueError):
            if before != state(function, cpu.tensors, operands):
                return  # resized or written, and refused then
            continue
        trail.append((where(function), [described(cpu.tensors[i], []) for i in operands]))
        result = ours.run(on_device, operands, chosen)
        for one, other in zip(flat(expected), flat(result), strict=True):
            assert described(other, ours.tensors) == described(one, cpu.tensors), trail
            if one.numel() > MOST_ELEMENTS or one.dtype == torch.complex32:
                continue
            full = len(cpu.tensors) == MOST_TENSORS
            place = draw.randrange(MOST_TENSORS) if full else MOST_TENSORS
            for side, tensor in ((cpu, one), (ours, other)):
                side.tensors[place : place + 1] = [tensor]
    for device in range(len(streams)):
        torch.openreg.synchronize(device)
    for i, (one, other) in enumerate(zip(cpu.tensors, ours.tensors, strict=True)):
        assert described(other, ours.tensors) == described(one, cpu.tensors), trail
        torch.testing.assert_close(
            other.cpu(),
            one,
            rtol=0,
            atol=0,
            equal_nan=True,
            msg=lambda m, i=i: f"{i}: {m}\n{trail}",
        )


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_view_programs_are_the_cpus(batch):
    devices = min(2, torch.openreg.device_count())
    streams = [[torch.openreg.Stream(d) for _ in range(STREAMS_EACH)] for d in range(devices)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for seed in range(FIRST_SEED + batch, FIRST_SEED + PROGRAMS, BATCHES):
                try:
                    check(seed, streams)
                except BaseException as error:
                    raise AssertionError(f"OPENREG_VIEW_PROGRAMS_SEED={seed}") from error
    finally:
        torch.set_num_threads(threads)
