"""Results stay on the device, with the CPU's values, dtypes and strides."""

import math
import os
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cpu_reference import DEVICE, alike, drawn

import torch_openreg  # noqa: F401

HERE = os.path.dirname(os.path.abspath(__file__))


def x_on(device):
    return (torch.arange(1, 7, dtype=torch.float32).view(2, 3) / 3).to(device)


def like(x, *values):
    return torch.tensor(values, device=x.device)


def positive(x):
    return x @ x.t() + torch.eye(2, device=x.device)


NUMBERS = {
    "floor division": lambda x: (2 // x, x // 2, 7 // (x * 3).long()),
    "division": lambda x: (2 / x, x / 2, 2 / x.to(torch.complex64)),
    "the rest": lambda x: (2 - x, 2**x, 2 % x, 3 & x.long(), 1 << x.long(), 8 >> x.long()),
    "complex": lambda x: (x * (1 + 2j), 2j * x, x.to(torch.complex64) * 2, x + 1j, x / 2j),
    "numpy": lambda x: (x * np.float32(2), x + np.int64(1), x[:, np.int64(1)], x ** np.float64(2)),
    "cpu numbers": lambda x: (x + torch.tensor(2.0), torch.where(x > 1, torch.tensor(5.0), x)),
    "dtypes": lambda x: (x.long() * 2.5, (x > 1) + 1, x.half() + 1.5, x.sum(dtype=torch.double)),
    "as an index": lambda x: ([10, 20, 30][x.long()[1, 0]], list(range(x[1, 2].long()))),
    "as a number": lambda x: (float(x[0, 0]), int(x[1, 2]), math.sqrt(x[0, 0]), f"{x[0, 0]:.3f}"),
    "compared": lambda x: (1.0 in x, bool((x > 0).all()), max(x[0]), sum(x[0]), len(x)),
}
INDICES = {
    "mask": lambda x: (x[x > 1], x.masked_select(x > 1), x[:, like(x, True, False, True)]),
    "nonzero": lambda x: ((x > 1).nonzero(), torch.argwhere(x > 1), torch.where(x > 1)),
    "unique": lambda x: torch.unique(x.round(), return_inverse=True, return_counts=True),
    "unique rows": lambda x: (torch.unique(x, dim=0), torch.unique_consecutive(x.round())),
    "where": lambda x: (torch.where(x > 1, x, 0), torch.where(x > 1, 1, 2.0)),
    "sort": lambda x: (x.sort(descending=True, stable=True), x.argsort(1), x.msort(), x.topk(2)),
    "order": lambda x: (x.median(1), x.mode(1), x.kthvalue(2), x.cummax(1), x.aminmax()),
    "search": lambda x: (torch.searchsorted(x, x), torch.bucketize(1.0, like(x, 0.5, 1.0))),
    "take": lambda x: (x.take(like(x, 0, 3)), x.take_along_dim(x.argsort(1), 1), x[[1, 0]]),
    "repeat": lambda x: (x.repeat_interleave(like(x, 1, 2), 0), x.repeat_interleave(2)),
    "count": lambda x: (torch.bincount(x.long().flatten()), x.count_nonzero(1), x.histc(4)),
    "histogram": lambda x: (torch.histogram(x, 4), torch.histogramdd(x, [2, 2, 2])),
    "cpu indices": lambda x: (x[torch.tensor([1, 0])], x[torch.tensor(1)], x[:, torch.tensor(0)]),
    "one hot": lambda x: F.one_hot(x.long(), 4),
}
FACTORIES = {
    "like": lambda x: (torch.full_like(x, 3), x.new_tensor([1, 2]), x.new_full((2,), 1.0)),
    "from lists": lambda x: (like(x, 1, 2), torch.asarray(np.arange(3), device=x.device)),
    "from a value": lambda x: (torch.full((2,), x[0, 0], device=x.device), x.new_zeros(2)),
    "ranges": lambda x: (torch.arange(0, 1, 0.1, device=x.device), x.new_ones(2).cumsum(0)),
    "logspace": lambda x: torch.logspace(0, 1, 3, device=x.device),
    "triangles": lambda x: (torch.triu_indices(3, 3, device=x.device), x.tril(), x.diag()),
    "windows": lambda x: (
        [
            getattr(torch, f"{name}_window")(5, device=x.device)
            for name in ("hann", "hamming", "blackman", "bartlett", "kaiser")
        ]
        + [torch.kaiser_window(5, periodic, 8.0, device=x.device) for periodic in (True, False)]
    ),
    "grids": lambda x: (*torch.meshgrid(x[0], x[1], indexing="ij"), torch.cartesian_prod(*x)),
    "blocks": lambda x: (torch.block_diag(x, x), torch.kron(x, x), torch.hstack([x, x.long()])),
}
TRANSFORMS = {
    "fft": lambda x: (torch.fft.fft(x), torch.fft.irfft(torch.fft.rfft(x)), torch.fft.fft2(x)),
    "hermitian": lambda x: (torch.fft.ihfft(x), torch.fft.ihfft2(x), torch.fft.hfft(x + 0j)),
    "shifted": lambda x: (torch.fft.fftshift(x), torch.fft.fftfreq(5, device=x.device)),
    "stft": lambda x: torch.stft(x.repeat(1, 10), 8, window=x.new_ones(8), return_complex=True),
    "factors": lambda x: (torch.linalg.qr(x), torch.linalg.cholesky(positive(x))),
    "systems": lambda x: (torch.linalg.lstsq(x.t(), x.t())[0], torch.linalg.pinv(x)),
    "numbers": lambda x: (torch.linalg.slogdet(positive(x)), torch.linalg.matrix_rank(x)),
    "products": lambda x: (torch.einsum("ij,kj,k->i", x, x, x[:, 0]), torch.tensordot(x, x.t(), 1)),
    "distances": lambda x: (torch.cdist(x, x), torch.cov(x), torch.corrcoef(x)),
    "special": lambda x: (torch.special.i0(x), torch.polygamma(1, x), torch.igamma(x, x)),
    "statistics": lambda x: (x.quantile(like(x, 0.1, 0.5)), x.nanmedian(), torch.std_mean(x)),
    "storage": lambda x: (x.view(torch.int32), x.to(torch.float8_e4m3fn).float(), x.bool()),
    "quantized numbers": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
}  # fmt: skip
GROUPS = {"numbers": NUMBERS, "indices": INDICES, "factories": FACTORIES, "others": TRANSFORMS}


@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group in GROUPS for name in GROUPS[group]]
)
def test_operator_results_are_the_cpus(group, name):
    alike(lambda device: GROUPS[group][name](x_on(device)))


