"""What a call's arguments decide is raised by the call, with the CPU's text.

What depends on data comes later.
"""

import pytest
import torch
import torch.nn.functional as F
from host_ahead import DEVICE

INT, HALF, DOUBLE, BOOL = torch.int, torch.half, torch.double, torch.bool


class Tensors:
    """Makes the tensors of a case, on the CPU or on the device."""

    def __init__(self, device):
        self.device = device

    def zeros(self, *sizes, dtype=torch.float):
        return torch.zeros(*sizes, dtype=dtype, device=self.device)

    def ones(self, *sizes, dtype=torch.float):
        return torch.ones(*sizes, dtype=dtype, device=self.device)

    def indices(self, count):
        return torch.arange(count, device=self.device)


def put(self, index, values):
    self[index] = values


def channels_last(t, dims):
    x = t.ones(2, 3, *(4,) * dims, dtype=INT)
    format = {2: torch.channels_last, 3: torch.channels_last_3d}[dims]
    return x.contiguous(memory_format=format)


# Each takes tensors of the device from `t`.
BAD = {
    "frac of int": lambda t: torch.frac(t.zeros(3, dtype=INT)),
    "frac_ of int": lambda t: t.zeros(3, dtype=INT).frac_(),
    "frac of int, out=": lambda t: torch.frac(t.zeros(3, dtype=INT), out=t.zeros(3, dtype=INT)),
    "softmax of int": lambda t: torch.softmax(t.zeros(3, dtype=INT), 0),
    "mm of bool": lambda t: torch.mm(t.zeros(2, 2, dtype=BOOL), t.zeros(2, 2, dtype=BOOL)),
    "mm of bool, out=": lambda t: torch.mm(
        t.zeros(2, 2, dtype=BOOL), t.zeros(2, 2, dtype=BOOL), out=t.zeros(2, 2, dtype=BOOL)
    ),
    "large mm of bool": lambda t: torch.mm(
        t.zeros(99, 98, dtype=BOOL), t.zeros(98, 97, dtype=BOOL)
    ),
    "randn of int": lambda t: torch.randn(2, device=t.device, dtype=INT),
    "random_": lambda t: t.zeros(4).random_(5, 3),
    "uniform_": lambda t: t.zeros(4).uniform_(0, -1),
    "bernoulli_": lambda t: t.zeros(4).bernoulli_(2.0),
    "index_put_ of other sizes": lambda t: put(t.zeros(4), t.indices(2), t.zeros(3)),
    "index_put_ of another dtype": lambda t: put(
        t.zeros(4), t.indices(2), t.zeros(2, dtype=DOUBLE)
    ),
    "fill_": lambda t: t.zeros(4).fill_(t.zeros(2)),
    "put_": lambda t: t.zeros(4).put_(t.indices(2), t.zeros(3)),
    "complex, out=": lambda t: torch.complex(t.zeros(2), t.zeros(2), out=t.zeros(2)),
    "hardswish_ of expanded": lambda t: F.hardswish(t.zeros(1).expand(3), inplace=True),
    "mm, two dtypes": lambda t: torch.mm(t.ones(8, 8, dtype=DOUBLE), t.ones(8, 8, dtype=HALF)),
    "linear, two dtypes": lambda t: F.linear(t.ones(4, 4, dtype=HALF), t.ones(4, 4)),
    "linear with bias, two dtypes": lambda t: F.linear(
        t.ones(2, 4, 4, dtype=HALF), t.ones(4, 4), t.ones(4)
    ),
    "bmm, two dtypes": lambda t: torch.bmm(t.ones(2, 4, 4, dtype=HALF), t.ones(2, 4, 4)),
    "conv2d, two dtypes": lambda t: torch.conv2d(
        t.ones(1, 1, 4, 4, dtype=DOUBLE), t.ones(1, 1, 3, 3)
    ),
    "conv2d, channels": lambda t: F.conv2d(t.ones(1, 2, 4, 4), t.ones(1, 1, 3, 3)),
    "embedding": lambda t: F.embedding(t.ones(4), t.ones(4, 4)),
    "cross_entropy": lambda t: F.cross_entropy(t.ones(4, 4), t.zeros(4, dtype=INT)),
    "nll_loss": lambda t: F.nll_loss(t.ones(4, 4), t.ones(4)),
    "index_select": lambda t: torch.index_select(t.ones(4, 4), 0, t.ones(4)),
    "scatter_add_": lambda t: t.ones(4).scatter_add_(0, t.indices(4), t.ones(4, dtype=HALF)),
    "index_add_": lambda t: t.ones(4).index_add_(0, t.indices(4), t.ones(4, dtype=HALF)),
    "masked_fill": lambda t: t.ones(4).masked_fill(t.ones(4), 0),
    "masked_fill_": lambda t: t.ones(4).masked_fill_(t.ones(4), 0),
    "lerp": lambda t: torch.lerp(t.ones(4), t.ones(4, dtype=HALF), 0.5),
    "layer_norm": lambda t: F.layer_norm(t.ones(4, 4), (3,), t.ones(3)),
    "batch_norm": lambda t: F.batch_norm(
        t.ones(4, 4, dtype=torch.bfloat16),
        t.ones(4),
        t.ones(4),
        t.ones(4, dtype=HALF),
        t.ones(4, dtype=HALF),
        True,
    ),
    "attention": lambda t: F.scaled_dot_product_attention(
        t.ones(1, 1, 4, 8, dtype=HALF), t.ones(1, 1, 4, 8), t.ones(1, 1, 4, 8)
    ),
    "dot": lambda t: torch.dot(t.ones(4), t.ones(4, dtype=HALF)),
    "cumsum": lambda t: torch.cumsum(t.ones(4), 3),
    "cumsum, out=": lambda t: torch.cumsum(t.ones(4), 3, out=t.ones(4)),
    "mm, sizes": lambda t: torch.mm(t.ones(4, 3), t.ones(4, 3)),
    "cat": lambda t: torch.cat([t.ones(4, 3), t.ones(4, 4)]),
    "max_pool2d": lambda t: F.max_pool2d(t.ones(1, 1, 2, 2), 3),
    "logical_and_, sizes": lambda t: t.ones(3, 1).logical_and_(t.ones(3, 4)),
    "cholesky": lambda t: torch.linalg.cholesky(t.ones(3, 4)),
    # Of these the kernel has read something before it refuses them.
    "normal of ints": lambda t: torch.normal(t.ones(3, dtype=INT), t.ones(3, dtype=INT)),
    "randn of long": lambda t: torch.randn(5, 5, device=t.device, dtype=torch.long),
    "layer_norm of int images": lambda t: F.layer_norm(channels_last(t, 2), (4,)),
    "unfold of int images": lambda t: F.unfold(channels_last(t, 2), 2),
    "avg_pool3d of int volumes": lambda t: F.avg_pool3d(channels_last(t, 3), 2),
    "interpolate int images": lambda t: F.interpolate(channels_last(t, 2), (7, 7), mode="bicubic"),
    "adaptive max pool of bool volumes": lambda t: F.adaptive_max_pool3d(
        channels_last(t, 3).bool(), 2
    ),
    "conv2d of ints and floats": lambda t: F.conv2d(channels_last(t, 2), t.ones(3, 3, 2, 2)),
    "embedding of ints that has a norm": lambda t: F.embedding(
        t.indices(2), t.ones(3, 4, dtype=INT), max_norm=1.0
    ),
    "scatter_ of a complex number": lambda t: t.zeros(3, 3, dtype=INT).scatter_(
        0, t.zeros(1, 1, dtype=torch.long), 1 + 1j
    ),
    "index_fill_ with a complex number": lambda t: t.zeros(3, dtype=INT).index_fill_(
        0, t.indices(2), 1 + 1j
    ),
    "random_, beyond the dtype": lambda t: t.zeros(3, dtype=torch.int8).random_(0, 300),
    "pow of half": lambda t: t.ones(3, dtype=HALF) ** 2j,
    "fractional_max_pool2d": lambda t: torch.nn.FractionalMaxPool2d(
        2, output_size=1, _random_samples=t.zeros(1, 4, 2)
    )(t.ones(1, 3, 8, 8)),
    "fractional_max_pool3d": lambda t: torch.nn.FractionalMaxPool3d(
        2, output_size=1, _random_samples=t.zeros(0, 3, 3)
    )(t.ones(1, 3, 8, 8, 8)),
    # And these wait for their stream when they are right.
    "a mask of another size": lambda t: t.zeros(5, 5)[t.ones(4, dtype=BOOL)],
    "too many indices": lambda t: t.zeros(5)[t.ones(5, dtype=BOOL), t.indices(2)],
    "shapes of indices": lambda t: t.zeros(5, 5)[t.indices(2), t.indices(3)],
    "masked_select": lambda t: t.ones(5).masked_select(t.ones(6, dtype=BOOL)),
    "nonzero, out=": lambda t: torch.nonzero(t.ones(5), out=t.ones(5)),
    "unique": lambda t: torch.unique(t.ones(5), dim=3),
    "bincount": lambda t: torch.bincount(t.ones(5, 5, dtype=INT)),
    "repeat_interleave": lambda t: torch.repeat_interleave(t.ones(5)),
    "inv_ex": lambda t: torch.linalg.inv_ex(t.ones(3, 4), check_errors=True),
    "lu_factor_ex": lambda t: torch.linalg.lu_factor_ex(t.ones(3, 3, dtype=INT), check_errors=True),
    "segment_reduce": lambda t: torch.segment_reduce(
        t.ones(3), "sum", lengths=t.ones(3, dtype=INT), axis=1
    ),
    "foreach, dtypes": lambda t: torch._foreach_frac_([t.ones(2), t.zeros(3, dtype=INT)]),
    "foreach, new": lambda t: torch._foreach_frac([t.ones(2), t.zeros(3, dtype=INT)]),
    "foreach, sizes": lambda t: torch._foreach_add_([t.ones(2)], [t.ones(3)]),
    "foreach, lengths": lambda t: torch._foreach_mul([t.ones(2)], [t.ones(2), t.ones(2)]),
    "foreach, expanded": lambda t: torch._foreach_neg_([t.ones(1).expand(3)]),
}


