"""gradcheck and torch.func: derivatives and batches of functions, as on the CPU."""

import pytest
import torch
import torch.nn.functional as F
from cpu_reference import DEVICE, alike, drawn
from torch import func, nn
from torch.autograd import forward_ad

import torch_openreg  # noqa: F401


def eye(a):
    return 5 * torch.eye(3, device=a.device, dtype=a.dtype)


def index(a, *rows):
    return torch.tensor([list(rows)] * a.shape[0], device=a.device)


# Two matrices of 3 by 4 each.
FUNCTIONS = {
    "product": lambda a, b: a * b,
    "matmul": lambda a, b: a @ b.t(),
    "softmax": lambda a, b: (a * b).softmax(1),
    "layer-norm": lambda a, b: F.layer_norm(a, [4], b[0], b[1]),
    "batch-norm": lambda a, b: F.batch_norm(a, None, None, b[0], b[1], training=True),
    "norm": lambda a, b: a.norm() + b.norm(),
    "cumsum": lambda a, b: a.cumsum(1) * b,
    "index": lambda a, b: a[[0, 1, 0]] * b[torch.tensor([2, 0, 2], device=b.device)],
    "gather": lambda a, b: a.gather(1, index(a, 0, 2)) * b[:, :2],
    "scatter": lambda a, b: a.scatter_add(1, index(a, 0, 1, 1, 2), b),
    "sort": lambda a, b: a.sort(1)[0] * b.topk(4, 1)[0],
    "where": lambda a, b: torch.where(a > 0, a, 2.0 * b),
    "einsum": lambda a, b: torch.einsum("ij,kj->ik", a, b),
    "activations": lambda a, b: F.gelu(a) * F.silu(b) + F.leaky_relu(a),
    "deviations": lambda a, b: a.std(0) * b.var(1).sum(),
    "products": lambda a, b: a.prod(1) + b.amax(1),
    "logarithms": lambda a, b: a.logsumexp(0) + b.logcumsumexp(0),
    "pad": lambda a, b: F.pad(a, (1, 1)) * F.pad(b, (1, 1)),
    "fft": lambda a, b: torch.fft.fft(a).abs().square() * torch.fft.irfft(torch.fft.rfft(b)),
    "sign": lambda a, b: torch.view_as_real(torch.complex(a, b).sgn() * 2j),
    "power": lambda a, b: (a.abs() + 1) ** b,
    "interpolate": lambda a, b: F.interpolate((a * b)[None], scale_factor=2, mode="linear"),
    "singular-values": lambda a, b: torch.linalg.svdvals(a) * b.sum(),
    "inverse": lambda a, b: torch.linalg.inv(a @ b.t() + eye(a)),
    "cholesky": lambda a, b: torch.linalg.cholesky(a @ a.t() + eye(a)) * b.sum(),
    "solve": lambda a, b: torch.linalg.solve(a[:, :3] + eye(a), b),
}


