"""Every kind of argument and result of an operator that nobody waits for."""

import resource
import warnings

import pytest
import torch
import torch.nn.functional as F
from host_ahead import DEVICE, compare, unseen

import torch_openreg  # noqa: F401

two_devices = pytest.mark.skipif("torch.openreg.device_count() < 2")

# ---- The second call runs ahead ----

REMEMBERED = {
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "embedding": lambda x: F.embedding((x[:3] > 0.5).long(), x),
    "nll_loss": lambda x: F.nll_loss(x, (x[:, 0] > 0.5).sum().expand(x.shape[0])),
    "conv": lambda x: F.conv1d(x[None], x[:2, :3].expand(4, 2, 3).transpose(0, 1)),
    "max_pool": lambda x: F.max_pool1d(x[None], 2),
    "index_select": lambda x: x.index_select(0, x.argmax(0)[:3]),
    "gather": lambda x: x.gather(1, x.argmax(1, keepdim=True)),
    "index": lambda x: x[x.argmax(0)[:2]],
    "flip": lambda x: x.flip(0),
    "std_mean": lambda x: torch.std_mean(x, 1),
    "relu": lambda x: F.relu(x),
    "abs": lambda x: x.abs(),
    "l1_loss": lambda x: F.l1_loss(x, x + 1),
    "mse_loss": lambda x: F.mse_loss(x, x + 1),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), x.sigmoid()),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "fft": lambda x: torch.fft.rfft(x),
    "linspace": lambda x: torch.linspace(0, 1, 9, device=x.device) + x[0, 0],
    "arange": lambda x: torch.arange(9, device=x.device) + x[0, 0],
    "scatter_add": lambda x: (x + 0).scatter_add_(0, (x > 2).long(), x),
    "pad": lambda x: F.pad(x, (1, 2)),
    "repeat": lambda x: x.repeat(2, 2),
    "contiguous": lambda x: x.t().contiguous(),
    "to_half": lambda x: x.to(torch.bfloat16),
    "copy_with_strides": lambda x: torch.empty_like(x).t().copy_(x.t()),
    "set_item": lambda x: x.clone().__setitem__((slice(1), slice(2)), 3.0) or x + 0,
}


@pytest.mark.parametrize("name", REMEMBERED)
def test_remembered_call_runs_ahead_with_the_cpus_values(queued, name):
    queued(REMEMBERED[name], torch.rand(4, 8) + 0.1, warm=True)


def test_tensor_lists_run_ahead(queued):
    def run(*tensors):
        xs, ys = [x.clone() for x in tensors[:3]], list(tensors[3:])
        torch._foreach_add_(xs, ys)
        torch._foreach_mul_(xs, 2)
        torch._foreach_addcdiv_(xs, ys, ys, [1.0, 2.0, 3.0])
        return [*xs, *torch._foreach_sqrt(xs), *torch._foreach_norm(xs)]

    xs = [torch.rand(n) + 0.5 for n in (3, 1, 20)]
    queued(run, *xs, *[x + 1 for x in xs], warm=True)


def test_outputs_left_out_stay_none_when_run_ahead(queued):
    def run(x, w):
        out, mean, rstd = torch.native_layer_norm(x, [x.shape[1]], w, None, 1e-5)
        whole = torch.ops.aten.native_layer_norm_backward(
            x, out, [x.shape[1]], mean, rstd, w, None, [True, False, False]
        )
        assert whole[1] is None and whole[2] is None
        return out, mean, rstd, whole[0]

    queued(run, torch.rand(4, 6), torch.rand(6), warm=True)


def test_optional_tensors_run_ahead(queued):
    x, w, b = torch.rand(2, 3, 8), torch.rand(4, 3, 3), torch.rand(4)
    queued(lambda x, w: F.conv1d(x, w, None), x, w, warm=True)
    queued(lambda x, w, b: F.conv1d(x, w, b), x, w, b, warm=True)
    weight = torch.rand(5)
    target = torch.tensor([1, 4, 0])
    queued(lambda x, t: F.nll_loss(x, t), torch.rand(3, 5), target, warm=True)
    queued(lambda x, t, w: F.nll_loss(x, t, w), torch.rand(3, 5), target, weight, warm=True)


def test_index_lists_with_gaps_run_ahead(queued):
    x = torch.rand(4, 5, 6)
    rows, columns = torch.tensor([1, 3]), torch.tensor([0, 2])
    queued(lambda x, i, j: x[i, :, j], x, rows, columns, warm=True)
    queued(lambda x, i: x[:, i], x, rows, warm=True)