def changed(x, index, value):
    x[index] = value
    return x


WRITES = {
    "mask": lambda x: changed(x, x > 1, 0.0),
    "list": lambda x: changed(x, [1, 0], x.clone()),
    "cpu indices": lambda x: changed(x, (..., torch.tensor([0, 1])), torch.tensor(5.0)),
    "a step": lambda x: changed(x, (0, slice(None, None, 2)), like(x, 5.0, 6.0)),
    "from the cpu": lambda x: changed(x, 0, torch.tensor([5.0, 6.0, 7.0])),
    "scatter": lambda x: x.scatter_reduce(1, (x > 1).long(), x, "amax"),
    "masked": lambda x: (x.masked_scatter(x > 1, x * 2), x.masked_fill(x > 1, 3)),
    "parts": lambda x: (x.select_scatter(x[0], 0, 1), torch.diagonal_scatter(x, x[:, 0])),
    "index": lambda x: (x.index_fill(1, like(x, 0), 3), x.put(like(x, 0), like(x, 9.0))),
}


@pytest.mark.parametrize("name", WRITES)
def test_in_place_operator_results_are_the_cpus(name):
    alike(lambda device: WRITES[name](x_on(device)))


# ---- Conjugates and signs ----

ALL_DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.int8,
    torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip
LAZY = [
    torch.sgn, torch.sign, torch.conj, torch.neg, torch.abs, torch.angle, torch.imag, torch.real,
    lambda x: x.conj().clone(), lambda x: x.conj() + x, lambda x: torch.sgn(x.conj()),
    lambda x: x.clone().sgn_(), lambda x: x.conj().imag, lambda x: x.conj().imag.neg(),
    lambda x: x.conj().contiguous(), lambda x: x.conj()[1:], lambda x: torch.cat([x, x.conj()]),
    lambda x: x.conj().to(torch.complex128), lambda x: torch.zeros_like(x).copy_(x.conj()),
    lambda x: x.conj().cpu().tolist(), lambda x: x.conj().resolve_conj(), lambda x: x.mH,
    lambda x: torch.zeros(4, dtype=x.dtype).copy_(x.conj()).tolist(), lambda x: x.conj().tolist(),
    lambda x: torch.tensor([0, 1, 2, 0]).to(x.dtype).conj().to(x.device) * 1,
]  # fmt: skip


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_lazy_conjugates_and_signs_are_the_cpus(dtype):
    def program(device):
        x, results = torch.tensor([0, 1, 2, 0]).to(dtype).to(device), []
        for function in LAZY:
            try:
                results.append(function(x))
            except (RuntimeError, TypeError) as error:
                results.append(type(error).__name__)
        return results

    alike(program)


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_huber_loss_out_of_another_size_is_the_cpus(reduction):
    def program(device):
        x = torch.arange(6.0).view(2, 3).to(device)
        out = torch.empty((2, 3) if reduction == 0 else (), device=device)
        return [torch.ops.aten.huber_loss.out(x, x * 3, reduction, 1.0, out=out) for _ in range(2)]

    alike(program)