def pair(device, *leading, requires_grad=False):
    return tuple(
        drawn(device, *leading, 3, 4, dtype=torch.float64, requires_grad=requires_grad)
        for _ in range(2)
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_passes_gradcheck_and_gradgradcheck(name):
    torch.manual_seed(0)
    function, inputs = FUNCTIONS[name], pair(DEVICE, requires_grad=True)
    both = {"check_forward_ad": True, "check_batched_grad": True}
    assert torch.autograd.gradcheck(function, inputs, **both)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functional_transforms_give_the_cpus_derivatives(name):
    function = FUNCTIONS[name]

    def scalar(a, b):
        return function(a, b).square().sum()

    def program(device):
        a, b = pair(device)
        value, pullback = func.vjp(function, a, b)
        linear = func.linearize(function, a, b)[1]
        return [
            func.grad_and_value(scalar)(a, b),
            func.jacrev(function, argnums=(0, 1))(a, b),
            func.jacfwd(function)(a, b),
            func.hessian(scalar)(a, b),
            pullback(torch.ones_like(value)),
            func.jvp(function, (a, b), (b, a)),
            linear(b, a),
        ]

    alike(program)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap_gives_the_cpus_batches(name):
    function = FUNCTIONS[name]

    def program(device):
        a, b = pair(device, 2)
        return [
            func.vmap(function)(a, b),
            func.vmap(function, in_dims=(0, None))(a, b[0]),
            func.vmap(function, chunk_size=1)(a, b),
            func.vmap(func.grad(lambda a, b: function(a, b).sum()))(a, b),
        ]

    alike(program)


# ---- Modules ----


def parameters(device):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
    return net, dict(net.named_parameters())


def per_sample_gradients(device):
    net, weights = parameters(device)

    def loss(weights, x, y):
        return F.mse_loss(func.functional_call(net, weights, (x,)), y)

    x, y = drawn(device, 5, 3).detach(), drawn(device, 5, 2).detach()
    return func.vmap(func.grad(loss), in_dims=(None, 0, 0))(weights, x, y)


def ensemble(device):
    nets = [parameters(device)[0] for _ in range(3)]
    weights, buffers = func.stack_module_state(nets)
    x = drawn(device, 5, 3).detach()
    return func.vmap(lambda w, b: func.functional_call(nets[0], (w, b), (x,)))(weights, buffers)


def hessian_times_vector(device):
    net, _ = parameters(device)
    x = drawn(device, 5, 3).detach()
    return func.jvp(func.grad(lambda x: net(x).square().sum()), (x,), (x,))


def inner_steps(device):
    """Gradients through gradient steps."""
    net, start = parameters(device)
    x, y = drawn(device, 5, 3).detach(), drawn(device, 5, 2).detach()
    weights = start
    for _ in range(3):
        loss = F.mse_loss(func.functional_call(net, weights, (x,)), y)
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        weights = {k: w - 0.1 * g for (k, w), g in zip(weights.items(), gradients, strict=True)}
    F.mse_loss(func.functional_call(net, weights, (x,)), y).backward()
    return [w.grad for w in start.values()]


def batches_of_convolutions(device):
    x, w = drawn(device, 3, 2, 2, 6, 6).detach(), drawn(device, 3, 4, 2, 3, 3).detach()

    def loss(x, w):
        return F.conv2d(x, w, padding=1).square().sum()

    return [
        func.vmap(F.conv2d)(x, w),
        func.vmap(func.grad(loss, argnums=(0, 1)))(x, w),
        func.jvp(F.conv2d, (x[0], w[0]), (x[1], w[1])),
        func.hessian(lambda w: loss(x[0], w))(w[0, :1]),
    ]


def batches_of_attention(device):
    q = drawn(device, 3, 2, 4, 5, 8).detach()

    def attend(q):
        return F.scaled_dot_product_attention(q, q, q)

    return [
        func.vmap(attend)(q),
        func.vmap(func.grad(lambda q: attend(q).square().sum()))(q),
        func.jacrev(attend)(q[0, :1, :1]),
    ]


def batches_of_modules(device):
    results = []
    for module, size in (
        (nn.LayerNorm(3), (4, 5, 3)),
        (nn.GroupNorm(2, 4), (4, 2, 4, 3)),
        (nn.BatchNorm1d(3, track_running_stats=False), (4, 5, 3)),
        (nn.MaxPool2d(2), (4, 2, 2, 4, 4)),
        (nn.TransformerEncoderLayer(4, 2, 8, 0.0), (4, 5, 2, 4)),
    ):
        module.to(device)
        x = drawn(device, *size).detach()
        results.append(func.vmap(module)(x))
        results.append(func.vmap(func.grad(lambda x, m=module: m(x).square().sum()))(x))
    return results


def autograd_functional(device):
    x, of = drawn(device, 3).detach(), torch.autograd.functional

    def f(x):
        return x.exp() * x.sum()

    def scalar(x):
        return f(x).sum()

    return [
        of.jacobian(f, x), of.hessian(scalar, x), of.vjp(f, x, x), of.jvp(f, x, x),
        of.hvp(scalar, x, x), of.vhp(scalar, x, x), of.jacobian(f, x, vectorize=True),
        of.jacobian(f, x, vectorize=True, strategy="forward-mode"),
    ]  # fmt: skip


def dual_numbers(device):
    with forward_ad.dual_level():
        x = forward_ad.make_dual(drawn(device, 3).detach(), torch.arange(3.0, device=device))
        return tuple(forward_ad.unpack_dual((x.sin() * x).cumsum(0)))


def functionalized(device):
    x = drawn(device, 3).detach()
    return func.functionalize(lambda x: x.clone().add_(1).view(-1).mul_(2))(x)


def batches_in_place(device):
    x = drawn(device, 2, 3).detach()

    def change(x):
        y = x.clone()
        y[0] = 0
        y.add_(x.sum())
        return torch.where(y > 1, y, 0)

    rows = torch.tensor([0, 1], device=device)
    return func.vmap(change)(x), func.vmap(lambda x, i: x[i])(x, rows)


@pytest.mark.parametrize(
    "program",
    [
        per_sample_gradients, ensemble, hessian_times_vector, inner_steps, batches_of_convolutions,
        batches_of_attention, batches_of_modules, autograd_functional, dual_numbers,
        functionalized, batches_in_place,
    ],
)  # fmt: skip
def test_functional_program_gives_the_cpus_results(program):
    alike(program)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cells_batch_in_derivatives_as_on_the_cpu(kind):
    """No device's cells have a rule for batches, except in derivatives."""

    def program(device):
        cell = kind(3, 4).to(device)
        x = drawn(device, 2, 3).detach()

        def first(x):
            out = cell(x)
            return out[0] if isinstance(out, tuple) else out

        def loss(weights):
            out = func.functional_call(cell, weights, (x,))
            return sum(t.square().sum() for t in (out if isinstance(out, tuple) else (out,)))

        weights = {name: p.detach() for name, p in cell.named_parameters()}
        return func.jvp(first, (x,), (x,)), func.jacrev(first)(x), func.grad(loss)(weights)

    alike(program)


def test_vmap_draws_the_same_or_different_numbers_as_asked():
    x = torch.zeros(4, 100, device=DEVICE)

    def add(x):
        return x + torch.rand(100, device=x.device), F.dropout(x + 1)

    for randomness, equal in (("same", True), ("different", False)):
        for result in func.vmap(add, randomness=randomness)(x):
            assert torch.equal(result[0], result[1]) == equal
    with pytest.raises(RuntimeError, match="randomness"):
        func.vmap(add)(x)