def test_number_in_a_cpu_tensor_is_taken_by_value(runs_ahead):
    x = torch.ones(5, device=DEVICE)
    number = torch.tensor(2.0)

    def run():
        product, total = x * number, x + number
        inplace = torch.zeros(5, device=DEVICE).add_(number)
        number.fill_(1000)
        return product, total, inplace

    product, total, inplace = runs_ahead(run)
    assert product.tolist() == [2] * 5
    assert total.tolist() == [3] * 5
    assert inplace.tolist() == [2] * 5


def test_python_number_is_not_part_of_a_remembered_call(runs_ahead):
    x = torch.arange(5.0, device=DEVICE)
    runs = runs_ahead(lambda: [x.mul(n) for n in (0.5, 2.0, -3.0)])
    assert [r[1].item() for r in runs] == [0.5, 2.0, -3.0]


def sgd(x, lr):
    settings = {"weight_decay": 0, "momentum": 0, "dampening": 0, "nesterov": False}
    torch._fused_sgd_([x], [x], [], lr=lr, maximize=False, is_first_step=False, **settings)


CHANGING = {
    "an optimizer's step": sgd,
    "nan_to_num": torch.nan_to_num,
}


@pytest.mark.parametrize("name", CHANGING)
def test_float_that_changes_makes_no_first_call(name):
    # At a first call the host runs the kernel on memory of its own, whose pages it has to ask for.
    x = torch.zeros(1 << 22, device=DEVICE)

    def pages(number):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        CHANGING[name](x, number)
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    with torch.openreg.testing.gate() as gate:
        gate.wait()
        first, *later = [pages(number) for number in (0.5, 0.25, 0.125)]
    assert max(later) * 4 < first


