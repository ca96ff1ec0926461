"""Autograd beside the gradients themselves: hooks, checkpoints, functions of one's own, graphs."""

import contextlib
import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from cpu_reference import DEVICE, alike, drawn
from torch import nn
from torch.autograd import graph
from torch.utils import checkpoint as checkpoints

import torch_openreg  # noqa: F401

checkpoint = checkpoints.checkpoint
both_ways = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])

# ---- Hooks ----


def test_autograd_hooks_see_the_cpus_values():
    def program(device):
        log, seen = [], []
        net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)).to(device)
        first, last = net[0], net[2]
        first.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
        first.register_forward_hook(lambda module, inputs, out: out + 1)
        last.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 2,))
        last.register_full_backward_hook(lambda module, grads, outs: seen.append(outs[0].clone()))
        first.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        x = drawn(device, 2, 3)
        graph.register_multi_grad_hook([x, last.weight], lambda grads: log.append(len(grads)))
        hidden = first(x)
        hidden.register_hook(lambda grad: grad * 3)
        hidden.retain_grad()
        out = last(net[1](hidden))
        out.grad_fn.register_prehook(lambda grads: log.append("before"))
        out.grad_fn.register_hook(lambda grads, outs: log.append("after"))
        out.sum().backward()
        return log, seen, hidden.grad, x.grad, [p.grad for p in net.parameters()]

    alike(program)


def test_global_module_hooks_see_the_cpus_values():
    def program(device):
        log, hooks = [], torch.nn.modules.module
        handles = [
            hooks.register_module_forward_hook(lambda m, i, o: log.append(type(m).__name__)),
            hooks.register_module_full_backward_hook(lambda m, i, o: log.append(o[0].clone())),
        ]
        try:
            nn.Sequential(nn.Linear(3, 3), nn.ReLU()).to(device)(
                drawn(device, 2, 3)
            ).sum().backward()
        finally:
            for handle in handles:
                handle.remove()
        return log

    alike(program)


def saved(device, context):
    x = drawn(device, 3, 3)
    with context:
        y = ((x @ x).tanh() * x.exp()).sum()
    return torch.autograd.grad(y, x)


CONTEXTS = {
    "hooks": lambda device: graph.saved_tensors_hooks(torch.Tensor.cpu, lambda t: t.to(device)),
    "on-cpu": lambda device: graph.save_on_cpu(),
    "pinned": lambda device: graph.save_on_cpu(
        pin_memory=True, device_type=torch.device(device).type
    ),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_saved_tensor_hooks_give_the_cpus_gradients(name):
    alike(lambda device: saved(device, CONTEXTS[name](device)))


@pytest.mark.usefixtures("nothing_left")
def test_saved_tensors_leave_the_device_under_save_on_cpu():
    x = drawn(DEVICE, 256, 256)
    held = []
    for context in (contextlib.nullcontext(), graph.save_on_cpu(pin_memory=True)):
        torch.openreg.synchronize(DEVICE)
        before = torch.openreg.memory_allocated(DEVICE)
        with context:
            y = x.exp().exp().exp().sum()
        torch.openreg.synchronize(DEVICE)
        held.append(torch.openreg.memory_allocated(DEVICE) - before)
        y.backward()
        del y
    assert held[0] >= 3 * x.nbytes > x.nbytes > held[1]


def test_saved_tensors_that_changed_are_refused_or_kept():
    x = drawn(DEVICE, 3)
    y = x.exp()
    z = y.sin()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()
    with graph.allow_mutation_on_saved_tensors():
        a = x.clone()
        b = a * a
        a.sin_()
        b.sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())
    with (
        pytest.raises(RuntimeError, match="no hooks"),
        graph.disable_saved_tensors_hooks("no hooks"),
        graph.save_on_cpu(),
    ):
        pass


# ---- Checkpoints ----


@both_ways
def test_checkpoints_give_the_cpus_gradients(reentrant):
    def program(device):
        net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(device)
        x = drawn(device, 3, 4)
        out = checkpoint(net, x, use_reentrant=reentrant)
        out = checkpoints.checkpoint_sequential(net, 2, out, use_reentrant=reentrant)
        out.square().sum().backward()
        return out, x.grad, [p.grad for p in net.parameters()]

    alike(program)


@both_ways
def test_checkpoints_repeat_random_numbers_and_autocast(reentrant):
    x, seen = drawn(DEVICE, 1000), []

    def drop(x):
        seen.append(torch.is_autocast_enabled("openreg"))
        return F.dropout(x) * x

    with torch.autocast("openreg", dtype=torch.bfloat16):
        out = checkpoint(drop, x, use_reentrant=reentrant)
    after = torch.openreg.get_rng_state(DEVICE)
    out.sum().backward()
    assert torch.equal(x.grad != 0, out != 0)
    assert seen == [True, True]
    assert torch.equal(torch.openreg.get_rng_state(DEVICE), after)


def test_selective_checkpoints_give_the_cpus_gradients():
    def program(device):
        keep = functools.partial(
            checkpoints.create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]
        )
        net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(device)
        x = drawn(device, 3, 4)
        out = checkpoint(net, x, use_reentrant=False, context_fn=keep)
        return out, torch.autograd.grad(out.sum(), x)

    alike(program)


# ---- Functions of one's own ----


class Product(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, y, scale):
        return x * y * scale, x + y

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, y, ctx.scale = inputs
        ctx.save_for_backward(x, y)
        ctx.save_for_forward(x, y)

    @staticmethod
    def backward(ctx, grad, other):
        x, y = ctx.saved_tensors
        return grad * y * ctx.scale + other, grad * x * ctx.scale + other, None

    @staticmethod
    def jvp(ctx, dx, dy, _):
        x, y = ctx.saved_tensors
        return (dx * y + x * dy) * ctx.scale, dx + dy