def solved(device, shape, left, derive):
    torch.manual_seed(0)
    a = torch.randn(*shape, 3, 3, dtype=torch.complex64).to(device).requires_grad_(derive)
    b = torch.randn(*shape, 3, 3, dtype=torch.complex64).to(device).requires_grad_(derive)
    x = torch.linalg.solve(a, b, left=left)
    if derive:
        return [x.detach(), *torch.autograd.grad(x.abs().square().sum(), (a, b))]
    factors = torch.linalg.lu_factor(a)
    extended = torch.ops.aten._linalg_solve_ex(a, b, left=left)
    return [x, *extended, torch.linalg.lu_solve(*factors, b, left=left)]


@pytest.mark.parametrize("derive", [False, True], ids=["", "gradients"])
@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
@pytest.mark.parametrize("shape", [(), (2,)], ids=["one", "batch"])
def test_complex_systems_are_solved_as_on_the_cpu(shape, left, derive):
    for _ in range(3):  # the kernel gives its result the conj bit; later calls are remembered
        alike(lambda device: solved(device, shape, left, derive))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16], ids=str)
def test_gradients_that_are_zero_everywhere_are_the_cpus(dtype):
    def program(device):
        x = drawn(device, 3, dtype=dtype)
        y = torch.sgn(x) + torch.sgn(x.conj())
        return torch.autograd.grad(y.abs().sum(), x, create_graph=True)

    alike(program)


# ---- Strides, where arguments' do not agree ----


def images(device, n, dtype=torch.float32):
    x = torch.arange(n * 24).view(n, 3, 2, 4).to(dtype)
    return x.to(device).to(memory_format=torch.channels_last)


def volumes(device, n):
    x = torch.arange(n * 72.0).view(n, 3, 2, 4, 3)
    return x.to(device).to(memory_format=torch.channels_last_3d)


PADDINGS = ("reflect", "replicate", "circular", "constant")


def columns(device, n, dtype=torch.float32):
    """A part of a matrix, turned."""
    return torch.arange(2 * n * 5).view(5, 2 * n).to(dtype).to(device)[:, ::2].t()


STRIDES = {
    "a part of a row's mask": lambda d, n: torch.where(
        (torch.arange(4) > 1).to(d), images(d, n), 0.0
    ),
    "channels last and contiguous": lambda d, n: (
        torch.where(images(d, n) > n, images(d, n), images(d, n).contiguous()),
        images(d, n).contiguous().logical_and(images(d, n)),
    ),
    "one number for each image": lambda d, n: (
        images(d, n) // torch.arange(1.0, 4).to(d).view(3, 1, 1)
    ),
    "subtracted from": lambda d, n: torch.rsub(images(d, n), images(d, n).contiguous()),
    "turned": lambda d, n: torch.complex(columns(d, n), torch.ones(5).to(d)),
    # These depend on what the CPU's kernel casts before it looks.
    "one number, cast": lambda d, n: (
        torch.ones((), device=d).expand(n, 5) * columns(d, n, torch.float64)
    ),
    "a comparison": lambda d, n: (
        torch.ones(1, 5, dtype=torch.int32, device=d).expand(n, 5) == columns(d, n)
    ),
    "integers made floating": lambda d, n: (
        torch.arange(5).to(d).expand(n, 5) / columns(d, n, torch.long),
        columns(d, n, torch.uint8)[:, 1:2].sigmoid().neg(),
        torch.arange(n + 4).to(d).unfold(0, 5, 1).atan2(columns(d, n, torch.long)),
    ),
    "padded images": lambda d, n: [F.pad(images(d, n), (1, 1, 1, 1), mode=m) for m in PADDINGS],
    "padded volumes": lambda d, n: [F.pad(volumes(d, n), (1,) * 6, mode=m) for m in PADDINGS],
    "where with two dtypes": lambda d, n: torch.where(
        columns(d, n) > 2, torch.ones((), device=d).expand(n, 5), columns(d, n, torch.float64)
    ),
}