def outcome(case, tensors):
    with pytest.raises(Exception) as caught:
        case(tensors)
    return type(caught.value), str(caught.value).splitlines()[0]


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_raise_the_cpus_error_at_the_call(name, runs_ahead):
    def call():
        torch.ones(1, device=DEVICE)  # something for the gate to hold back
        torch.openreg._sleep(1)
        return [outcome(BAD[name], Tensors(DEVICE)) for _ in range(2)]

    expected = outcome(BAD[name], Tensors("cpu"))
    assert runs_ahead(call) == [expected, expected]
    torch.openreg.synchronize()


# The same shapes: a good call, then a bad one.
VALUES = {
    "pow": (lambda t, x: t.ones(3, dtype=INT) ** x, 2, -1),
    "fill_": (lambda t, x: t.ones(3, dtype=torch.int8).fill_(x), 100, 300),
    "fill_ of half": (lambda t, x: t.ones(3, dtype=HALF).fill_(x), 1e3, 1e10),
    "masked_fill_": (
        lambda t, x: t.ones(3, dtype=torch.int8).masked_fill_(t.ones(3, dtype=BOOL), x),
        2,
        -1000,
    ),
    "masked_fill": (
        lambda t, x: t.ones(3, dtype=torch.uint8).masked_fill(t.ones(3, dtype=BOOL), x),
        2,
        1000,
    ),
    "softshrink": (lambda t, x: F.softshrink(t.ones(3), x), 0.5, -0.5),
    "leaky_relu_": (
        lambda t, x: torch.ops.aten.leaky_relu_backward(t.ones(3), t.ones(3), x, True),
        0.5,
        -0.5,
    ),
    "renorm": (lambda t, x: torch.renorm(t.ones(3, 3), x, 0, 1), 1, -1),
    "renorm, largest norm": (lambda t, x: torch.renorm(t.ones(3, 3), 1, 0, x), 1, -1),
    "histc": (lambda t, x: torch.histc(t.ones(3), 4, min=1, max=x), 2, 0.5),
    "random_": (lambda t, x: t.zeros(4).random_(0, x), 3, -3),
    "uniform_": (lambda t, x: t.zeros(4).uniform_(0, x), 1, -1),
    "normal_": (lambda t, x: t.zeros(4).normal_(0, x), 1, -1),
    "bernoulli_": (lambda t, x: t.zeros(4).bernoulli_(x), 0.5, 1.5),
    "exponential_": (lambda t, x: t.zeros(4).exponential_(x), 0.5, -0.5),
    "bernoulli_, after 1": (lambda t, x: t.zeros(4).bernoulli_(x), 1.0, 1.5),
    "geometric_, 1": (lambda t, x: t.zeros(4).geometric_(x), 0.5, 1.0),
    "uniform_, neither 0": (lambda t, x: t.zeros(4).uniform_(2, x), 3, 1.5),
    "uniform_, a wide range": (
        lambda t, x: t.zeros(4, dtype=HALF).uniform_(x, 60000),
        -1000,
        -20000,
    ),
    "uniform_, one of bfloat16": (
        lambda t, x: t.zeros(4, dtype=torch.bfloat16).uniform_(x, 3e38),
        -1e36,
        -3e38,
    ),
    "huber_loss": (lambda t, x: F.huber_loss(t.ones(4), t.ones(4), delta=x), 0.5, -0.5),
    "cdist": (lambda t, x: torch.cdist(t.ones(4, 4), t.ones(4, 4), p=x), 0.5, -0.5),
    "histogram": (lambda t, x: torch.histogram(t.ones(4), 4, range=(1, x)), 2.0, 0.5),
    "geometric_": (lambda t, x: t.zeros(4).geometric_(x), 0.5, 1.5),
    "cauchy_": (lambda t, x: t.zeros(4).cauchy_(0, x), 0.5, -0.5),
    "log_normal_": (lambda t, x: t.zeros(4).log_normal_(0, x), 0.5, -0.5),
    "multinomial": (lambda t, x: torch.multinomial(t.ones(4), x), 2, 5),
    "dropout": (lambda t, x: F.dropout(t.ones(4), x), 0.5, 1.5),
    "complex, fill_": (lambda t, x: t.ones(3).fill_(x), 2 + 0j, 2 + 1j),
    "complex, masked_fill_": (
        lambda t, x: t.ones(3).masked_fill_(t.ones(3, dtype=BOOL), x),
        2 + 0j,
        2 + 1j,
    ),
    "complex, addcmul": (
        lambda t, x: torch.addcmul(t.ones(3), t.ones(3), t.ones(3), value=x),
        2 + 0j,
        2 + 1j,
    ),
    "complex, foreach addcmul_": (
        lambda t, x: torch._foreach_addcmul_([t.ones(3)], [t.ones(3)], [t.ones(3)], [x]),
        2 + 0j,
        2 + 1j,
    ),
    "foreach pow": (lambda t, x: torch._foreach_pow([t.ones(3, dtype=INT)], x), 2, -1),
    "fmod": (lambda t, x: t.ones(3, dtype=INT).fmod(x), 2, 0),
    "remainder": (lambda t, x: torch.remainder(t.ones(3, dtype=INT), x), 2, 0),
    "multi_margin_loss": (
        lambda t, x: torch.ops.aten.multi_margin_loss(
            t.ones(3, 4), t.zeros(3, dtype=torch.int64), x
        ),
        2,
        3,
    ),
    "fill_ of float8": (
        lambda t, x: t.ones(3, dtype=torch.float8_e4m3fnuz).fill_(x),
        200,
        250,
    ),
    "masked_fill, a small number": (
        lambda t, x: t.ones(3, dtype=torch.uint8).masked_fill(
            t.ones(3, dtype=BOOL), torch.tensor(x, dtype=torch.int16)
        ),
        5,
        300,
    ),
    "masked_fill, a half": (
        lambda t, x: t.ones(3, dtype=torch.uint8).masked_fill(
            t.ones(3, dtype=BOOL), torch.tensor(x, dtype=HALF)
        ),
        5,
        300,
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_bad_value_is_refused_after_good_calls_of_the_same_shapes(name, runs_ahead):
    case, good, bad = VALUES[name]
    expected = outcome(lambda t: case(t, bad), Tensors("cpu"))
    for _ in range(2):
        case(Tensors(DEVICE), good)
    torch.openreg.synchronize()

    def call():
        torch.openreg._sleep(1)
        return outcome(lambda t: case(t, bad), Tensors(DEVICE))

    assert runs_ahead(call) == expected
    torch.openreg.synchronize()


# A number of the CPU's is taken, an index is not, whatever its dimensions.
INDICES = {
    "take": torch.take,
    "gather": lambda x, i: torch.gather(x, 0, i),
    "index_select": lambda x, i: torch.index_select(x, 0, i),
    "embedding": lambda x, i: F.embedding(i, x.view(4, 1)),
    "nll_loss": F.nll_loss,
    "scatter_": lambda x, i: x.scatter_(0, i, 1.0),
    "index_add_": lambda x, i: x.index_add_(0, i, x[:1].clone()),
    "put_": lambda x, i: x.put_(i, x[1].clone()),
}


@pytest.mark.parametrize("name", INDICES)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_indices_of_the_cpu_are_refused_where_they_must_be_the_devices(name, shape, runs_ahead):
    x = torch.zeros(4, device=DEVICE)
    INDICES[name](x, torch.ones(shape, dtype=torch.int64, device=DEVICE))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"same device.* cpu"):
            runs_ahead(lambda: INDICES[name](x, torch.ones(shape, dtype=torch.int64)))
    assert F.mse_loss(x[0] * 0, torch.tensor(1)).item() == 1


# How what is written lies to what is read: at both, a good call of the same metadata comes before.
OVERLAPS = {
    "add_": lambda x, y: x.add_(y),
    "add, out=": lambda x, y: torch.add(y, 1, out=x),
    "cat, out=": lambda x, y: torch.cat([y[:2], y[2:]], out=x),
    "lerp, out=": lambda x, y: torch.lerp(y, y.clone(), 0.5, out=x),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_overlapping_arguments_raise_the_cpus_error_at_the_call(name, runs_ahead):
    def views(device, offset):
        base = torch.ones(40, device=device)
        return base[:16].view(4, 4), base[offset : offset + 16].view(4, 4)

    expected = outcome(lambda _: OVERLAPS[name](*views("cpu", 8)), None)
    for _ in range(2):
        OVERLAPS[name](*views(DEVICE, 20))
    torch.openreg.synchronize()
    assert (
        runs_ahead(lambda: outcome(lambda _: OVERLAPS[name](*views(DEVICE, 8)), None)) == expected
    )


def test_error_that_data_decides_comes_at_synchronisation(runs_ahead):
    def call():
        return F.embedding(torch.ones(5, dtype=torch.long, device=DEVICE) * 7, table)

    table = torch.ones(3, 2, device=DEVICE)
    runs_ahead(call)
    with pytest.raises(IndexError, match="out of range"):
        torch.openreg.synchronize()


def test_error_that_data_decides_in_place_comes_at_synchronisation(runs_ahead):
    x = torch.zeros(4, device=DEVICE)
    mask = torch.tensor([True, True, True, False], device=DEVICE)
    runs_ahead(lambda: put(x, mask, torch.ones(3, device=DEVICE)))
    assert x.tolist() == [1, 1, 1, 0]
    runs_ahead(lambda: put(x, ~mask, torch.ones(3, device=DEVICE)))
    with pytest.raises(RuntimeError, match="shape mismatch"):
        torch.openreg.synchronize()


def test_in_place_operator_does_not_resize_what_it_reads():
    def call(device):
        x = torch.arange(3.0, device=device).view(3, 1)
        batch = torch.arange(6.0, device=device).view(1, 3, 2)
        return x.addbmm_(batch, batch.mT @ batch)

    assert [call(DEVICE).tolist() for _ in range(3)] == [call("cpu").tolist()] * 3


IN_PLACE_LISTS = {
    "add_": lambda xs, ys: torch._foreach_add_(xs, ys),
    "mul_": lambda xs, ys: torch._foreach_mul_(xs, ys),
    "clamp_min_": lambda xs, ys: torch._foreach_clamp_min_(xs, ys),
    "lerp_": lambda xs, ys: torch._foreach_lerp_(xs, ys, 0.5),
    "addcdiv_": lambda xs, ys: torch._foreach_addcdiv_(xs, ys, ys),
}


@pytest.mark.parametrize("name", IN_PLACE_LISTS)
def test_overlapping_list_is_distinguished_from_a_disjoint_one(name):
    def call(device, begin):
        x = torch.arange(1.0, 65, device=device)
        before = x.tolist()
        written = [x[32:48], x[begin : begin + 16]]
        try:
            IN_PLACE_LISTS[name](written, [x[:16], x[16:32]])
        except RuntimeError as error:
            return str(error)[:60], x.tolist()[48:] == before[48:]
        return x.tolist()

    for begin in (48, 17, 48, 16, 31):  # 16 is the same memory, which is no overlap
        assert call(DEVICE, begin) == call("cpu", begin), begin
    torch.openreg.synchronize()


def test_refused_call_draws_no_random_numbers():
    x = torch.zeros(8, device=DEVICE)
    torch.manual_seed(3)
    expected = torch.rand(8, device=DEVICE)
    torch.manual_seed(3)
    for case in (lambda: x.uniform_(0, -1), lambda: x.bernoulli_(2.0)):
        with pytest.raises(RuntimeError):
            case()
    assert torch.equal(torch.rand(8, device=DEVICE), expected)
    assert x.count_nonzero() == 0


def test_refused_list_is_not_counted_as_written():
    xs = [torch.ones(2, device=DEVICE), torch.zeros(3, dtype=INT, device=DEVICE)]
    versions = [x._version for x in xs]
    with pytest.raises(NotImplementedError):
        torch._foreach_frac_(xs)
    assert [x._version for x in xs] == versions
    assert xs[0].tolist() == [1, 1]
