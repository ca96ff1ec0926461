"""Attention: the CPU's choice of a kernel, its results and gradients, and its refusals."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from cpu_reference import DEVICE, LOOSE, Recorder, alike, drawn, trained
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import torch_openreg  # noqa: F401

BACKENDS = {
    "chosen": None,
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "either": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
}


def rows_without_anything():
    """A row that may look at nothing is zeros or NaN, as on the CPU."""
    mask = torch.rand(2, 1, 5, 7) > 0.3
    mask[..., 1, :] = False
    return mask


MASKS = {
    "none": lambda: None,
    "bool": lambda: torch.rand(2, 1, 5, 7) > 0.3,
    "empty-rows": rows_without_anything,
    "float": lambda: torch.randn(2, 4, 5, 7),
    "float-2d": lambda: torch.randn(5, 7),
    "infinite": lambda: torch.randn(5, 7).masked_fill(torch.rand(5, 7) > 0.6, float("-inf")),
}


def attention(device, dtype=torch.float32, mask=None, backend=None, grouped=False, **settings):
    q, k, v = (
        drawn(device, 2, heads, length, 16, dtype=dtype)
        for heads, length in ((4, 5), (2 if grouped else 4, 7), (2 if grouped else 4, 7))
    )
    if mask is not None:
        mask = mask.to(device) if mask.dtype == torch.bool else mask.to(device, dtype)
    with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=grouped, **settings)
        with torch.no_grad():
            plain = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=grouped, **settings)
    return out, plain, torch.autograd.grad(out.float().square().sum(), (q, k, v))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", MASKS)
def test_attention_with_a_mask_is_the_cpus(mask, backend):
    for grouped in (False, True):
        alike(
            lambda d, g=grouped: attention(
                d, mask=MASKS[mask](), backend=BACKENDS[backend], grouped=g
            )
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, *LOOSE])
def test_attention_of_a_dtype_is_the_cpus(dtype, backend):
    for mask, causal in (("none", True), ("bool", False), ("float", False)):
        alike(
            lambda d, m=mask, c=causal: attention(
                d, dtype, MASKS[m](), BACKENDS[backend], is_causal=c
            )
        )


def unbatched(device):
    q = drawn(device, 4, 5, 16)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def wider_values(device):
    q, v = drawn(device, 2, 4, 5, 16), drawn(device, 2, 4, 5, 24)
    return F.scaled_dot_product_attention(q, q, v, scale=0.3)


def one_query(device):
    q, k = drawn(device, 2, 4, 1, 16), drawn(device, 2, 4, 7, 16)
    out = F.scaled_dot_product_attention(q, k, k)
    return out, torch.autograd.grad(out.sum(), (q, k))


def trained_mask(device):
    q, mask = drawn(device, 2, 4, 5, 16), drawn(device, 5, 5)
    out = F.scaled_dot_product_attention(q, q, q, mask)
    return out, torch.autograd.grad(out.square().sum(), (q, mask))


def from_the_lower_right(device):
    q, k = drawn(device, 2, 4, 5, 16), drawn(device, 2, 4, 7, 16)
    return F.scaled_dot_product_attention(q, k, k, attn_mask=causal_lower_right(5, 7))


def under_autocast(device):
    q = drawn(device, 2, 4, 5, 16)
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        out = F.scaled_dot_product_attention(q, q, q)
    (gradient,) = torch.autograd.grad(out.float().sum(), q)
    return out, gradient.bfloat16()


@pytest.mark.parametrize(
    "program",
    [unbatched, wider_values, one_query, trained_mask, from_the_lower_right, under_autocast],
)
def test_attention_of_unusual_calls_is_the_cpus(program):
    alike(program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *LOOSE])
def test_attention_chooses_the_cpus_kernel(dtype):
    def program(device):
        q = torch.ones(2, 4, 5, 16, dtype=dtype, device=device)
        mask = torch.ones(5, 5, dtype=dtype, device=device)
        every = (
            {},
            {"is_causal": True},
            {"attn_mask": mask},
            {"enable_gqa": True},
            {"dropout_p": 0.5},
        )
        names = []
        for options in every:
            with Recorder() as recorder:
                F.scaled_dot_product_attention(q, q, q, **options)
            names.append([name for name in recorder.names if "attention" in name])
        return names

    assert "flash" in alike(program)[0][0]


@pytest.mark.usefixtures("nothing_left")
def test_attention_of_a_long_sequence_takes_no_quadratic_memory():
    q = torch.rand(1, 1, 4096, 16, device=DEVICE)
    torch.openreg.synchronize(DEVICE)
    torch.openreg.reset_peak_memory_stats(DEVICE)
    before = torch.openreg.memory_allocated(DEVICE)
    F.scaled_dot_product_attention(q, q, q)
    torch.openreg.synchronize(DEVICE)
    assert torch.openreg.max_memory_allocated(DEVICE) - before < 8 * q.nbytes


def test_attention_backend_that_the_cpu_lacks_is_refused():
    errors = []
    for device in ("cpu", DEVICE):
        q = torch.ones(2, 4, 5, 16, device=device)
        with (
            pytest.raises(RuntimeError) as error,
            sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION),
        ):
            F.scaled_dot_product_attention(q, q, q)
        errors.append(str(error.value).splitlines()[0])
    assert errors[0] == errors[1] and "No viable backend" in errors[1]


def test_attention_has_gradients_of_gradients():
    q, k, v = (drawn(DEVICE, 1, 2, 3, 4, dtype=torch.float64) for _ in range(3))

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    assert torch.autograd.gradcheck(attend, (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(attend, (q, k, v))


def test_attention_dropout_follows_the_seed():
    x = drawn(DEVICE, 2, 4, 5, 16)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        out = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        results.append((out, *torch.autograd.grad(out.sum(), x)))
    same, again, other = results
    assert all(map(torch.equal, same, again))
    assert not torch.equal(same[0], other[0])
    # Weights that are kept are doubled: of many equal values the mean stays.
    ones = torch.ones(1, 1, 4, 1000, device=DEVICE).mT.contiguous()
    out = F.scaled_dot_product_attention(ones, ones, ones, dropout_p=0.5)
    assert 0.9 < out.mean().item() < 1.1


# ---- Modules ----

HEADS = {
    "plain": {},
    "no-bias": {"bias": False},
    "other-sizes": {"kdim": 6, "vdim": 4},
    "biased-keys": {"add_bias_kv": True},
    "zero-attention": {"add_zero_attn": True},
}
PADDING = torch.tensor([[False] * 5 + [True], [False] * 6])
CAUSAL = torch.ones(5, 6).triu(1).bool()
CALLS = {
    "plain": {},
    "no-weights": {"need_weights": False},
    "padding": {"key_padding_mask": PADDING},
    "padding-no-weights": {"key_padding_mask": PADDING, "need_weights": False},
    "masked": {"attn_mask": CAUSAL},
    "causal": {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False},
    "each-head": {"average_attn_weights": False},
    "mask-of-each-head": {"attn_mask": torch.linspace(-1, 1, 120).view(4, 5, 6)},
}


class Heads(nn.Module):
    def __init__(self, call, **settings):
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True, **settings)
        self.call = call

    def forward(self, *inputs):
        device = inputs[0].device
        options = {k: v.to(device) if torch.is_tensor(v) else v for k, v in self.call.items()}
        out, weights = self.attend(*inputs, **options)
        return (out,) if weights is None else (out, weights)


@pytest.mark.parametrize("settings", HEADS)
def test_multihead_attention_trains_and_infers_as_the_cpu(settings):
    options = HEADS[settings]

    def program(device):
        results = []
        for call in CALLS.values():
            heads = Heads(call, **options).to(device)
            inputs = [
                drawn(device, 2, length, options.get(size, 8))
                for length, size in ((5, ""), (6, "kdim"), (6, "vdim"))
            ]
            results.append(trained(heads, *inputs))
            with torch.inference_mode():
                results.append([t.clone() for t in heads.eval()(*inputs)])
        return results

    alike(program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_self_attention_by_the_fast_path_is_the_cpus(dtype):
    def program(device):
        results = []
        for call in ({}, {"need_weights": False}, {"key_padding_mask": PADDING[:, 1:]}):
            heads = Heads(call).to(device, dtype).eval()
            x = drawn(device, 2, 5, 8, dtype=dtype, requires_grad=False)
            with torch.inference_mode():
                results.append([t.clone() for t in heads(x, x, x)])
        return results

    alike(program)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_transformer_encoder_trains_and_infers_as_the_cpu(norm_first, activation):
    def program(device):
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, activation, 1e-5, True, norm_first)
        net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device)
        x = drawn(device, 2, 5, 8)
        results = [trained(net, x)]
        with torch.inference_mode():
            results.append(net.eval()(x.detach()).clone())
            padded = net(x.detach(), src_key_padding_mask=PADDING[:, 1:].to(device))
            results.append(padded.clone())
        return results

    alike(program)


def test_transformer_has_the_cpus_outputs_and_gradients():
    def program(device):
        net = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True).to(device)
        padding = PADDING[:, 1:].to(device)
        target = drawn(device, 2, 4, 8)
        out = net(
            drawn(device, 2, 5, 8),
            target,
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(4, device=device),
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        out.square().sum().backward()
        return out, target.grad, [p.grad for p in net.parameters()]

    alike(program)


# ---- The operator that PyTorch leaves to devices that are not its own ----

OVERRIDEABLE = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
BIASES = {
    "none": lambda dtype: None,
    "numbers": lambda dtype: torch.randn(2, 3, 5, 7, dtype=dtype, requires_grad=True),
    "a row": lambda dtype: torch.randn(7, dtype=dtype, requires_grad=True),
    "a mask": lambda dtype: torch.rand(2, 1, 5, 7) > 0.3,
}


def _moved(tensor):
    return tensor.detach().to(DEVICE).requires_grad_(tensor.requires_grad)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_overrideable_attention_is_attention(dtype, bias, causal):
    torch.manual_seed(0)
    theirs = [torch.randn(2, 3, n, 8, dtype=dtype, requires_grad=True) for n in (5, 7, 7)]
    added = BIASES[bias](dtype)
    theirs += [] if added is None else [added]
    ours = [_moved(tensor) for tensor in theirs]
    wide = [t if t.dtype == torch.bool else t.double() for t in theirs]
    allowed = torch.ones(5, 7, dtype=torch.bool)
    allowed = allowed.tril() if causal else allowed
    mask = allowed if added is None else wide[3]
    if added is not None:
        mask = mask & allowed if bias == "a mask" else mask.masked_fill(~allowed, float("-inf"))
    scores = wide[0] @ wide[1].transpose(-2, -1) * 0.3
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    expected = torch.nn.functional.scaled_dot_product_attention(*wide[:3], mask, scale=0.3)
    made, sums, *_ = OVERRIDEABLE(*ours[:3], *ours[3:] or [None], 0.0, causal, scale=0.3)
    near = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(made.cpu().double(), expected, **near)
    torch.testing.assert_close(sums.cpu().double(), scores.logsumexp(-1), **near)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    made.backward(gradient.to(DEVICE, dtype))
    for mine, its in zip(ours, theirs, strict=True):
        if its.requires_grad:
            torch.testing.assert_close(mine.grad.cpu(), its.grad, **near)


def test_overrideable_attention_drops_the_same_weights_in_its_backward():
    sizes = (1, 2, 4, 3), (1, 2, 5, 3), (1, 2, 5, 3)
    given = [torch.randn(*size, dtype=torch.double, device=DEVICE) for size in sizes]
    for tensor in given:
        tensor.requires_grad_()

    def attention(*tensors):
        torch.manual_seed(3)
        return OVERRIDEABLE(*tensors, None, 0.4)[0]

    assert torch.autograd.gradcheck(attention, given)
    x = torch.randn(4, 100, 8, device=DEVICE)
    first, *_, weights = OVERRIDEABLE(x, x, x, None, 0.25, False, True)
    assert (weights == 0).double().mean().item() == pytest.approx(0.25, abs=0.02)
    torch.testing.assert_close(first, weights @ x)
    assert not torch.equal(first, OVERRIDEABLE(x, x, x, None, 0.25)[0])


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_overrideable_attention_is_eagers(backend):
    given = [torch.randn(2, 5, 3, 8, device=DEVICE).transpose(1, 2) for _ in range(3)]
    for tensor in given:
        tensor.requires_grad_()

    def attention(*tensors):
        return OVERRIDEABLE(*tensors, None, 0.0, True)[0]

    made = torch.compile(attention, backend=backend, fullgraph=True)(*given)
    expected = attention(*given)
    assert made.stride() == expected.stride() == given[0].stride()
    found, wanted = (torch.autograd.grad(o.square().sum(), given) for o in (made, expected))
    torch.testing.assert_close(found, wanted)