@pytest.mark.parametrize("name", STRIDES)
def test_result_strides_are_the_cpus(name):
    # The first size may teach dtypes; what the others give is inferred from them.
    alike(lambda device: [STRIDES[name](device, n) for n in (2, 3, 4)])


def test_isin_of_a_number_is_the_cpus():
    alike(lambda d: [torch.isin(n, torch.arange(4, device=d)) for n in (2, 7, 2.0)])
    alike(lambda d: torch.isin(2, torch.arange(4, device=d), assume_unique=True, invert=True))


def turned(t):
    """The same values in another order of strides."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def there(t, device):
    """On the device with the strides that it has, gaps included."""
    elements = t.untyped_storage().nbytes() // t.itemsize
    flat = t.as_strided((elements,), (1,), 0).to(device)
    return flat.as_strided(t.shape, t.stride(), t.storage_offset())


INTEGERS = torch.arange(1, 129).view(4, 2, 16)
COMPLEX = torch.complex(torch.arange(12.0), -torch.arange(12.0)).view(3, 4)
LIKE_THE_CPU = {
    "angle": (torch.angle, [COMPLEX], [turned(COMPLEX)]),
    "ldexp": (torch.ldexp, [INTEGERS[0, 0]] * 2, [INTEGERS[0, 0], turned(INTEGERS)]),
    "erf": (torch.erf, [INTEGERS], [turned(INTEGERS)[:, :1]]),
    "lgamma": (torch.lgamma, [INTEGERS], [turned(INTEGERS)[:, :1, ::2]]),
    "ne": (
        torch.ne, [INTEGERS] * 2, [INTEGERS[:, :1, ::2], turned(INTEGERS)[:, :1, :8] + 0.0],
    ),
    "pow": (lambda x: 2.0**x, [INTEGERS], [turned(INTEGERS)]),
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), [INTEGERS + 0.0], [turned(INTEGERS + 0.0)]),
    "max_pool1d of one channel": (
        lambda x: F.max_pool1d(x, 2), [INTEGERS + 0.0], [turned(INTEGERS + 0.0)[:, :1]],
    ),
    "max_pool1d without a batch": (
        lambda x: F.max_pool1d(x, 2), [INTEGERS[0] + 0.0], [turned(INTEGERS[0] + 0.0)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LIKE_THE_CPU)
def test_result_strides_do_not_depend_on_earlier_calls(name):
    """Also of dimensions of size 1, where no element's place depends on them."""
    function, plain, others = LIKE_THE_CPU[name]
    for arguments in (plain, others, plain, others):
        expected = function(*arguments)
        result = function(*(there(x, DEVICE) for x in arguments))
        assert result.stride() == expected.stride()
        torch.testing.assert_close(result.cpu(), expected)


def test_max_pool1d_gradient_is_the_cpus():
    def program(device):
        x = drawn(device, 2, 8, 3)
        F.max_pool1d(x.transpose(1, 2), 2).square().sum().backward()
        with torch.no_grad():
            return x.grad, F.max_pool1d(x.transpose(1, 2), 2)

    alike(program)


def test_spectrogram_gradient_is_the_cpus():
    def program(device):
        x = drawn(device, 400)
        spectrum = torch.stft(x, 64, 16, window=torch.ones(64, device=device), return_complex=True)
        spectrum.abs().sum().backward()
        return spectrum, x.grad

    alike(program)


@pytest.mark.parametrize("name", ["tril_", "triu_"])
def test_triangles_in_place_of_permuted_batches_are_the_cpus(name):
    def program(device):
        x = torch.arange(48.0).view(4, 4, 1, 3).to(device).permute(3, 2, 1, 0)
        return getattr(x, name)()

    alike(program)


def test_ldexp_does_not_overflow_before_its_result_does():
    def program(device):
        x, exponent = torch.tensor([1e-30, -3e-20]).to(device), torch.tensor([130, 140]).to(device)
        return x.ldexp(exponent), torch.ldexp(x, exponent, out=x.new_empty(2)), x.ldexp_(exponent)

    assert alike(program)[0].isfinite().all()


# ---- Errors ----