ELEMENTWISE = {
    "zero_": torch.Tensor.zero_,
    "fill_": lambda x: x.fill_(2),
    "normal_": torch.Tensor.normal_,
    "bernoulli_": torch.Tensor.bernoulli_,
    "relu_": torch.Tensor.relu_,
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_first_in_place_call_on_a_large_tensor_is_right(name):
    # Its size is not what the host pays for: 100 pages are less, were they as large as 2 MiB.
    ELEMENTWISE[name](torch.zeros(3, device=DEVICE))
    x = torch.empty(1 << 26, device=DEVICE)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    with torch.openreg.testing.gate() as gate:
        gate.wait()
        ELEMENTWISE[name](x)
        assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 100


def test_numbers_and_tensors_promote_to_the_same_dtypes(runs_ahead):
    x = torch.ones(3, dtype=torch.int32, device=DEVICE)
    y = torch.ones(3, dtype=torch.float16, device=DEVICE)

    def run():
        return [x * 2, x * 2.5, y * 2.5, x * torch.tensor(2.5), x + y, x * torch.tensor(2), x / 2]

    dtypes = [torch.int32, torch.float32, torch.float16, torch.float32, torch.float16]
    dtypes += [torch.int32, torch.float32]
    for _ in range(2):
        assert [t.dtype for t in runs_ahead(run)] == dtypes
    zero_dim = torch.tensor(2.5, dtype=torch.float64, device=DEVICE)
    assert (y * zero_dim).dtype == torch.float16
    assert (y * zero_dim.reshape(1)).dtype == torch.float64


@pytest.fixture
def double_by_default():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def made_of_integers(x):
    return [
        x * 0.5,
        x / 3,
        x.exp(),
        x.float().mean() + 0.5,
        torch.linspace(0, 1, 4, device=x.device),
        x + 2**24 > 2**24 + 0.5,
        torch.div(x, 3, out=torch.empty(4, dtype=torch.float64, device=x.device)),
        torch.mul(x + 2**30, x, out=torch.empty(4, device=x.device)),
        torch.div(x, x - 70001.5, rounding_mode="trunc"),
        *into_floats(x),
        *compared(x),
        *lists_of_integers(x),
    ]


def into_floats(x):
    """Outputs (out=) of operators whose overloads have several names."""

    def out():
        return torch.empty(4, dtype=torch.float64, device=x.device)

    return [
        torch.div(x, 3, rounding_mode=None, out=out()),
        torch.div(x, 1.5, rounding_mode="floor", out=out()),
        torch.true_divide(x, 7, out=out()),
        torch.pow(x, 0.5, out=out()),
        torch.special.xlog1py(x, 2.5, out=out()),
        torch.logsumexp(x % 7, 0, out=out()[0]),
    ]


def compared(x):
    """With numbers that other dtypes would round to a member, or a member to them."""
    return [
        (x + 2**24).gt_(2**24 + 70001.5),
        (x + 2**24).eq_(2**24 + 70000.0),
        (x % 2).bool().lt_(1.00001),
        torch.eq((x % 2).bool(), 1.00001),
        torch.ne(x + 2**24, 2**24 + 70001.0, out=torch.empty(4, device=x.device)),
        torch.isin(x + 2**24, 2**24 + 70001.0),
        torch.isin(2**24 + 70001.0, x + 2**24),
    ]


def lists_of_integers(x):
    """Each member has its own dtype, and its own number."""
    mixed = [x, x + 2**24, x.double() + 2**24]
    dtypes = [torch.get_default_dtype(), x.dtype, torch.float64]
    outs = [torch.empty(4, dtype=dtype, device=x.device) for dtype in dtypes]
    torch.ops.aten._foreach_mul.ScalarList_out(mixed, [2.5, 2, 0.1], out=outs)
    return [
        *torch._foreach_mul([x, x + 2**24], [2.5, 2]),
        *torch._foreach_clamp_min([x, x + 2**24], [2, 2.5]),
        *torch._foreach_div(mixed, 3.0),
        *torch._foreach_mul(mixed, [2.5, 2, 0.1]),
        *torch.ops.aten._foreach_div.Tensor([x, x.double()], x[3] - 69999),
        *outs,
    ]


def test_default_dtype_decides_results_of_integers(double_by_default):
    x = torch.arange(4)
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        for _ in range(2):
            compare(made_of_integers(x.to(DEVICE)), made_of_integers(x))


@pytest.mark.parametrize("then", [torch.float32, torch.float64])
@pytest.mark.parametrize("now", [torch.float16, torch.float64])
@pytest.mark.parametrize("called", [False, True])
def test_default_dtype_is_that_of_the_call(runs_ahead, double_by_default, then, now, called):
    x = torch.arange(4, dtype=torch.int32) + 70000
    there = x.to(DEVICE)
    torch.set_default_dtype(then)
    expected = made_of_integers(x)
    if called:
        made_of_integers(there)

    def run():
        results = made_of_integers(there)
        torch.set_default_dtype(now)
        return results

    compare(runs_ahead(run), expected)


def of_integers(x):
    mask = x > 1
    return [
        x + 1, x // 2, x == 2, ~mask & mask, x.sum(), mask.any(), x[x], x.sort()[1], x.cumsum(0),
        torch.cat([x, x]), torch.stack([x, x]).t(), x.clone().fill_(3), x.gather(0, x), x.argmax(),
        torch.zeros(3, dtype=torch.int, device=x.device), torch.arange(3, device=x.device),
        torch.tril_indices(3, 3, device=x.device), F.one_hot(x, 4), torch.where(mask, x, 0),
    ]  # fmt: skip


def test_integers_run_ahead_whatever_the_default_dtype(queued, double_by_default):
    queued(of_integers, torch.arange(4))
    queued(of_integers, torch.arange(4))
    there = torch.randperm(5, device=DEVICE)
    torch.openreg.set_sync_debug_mode("error")
    try:
        torch.randperm(5, device=DEVICE)
        torch.randint(9, (4,), device=DEVICE)
        there / 2
    finally:
        torch.openreg.set_sync_debug_mode("default")


def test_zero_tensors_without_memory_run_ahead(queued):
    def run(x):
        zeros = torch._efficientzerotensor(x.shape, device=x.device)
        return x + zeros, zeros * 2 + x, torch.cat([x, x * zeros])

    queued(run, torch.rand(6), warm=True)


def test_conj_and_neg_views_run_ahead(queued):
    x = torch.randn(3, 5, dtype=torch.complex64)

    def run(x):
        return [
            x.conj() + 1,
            x.conj() @ x.t(),
            x.mH @ x,
            x.imag * 2,
            x.conj().imag + 1,
            x.conj().imag.exp(),
            torch.view_as_real(x) * 2,
            torch.vdot(x[0], x[1]),
            x.conj(),
            (x + 0).conj().mul_(2j),
        ]

    queued(run, x, warm=True)


def test_overlapping_results_and_views_as_arguments_are_right(queued):
    def run(x):
        y = x + 0
        y[:3].add_(y[3:])
        y.t()[1:].mul_(y.t()[0])
        torch.add(y[0], y[1], out=y[2])
        return y, y.t() + y[:, :5].t().expand(5, 6)

    queued(run, torch.rand(6, 5))


# ---- out= ----


def test_out_of_the_right_size_is_written_in_place(runs_ahead):
    x = unseen(3).to(DEVICE)
    out = torch.empty_like(x)
    address = out.data_ptr()
    torch.add(x, 1, out=out)
    result = runs_ahead(lambda: torch.add(x, 2, out=out))
    assert result is out and out.data_ptr() == address
    torch.testing.assert_close(out.cpu(), x.cpu() + 2)
    transposed = torch.zeros(x.shape[::-1], device=DEVICE)
    torch.mul(x, 1, out=transposed.t())
    runs_ahead(lambda: torch.mul(x, 3, out=transposed.t()))
    torch.testing.assert_close(transposed.cpu(), (x.cpu() * 3).t())


def test_out_of_another_size_is_resized():
    x = torch.arange(6.0, device=DEVICE)
    for _ in range(3):
        out = torch.empty(0, device=DEVICE)
        assert torch.cumsum(x, 0, out=out) is out and out.tolist() == [0, 1, 3, 6, 10, 15]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = torch.ones(2, device=DEVICE)
            torch.add(x, 1, out=out)
            torch.openreg.synchronize()
        assert out.tolist() == [1, 2, 3, 4, 5, 6]
        assert any("resized" in str(w.message) for w in caught)


RESIZED_IN_SILENCE = {
    "linspace": lambda out: torch.linspace(0, 1, 5, out=out),
    "logspace": lambda out: torch.logspace(0, 1, 5, out=out),
    "eye": lambda out: torch.eye(3, out=out),
    "randperm": lambda out: torch.randperm(4, out=out),
    "multinomial": lambda out: torch.multinomial(torch.ones(5, device=out.device), 3, out=out),
}


@pytest.mark.parametrize("name", RESIZED_IN_SILENCE)
def test_out_is_resized_in_silence_where_the_cpus_kernel_does_so(name):
    dtype = torch.long if name in ("randperm", "multinomial") else torch.float32
    for device in ("cpu", DEVICE, DEVICE):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            out = RESIZED_IN_SILENCE[name](torch.zeros(2, dtype=dtype, device=device))
            torch.openreg.synchronize()
        assert out.numel() > 2


def test_out_is_resized_in_the_words_of_the_kernel_at_each_call():
    texts = []
    for device in ("cpu", DEVICE, DEVICE):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.arange(5, out=torch.zeros(7, dtype=torch.long, device=device))
            torch.openreg.synchronize()
        texts.append([str(w.message).split("(Triggered")[0] for w in caught])
    assert len(texts[0]) == 1 and texts == [texts[0]] * 3


def test_out_is_resized_behind_queued_work():
    x = torch.arange(1000.0, device=DEVICE)
    expected = (torch.arange(1000.0) + 1).tolist()
    for _ in range(3):
        out = torch.empty(0, device=DEVICE)
        torch.openreg._sleep(5_000_000)
        torch.abs(x + 1, out=out)
        doubled = out * 2
        assert out.tolist() == expected
        assert doubled.tolist() == [2 * value for value in expected]


def test_composite_meta_functions_run_ahead(queued):
    queued(lambda x: torch.logsumexp(x, 0), torch.rand(5, 7), warm=True)
    queued(lambda x: torch.logsumexp(x, 1), torch.rand(5, 7))
    queued(lambda x: torch.logsumexp(x, 0), torch.rand(5, 0), warm=True)
    queued(lambda x, w: F.bilinear(x, x, w), torch.rand(0, 5), torch.rand(2, 5, 5), warm=True)
    queued(lambda x: (x + 0).as_strided_((2, 2), (2, 1)).t_().unsqueeze_(1), torch.rand(6))
    x = torch.rand(2, 2, dtype=torch.complex64) + torch.eye(2) * 3
    for adjoint in (True, False):
        factors = torch.linalg.lu_factor(x)
        solve = lambda a, lu, p, adjoint=adjoint: torch.linalg.lu_solve(  # noqa: E731
            lu, p, a, left=False, adjoint=adjoint
        )
        queued(solve, x, *factors, warm=True)


def test_out_of_another_dtype_is_cast_or_refused():
    x = torch.arange(4, device=DEVICE)
    out = torch.empty(4, dtype=torch.float64, device=DEVICE)
    for _ in range(2):
        torch.add(x, 1, out=out)
        assert out.tolist() == [1.0, 2.0, 3.0, 4.0]
    with pytest.raises(RuntimeError, match="result type Float can't be cast"):
        torch.mul(x, 0.5, out=torch.empty(4, dtype=torch.long, device=DEVICE))


# ---- Results whose size numbers decide ----


def test_factories_follow_the_numbers_of_each_call(queued):
    for end in (5, 9, 5, 2):
        assert torch.arange(end, device=DEVICE).tolist() == list(range(end))
        assert torch.arange(0, end, 2, device=DEVICE).tolist() == list(range(0, end, 2))
        expected = torch.linspace(0, 1, end)
        torch.testing.assert_close(torch.linspace(0, 1, end, device=DEVICE).cpu(), expected)
        assert torch.full((end,), 3, device=DEVICE).tolist() == [3] * end
        assert torch.eye(end, device=DEVICE).sum().item() == end
        assert (
            torch.tril_indices(end, end, device=DEVICE).shape == torch.tril_indices(end, end).shape
        )
    for step in (0.5, 0.25, 0.5):
        assert torch.equal(torch.arange(0, 1, step, device=DEVICE).cpu(), torch.arange(0, 1, step))
    assert torch.arange(3, 0, -1, device=DEVICE).tolist() == [3, 2, 1]


def test_arguments_that_do_not_fit_are_refused_at_the_call():
    x = torch.ones(3, 4, device=DEVICE)
    for call in (
        lambda: x.add_(torch.ones(5, device=DEVICE)),
        lambda: x.masked_fill_(torch.ones(5, dtype=torch.bool, device=DEVICE), 0),
        lambda: torch.ones(4, device=DEVICE).add_(x),
        lambda: torch.arange(3, device=DEVICE).add_(0.5),
        lambda: torch.zeros(1, device=DEVICE).expand(4).mul_(2),
        lambda: torch.cat([x, x[:, :3]]),
        lambda: torch.add(x, 1, out=torch.empty(3, 4, dtype=torch.long, device=DEVICE)),
    ):
        for _ in range(2):
            with pytest.raises(RuntimeError):
                call()
            torch.openreg.synchronize()
    assert x.sum().item() == 12


def test_result_sizes_that_data_decides_are_the_cpus():
    for values in ([1, 0, 2], [1, 1, 1], [0, 0, 0]):
        x = torch.tensor(values)
        there = x.to(DEVICE)
        assert torch.equal(there.nonzero().cpu(), x.nonzero())
        assert torch.equal(there[there > 0].cpu(), x[x > 0])
        assert torch.equal(there.unique().cpu(), x.unique())
        assert torch.equal(there.bincount().cpu(), x.bincount())
        assert torch.equal(x.repeat_interleave(x), there.repeat_interleave(there).cpu())


@two_devices
def test_indices_of_the_host_are_taken_by_value():
    """By a blocking copy, as on CUDA (test_order_table.py)."""
    x = torch.arange(5.0, device=DEVICE)
    index = torch.tensor([0, 2])
    y = x[index]
    x[index] = 7.0
    index.fill_(4)
    assert y.tolist() == [0, 2]
    assert x.tolist() == [7, 1, 7, 3, 4]


def look_up(x, i):
    return x[i]


def look_up_columns(x, i):
    return x[:, i]


def put(x, i):
    x[i] = 1.0
    return x


@pytest.mark.parametrize("function", [look_up, look_up_columns, put])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool], ids=str)
def test_torchscript_index_lists_give_the_cpus_values(function, dtype):
    """TorchScript's lists of optional tensors have a type object of their own."""
    x, i = torch.arange(9.0).view(3, 3), torch.tensor([1, 0, 1]).to(dtype)
    traced = torch.jit.trace(function, (x.clone(), i), check_trace=False)
    expected = function(x.clone(), i)
    for compiled in (torch.jit.script(function), traced):
        for _ in range(2):
            there = compiled(x.to(DEVICE), i.to(DEVICE))
            assert there.device == torch.device(DEVICE)
            assert torch.equal(there.cpu(), expected)
        if function is put and compiled is traced and torch.__version__ >= "2.15":
            # Traced are index_fill_ and masked_fill_, which take their device's indices alone.
            with pytest.raises(RuntimeError, match="at least two devices"):
                compiled(x.to(DEVICE), i)
        else:
            assert torch.equal(compiled(x.to(DEVICE), i).cpu(), expected)  # indices of the host