def test_custom_autograd_function_passes_gradcheck_and_vmap():
    inputs = [drawn(DEVICE, 3, dtype=torch.float64) for _ in range(2)]

    def function(x, y):
        return Product.apply(x, y, 2.0)

    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, inputs)
    x, y = (t.detach()[None] for t in inputs)
    gradient = torch.func.vmap(torch.func.grad(lambda x, y: function(x, y)[0].sum()))(x, y)
    torch.testing.assert_close(gradient, 2 * y)


class Doubled(torch.autograd.Function):
    """In place, and differentiable once."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)
        return x.mul_(2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad * 2


class Inner(torch.autograd.Function):
    """A backward inside of backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            x.square().sum().backward()
        return grad * x.grad


def in_place(device):
    x = drawn(device, 3)
    y = x * 1
    Doubled.apply(y)
    return y, torch.autograd.grad(y.sum(), x)


def backward_inside_of_backward(device):
    x = drawn(device, 3)
    return torch.autograd.grad(Inner.apply(Inner.apply(x)).sum(), x)


def mixed_precision(device):
    kind = torch.device(device).type

    class Square(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type=kind)
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x @ x

        @staticmethod
        @torch.amp.custom_bwd(device_type=kind)
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad @ x.t() + x.t() @ grad

    x = drawn(device, 3, 3)
    with torch.autocast(kind, dtype=torch.bfloat16):
        out = Square.apply(x)
    return out, [g.bfloat16() for g in torch.autograd.grad(out.float().sum(), x)]


# ---- Graphs ----


def again_and_higher(device):
    x = drawn(device, 3)
    y = (x**3).sum()
    y.backward(retain_graph=True)
    y.backward()
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    third = torch.autograd.grad(second.sum(), x)
    unused = torch.ones(2, device=device, requires_grad=True)
    zeros = torch.autograd.grad(x.sum(), [x, unused], allow_unused=True, materialize_grads=True)
    rows = torch.autograd.grad(x * 2, x, torch.eye(3, device=device), is_grads_batched=True)
    return x.grad, first, second, third, zeros, rows


def views_in_place(device):
    x = drawn(device, 6)
    base = x.clone()
    view = base.view(2, 3)
    view[0].mul_(2)
    view[:, 1].zero_()
    base[5] = 7
    return base, torch.autograd.grad(base.sum(), x)


def edges(device):
    y = drawn(device, 3).exp()
    edge = graph.get_gradient_edge(y)
    return torch.autograd.grad((y * 2).sum(), edge)


def some_inputs(device):
    x, w = drawn(device, 3), drawn(device, 3)
    with torch.autograd.set_multithreading_enabled(False):
        (x * w).sum().backward(inputs=[x])
    return x.grad, w.grad is None


def complex_numbers(device):
    x = drawn(device, 2, 3, dtype=torch.complex64)
    parts = torch.view_as_real(x).square().sum() + (x * x.conj()).real.sum() + x.abs().sum()
    (gradient,) = torch.autograd.grad(parts, x, create_graph=True)
    return gradient, torch.autograd.grad(gradient.abs().sum(), x)


def nothing(device):
    x = torch.empty(0, 3, device=device, requires_grad=True)
    out = F.layer_norm(x @ torch.ones(3, 2, device=device), [2])
    return out, x.mean(0), x.prod(0), torch.autograd.grad(out.sum(), x)


@pytest.mark.parametrize(
    "program",
    [
        in_place, backward_inside_of_backward, mixed_precision, again_and_higher, views_in_place,
        edges, some_inputs, complex_numbers, nothing,
    ],
)  # fmt: skip
def test_autograd_graph_gives_the_cpus_gradients(program):
    alike(program)


def test_autograd_graph_is_freed_by_backward():
    y = drawn(DEVICE, 3).exp().sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


@pytest.mark.skipif("torch.openreg.device_count() < 2")
def test_autograd_graph_spans_both_devices_and_the_cpu():
    def build(first, second):
        torch.manual_seed(0)
        a, b = nn.Linear(4, 4).to(first), nn.Linear(4, 4).to(second)
        x = torch.randn(3, 4, requires_grad=True)
        hidden = a(x.to(first)).tanh()
        there = checkpoint(b, hidden.to(second), use_reentrant=False).tanh()
        back = (a(there.to(first)) + hidden) * 2
        loss = back.square().mean().to(second) + there.sum() + x.sum().to(second)
        gradients = torch.autograd.grad(loss, [x, a.weight, b.weight], create_graph=True)
        assert [g.device for g in gradients] == [p.device for p in (x, a.weight, b.weight)]
        sum(g.square().sum().cpu() for g in gradients).backward()
        return [t.detach().cpu() for t in (*gradients, x.grad, a.weight.grad, b.weight.grad)]

    torch.testing.assert_close(build("openreg:0", "openreg:1"), build("cpu", "cpu"))


def test_autograd_graph_serves_several_threads():
    w = drawn(DEVICE, 4, 4)
    inputs = [torch.full((2, 4), i / 8, device=DEVICE) for i in range(8)]
    results = [None] * 8
    shared = (w * 2).tanh()

    def differentiate(i):
        (results[i],) = torch.autograd.grad((inputs[i] @ shared).sum(), w, retain_graph=True)

    threads = [threading.Thread(target=differentiate, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, result in enumerate(results):
        torch.testing.assert_close(result, results[1] * i)