MISTAKES = {
    "sizes": lambda x: x @ x,
    "view": lambda x: x.view(5),
    "index": lambda x: x[5],
    "dim": lambda x: x.sum(7),
    "list": lambda x: torch.cat([x, x[:, :2]]),
    "dtype": lambda x: x.long().mean(),
    "equation": lambda x: torch.einsum("ij,jk", x, x),
    "not positive": lambda x: torch.linalg.cholesky(-positive(x)),
    "channels": lambda x: F.conv2d(x.view(1, 1, 2, 3), x.new_ones(1, 2, 1, 1)),
    "mask": lambda x: F.scaled_dot_product_attention(x, x, x, x.new_ones(9)),
    "shape of a mask": lambda x: x[x.view(3, 2) > 1],
    "bins": lambda x: torch.bincount(x),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_raise_the_cpus_errors(name):
    def program(device):
        with pytest.raises(Exception) as error:
            MISTAKES[name](x_on(device))
        return error.type.__name__, str(error.value).splitlines()[0]

    alike(program)


# ---- Products with a wider result, which the CPU does not have ----


def products(device, dtype):
    """Calls with `out_dtype`, each with the same in float32."""
    a, b, c = (torch.randn(5, 5, device=device, dtype=dtype) for _ in range(3))
    batches = [torch.randn(2, 5, 5, device=device, dtype=dtype) for _ in range(3)]
    scaled = {"beta": 2, "alpha": 0.5}
    for function, given, options in (
        (torch.mm, (a, b), {}),
        (torch.bmm, batches[:2], {}),
        (torch.addmm, (c, a, b), scaled),
        (torch.addmm, (c.float(), a, b), {}),
        (torch.baddbmm, batches, scaled),
        (torch.baddbmm, (batches[0].float(), *batches[1:]), {}),
    ):
        wide = [tensor.float().cpu() for tensor in given]
        yield partial(function, *given, **options), function(*wide, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_with_a_wider_result_are_the_cpus_in_float32(dtype):
    for product, expected in products(DEVICE, dtype):
        for _ in range(2):
            made = product(out_dtype=torch.float32)
            assert made.dtype == torch.float32 and torch.equal(made.cpu(), expected)
        out = torch.empty(0, device=DEVICE)
        assert product(out_dtype=torch.float32, out=out) is out
        assert torch.equal(out.cpu(), expected)
        graph = torch.openreg.Graph()
        with torch.openreg.device(DEVICE), torch.openreg.graph(graph):
            captured = product(out_dtype=torch.float32)
        captured.zero_()
        graph.replay()
        assert torch.equal(captured.cpu(), expected)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            assert torch.equal(product(out_dtype=torch.float32).cpu(), expected)


def test_products_with_out_dtype_refuse_other_types():
    a = torch.ones(2, 2, device=DEVICE, dtype=torch.bfloat16)
    assert torch.mm(a, a, out_dtype=torch.bfloat16).tolist() == [[2, 2], [2, 2]]
    with pytest.raises(RuntimeError, match="fp32 for fp16/bf16 inputs, but got Double"):
        torch.mm(a, a, out_dtype=torch.float64)
    with pytest.raises(RuntimeError, match="fp32 for fp16/bf16 inputs, but got Half for Float"):
        torch.mm(a.float(), a.float(), out_dtype=torch.float16)
    with pytest.raises(RuntimeError, match="the same dtype, but got BFloat16 and Half"):
        torch.mm(a, a.half(), out_dtype=torch.float32)
    with pytest.raises(RuntimeError, match="self must have the dtype of the matrices or out_dtype"):
        torch.addmm(a.double(), a, a, out_dtype=torch.float32)
    with pytest.raises(RuntimeError, match="the provided out tensor, but got Float and BFloat16"):
        torch.mm(a, a, out_dtype=torch.float32, out=a.clone())
    with pytest.raises(RuntimeError, match="derivative for aten::mm is not implemented"):
        torch.mm(a.requires_grad_(), a, out_dtype=torch.float32).sum().backward()


@pytest.mark.slow
def test_compiled_products_with_a_wider_result_are_eagers(run_ok):
    program = """
        import sys, torch, torch_openreg
        device = "openreg"
        {name}
        sys.path.append({here!r})
        from test_results import products
        for product, expected in products(device, torch.bfloat16):
            for backend in "aot_eager", "inductor":
                torch._dynamo.reset()
                compiled = torch.compile(
                    lambda: product(out_dtype=torch.float32), backend=backend, fullgraph=True
                )
                torch.testing.assert_close(compiled().cpu(), expected)
    """
    run_ok(program.format(name="", here=HERE))
    run_ok(program.format(name='device = "cuda"; torch_openreg.as_cuda()', here=HERE))