def test_scripted_integer_indices_are_queued(runs_ahead):
    scripted = torch.jit.script(look_up)
    x, i = torch.arange(9.0, device=DEVICE), torch.arange(3, device=DEVICE)
    scripted(x, i)
    assert runs_ahead(lambda: scripted(x, i)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("device", ["cpu", pytest.param("openreg:1", marks=two_devices)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool], ids=str)
def test_indices_of_another_device_have_pytorchs_text(device, dtype):
    x, i = torch.arange(3.0, device=device), torch.ones(3, dtype=dtype, device=DEVICE)
    text = (
        rf"indices should be either on cpu or on the same device as the indexed tensor \({device}\)"
    )
    for call in (
        lambda: x[i],
        lambda: x.__setitem__(i, 2.0),
        lambda: x.index_put((i,), torch.ones((), device=device)),
        lambda: x.index_put_((i,), torch.ones(3, device=DEVICE), accumulate=True),
    ):
        with pytest.raises(RuntimeError, match=text):
            call()
    assert x.tolist() == [0, 1, 2]


def fill_some(x, value, mask=False):
    index = torch.tensor([True, False, True] if mask else [0, 2], device=x.device)
    x[index] = value
    return x


NUMBERS = {
    "fill_": lambda x, v: x.fill_(v),
    "fill": torch.fill,
    "x[i] =": fill_some,
    "x[mask] =": lambda x, v: fill_some(x, v, mask=True),
    "x[1] =": lambda x, v: (x.__setitem__(1, v), x)[1],
    "x[:] =": lambda x, v: (x.__setitem__(slice(None), v), x)[1],
    "index_put": lambda x, v: x.index_put((torch.tensor([1, 1], device=x.device),), v),
    "index_put_, accumulated": lambda x, v: x.index_put_(
        (torch.tensor([1, 1], device=x.device),), v, accumulate=True
    ),
    "index_fill_": lambda x, v: x.index_fill_(0, torch.tensor([2], device=x.device), v),
    "index_fill": lambda x, v: x.index_fill(0, torch.tensor([2], device=x.device), v),
}
PLACES = ["cpu", DEVICE, pytest.param("openreg:1", marks=two_devices)]


@pytest.mark.parametrize("to", PLACES)
@pytest.mark.parametrize("source", PLACES)
@pytest.mark.parametrize("name", NUMBERS)
def test_value_of_no_dimensions_may_be_on_any_device(name, source, to):
    """As on CUDA: it is a number, and not a tensor that the operator computes on."""
    function = NUMBERS[name]
    expected = function(torch.zeros(3), torch.tensor(2.5))
    value = torch.tensor(2.5, device=source)
    for _ in range(2):
        x = torch.zeros(3, device=to)
        got = function(x, value)
        assert got.device == x.device
        assert torch.equal(got.cpu(), expected)


WRONG = {
    "+": lambda x, v: x + v,
    "where": lambda x, v: torch.where(x > 0, x, v),
    "masked_fill_": lambda x, v: x.masked_fill_(x > 0, v),
    "clamp": lambda x, v: x.clamp(min=v),
    "lerp": lambda x, v: torch.lerp(x, x, v),
    "index_add_": lambda x, v: x.index_add_(0, torch.tensor([1], device=x.device), v[None]),
    "x[i] = with a dimension": lambda x, v: fill_some(x, v.expand(2)),
    "fill_ with a dimension": lambda x, v: x.fill_(v[None]),
    "index of another device": lambda x, v: x.index_fill_(0, v.long()[None], 1.0),
    "index and value of another device": lambda x, v: x.index_put_((v.long()[None],), v),
}


@two_devices
@pytest.mark.parametrize("to", ["cpu", DEVICE])
@pytest.mark.parametrize("name", WRONG)
def test_arguments_on_another_device_are_refused(name, to):
    x, value = torch.ones(3, device=to), torch.tensor(0.0, device="openreg:1")
    for _ in range(2):
        with pytest.raises(RuntimeError):
            WRONG[name](x, value)
    assert x.tolist() == [1] * 3


def test_data_dependent_call_waits_for_its_stream_alone(runs_ahead):
    other = torch.ones(3, device="openreg:1")
    side = torch.Stream(DEVICE)
    with side:
        x = torch.tensor([1, 0, 1], device=DEVICE)
    side.synchronize()

    def run():
        with side:
            return x.nonzero().tolist(), x.sum().item(), other.sum().item()

    assert runs_ahead(run) == ([[0], [2]], 2, 3.0)
