"""Operators are queued: the host runs ahead, and what comes out is what the CPU makes of it."""

import copy
import itertools
import threading

import pytest
import torch
import torch.nn.functional as F
from host_ahead import DEVICE, compare, on_device, unseen, unseen_sizes

import torch_openreg

# ---- The host runs ahead ----


def test_large_matmul_is_queued_behind_a_gate(runs_ahead):
    x = torch.rand(1536, 1536)
    there = x.to(DEVICE)
    y = runs_ahead(lambda: there @ there)
    torch.testing.assert_close(y.cpu(), x @ x)


def test_large_matmul_runs_ahead_without_a_gate(eventually):
    x = torch.rand(1536, 1536, device=DEVICE)
    products = []

    def ahead():
        torch.openreg.synchronize()
        products.append(x @ x)
        return not torch.openreg.current_stream().query()

    # More than once only on a machine so busy that this thread stands still for a whole product.
    eventually(ahead)
    torch.testing.assert_close(products[-1].cpu(), x.cpu() @ x.cpu())


def mlp(*sizes):
    layers = []
    for before, after in itertools.pairwise(sizes):
        layers += [torch.nn.Linear(before, after), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers)


def gradients(model, x):
    model.zero_grad(set_to_none=True)
    model(x).square().mean().backward()
    return [p.grad for p in model.parameters()]


def test_forward_and_backward_of_new_shapes_run_ahead(runs_ahead):
    torch.manual_seed(0)
    reference = mlp(next(unseen_sizes), 32, 5)
    model = copy.deepcopy(reference).to(DEVICE)
    x = torch.rand(next(unseen_sizes), reference[0].in_features)
    there = x.to(DEVICE)
    torch.openreg.synchronize()
    got = runs_ahead(lambda: gradients(model, there))
    compare(got, gradients(reference, x))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
        lambda p: torch.optim.Adam(p, lr=0.1),
        lambda p: torch.optim.Adam(p, lr=0.1, foreach=False, amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    ],
    ids=["sgd", "sgd-momentum", "adam", "adam-loop", "adamw", "adamw-loop"],
)
def test_training_step_runs_ahead(runs_ahead, make):
    torch.manual_seed(0)
    reference = mlp(12, 16, 3)
    model = copy.deepcopy(reference).to(DEVICE)
    batches = [torch.rand(6, 12) for _ in range(3)]
    there = on_device(batches)
    optimizers = [make(m.parameters()) for m in (reference, model)]

    def step(net, optimizer, x):
        gradients(net, x)
        optimizer.step()

    step(model, optimizers[1], there[0])
    torch.openreg.synchronize()
    runs_ahead(lambda: [step(model, optimizers[1], x) for x in there[1:]])
    for x in batches:
        step(reference, optimizers[0], x)
    compare([p.detach() for p in model.parameters()], [p.detach() for p in reference.parameters()])


def test_gradient_accumulation_and_clipping_run_ahead(queued):
    def run(weight, x):
        weight = weight.detach().requires_grad_()
        for part in x.chunk(3):
            (part @ weight).square().mean().backward()
        torch.nn.utils.clip_grad_norm_([weight], 0.1)
        return weight.grad

    queued(run, torch.rand(5, 4), torch.rand(6, 5), warm=True)


# ---- Shapes never seen ----

POINTWISE = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "pow": torch.pow,
    "atan2": torch.atan2,
    "maximum": torch.maximum,
    "less": torch.lt,
    "remainder": torch.remainder,
    "add_number": lambda x, y: x + 1.5,
    "mul_by_integer": lambda x, y: x * 3,
    "broadcast": lambda x, y: x + y[:1],
    "exp": lambda x, y: x.exp(),
    "sqrt": lambda x, y: x.sqrt(),
    "tanh": lambda x, y: x.tanh(),
    "sigmoid": lambda x, y: x.sigmoid(),
    "neg": lambda x, y: -x,
    "square": lambda x, y: x.square(),
    "gelu": lambda x, y: F.gelu(x),
    "silu": lambda x, y: F.silu(x),
    "leaky_relu": lambda x, y: F.leaky_relu(x),
    "clamp": lambda x, y: x.clamp(0.2, 0.7),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=2),
    "masked_fill": lambda x, y: x.masked_fill(x > y, 0.0),
    "in_place": lambda x, y: (x + 0).mul_(y).add_(1).clamp_(max=1.5),
    "logical_in_place": lambda x, y: (x + 0).relu_().abs_(),
}
POINTWISE_WITHOUT_META = {
    "relu": lambda x, y: x.relu(),
    "abs": lambda x, y: x.abs(),
    "where": lambda x, y: torch.where(x > y, x, y),
    "where_number": lambda x, y: torch.where(x > y, x, 0.0),
    "isnan": lambda x, y: x.isnan(),
    "isfinite": lambda x, y: x.isfinite(),
    "logical_and": lambda x, y: torch.logical_and(x > y, y > 0.5),
    "logical_not": lambda x, y: (x > y).logical_not(),
    "floor_divide": lambda x, y: x // y,
    "right_subtract": lambda x, y: 1 - x,
    "nan_to_num": lambda x, y: x.nan_to_num(),
}
REDUCTIONS = {
    "sum": lambda x: x.sum(),
    "sum_dim": lambda x: x.sum(1),
    "mean": lambda x: x.mean(),
    "mean_keepdim": lambda x: x.mean(0, keepdim=True),
    "amax": lambda x: x.amax(1),
    "argmax": lambda x: x.argmax(1),
    "max": lambda x: tuple(x.max(1)),
    "prod": lambda x: x.prod(1),
    "norm": lambda x: x.norm(dim=1),
    "all": lambda x: (x > 0).all(),
    "cumsum": lambda x: x.cumsum(1),
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "sort": lambda x: tuple(x.sort(1)),
    "topk": lambda x: tuple(x.topk(2)),
}
REDUCTIONS_WITHOUT_META = {
    "max_all": lambda x: x.max(),
    "std": lambda x: x.std(1),
    "var": lambda x: x.var(),
    "prod_all": lambda x: x.prod(),
    "logsumexp": lambda x: x.logsumexp(1),
}
MATMULS = {
    "mm": lambda x: x @ x.t(),
    "mv": lambda x: x @ x[0],
    "bmm": lambda x: x.view(2, 2, -1) @ x.view(2, 2, -1).transpose(1, 2),
    "batched": lambda x: x.view(2, 2, -1) @ x.t(),
    "linear": lambda x: F.linear(x, x[:3], x[:3, 0]),
    "linear_of_three": lambda x: F.linear(x.view(2, 2, -1), x[:3], x[:3, 0]),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
}
VIEWS = {
    "view": lambda x: x.view(2, -1) * 2,
    "transpose": lambda x: x.t() + 1,
    "slice": lambda x: x[1:3, ::2] * 2,
    "expand": lambda x: x[None].expand(3, -1, -1) + 1,
    "diagonal": lambda x: x.diagonal() * 2,
    "split": lambda x: [part + 1 for part in x.split(3, dim=1)[:3]],
    "unbind": lambda x: [row * 2 for row in x.unbind()],
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1) + 1,
    "movedim": lambda x: x.view(2, 2, -1).movedim(2, 0) * 2,
    "cat": lambda x: torch.cat([x, x[:1]]),
    "stack": lambda x: torch.stack([x, x + 1]),
    "tril": lambda x: x.tril(),
    "write_through_a_view": lambda x: (x + 0).t()[0].add_(5),
    "write_a_slice": lambda x: (x + 0)[1:2].fill_(7.0),
}


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_operator_runs_ahead_at_new_shapes(queued, name):
    x = unseen(3)
    queued(POINTWISE[name], x, torch.rand_like(x))


@pytest.mark.parametrize("name", POINTWISE_WITHOUT_META)
def test_pointwise_operator_without_meta_function_runs_ahead_when_warm(queued, name):
    # Sizes follow from a rule; dtypes are remembered from a call with any sizes.
    x, other = unseen(3), unseen(3)
    y, another = torch.rand_like(x), torch.rand_like(other)
    queued(POINTWISE_WITHOUT_META[name], x, y, warm_inputs=(other, another))
    queued(lambda x, y: POINTWISE_WITHOUT_META[name](x.t(), y.t()), unseen(3), torch.rand(1, 1))


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction_runs_ahead_at_new_shapes(queued, name):
    queued(REDUCTIONS[name], unseen(4))


@pytest.mark.parametrize("name", REDUCTIONS_WITHOUT_META)
def test_reduction_without_meta_function_runs_ahead_when_warm(queued, name):
    queued(REDUCTIONS_WITHOUT_META[name], unseen(4), warm_inputs=(unseen(4),))
    queued(lambda x: REDUCTIONS_WITHOUT_META[name](x.t()), unseen(4))


@pytest.mark.parametrize("name", MATMULS)
def test_matmul_runs_ahead_at_new_shapes(queued, name):
    queued(MATMULS[name], unseen(4))


@pytest.mark.parametrize("name", VIEWS)
def test_view_operator_runs_ahead_at_new_shapes(queued, name):
    queued(VIEWS[name], unseen(4))


REPEATED = {
    "tensor": lambda x, n: torch.repeat_interleave(x, n, 0, output_size=6),
    "repeats": lambda x, n: torch.repeat_interleave(n, output_size=6),
    "int32": lambda x, n: torch.repeat_interleave(n.int(), output_size=6),
    "all_of_none": lambda x, n: torch.repeat_interleave(n * 0, output_size=0),
}


@pytest.mark.parametrize("name", REPEATED)
def test_repeat_interleave_with_output_size_runs_ahead(queued, name):
    queued(REPEATED[name], torch.rand(4, 3), torch.tensor([1, 0, 3, 2]))


def test_repeat_interleave_reports_a_wrong_output_size_when_it_runs():
    for repeats, size, text in (([1, 2], 4, "does not match"), ([-1, 4], 3, "can not be negative")):
        torch.repeat_interleave(torch.tensor(repeats, device=DEVICE), output_size=size)
        with pytest.raises(RuntimeError, match=text):
            torch.openreg.synchronize()


def test_batches_of_changing_size_train_without_waiting(runs_ahead):
    torch.manual_seed(0)
    reference = mlp(7, 9, 4)
    model = copy.deepcopy(reference).to(DEVICE)
    batches = [torch.rand(size, 7) for size in (3, 1, 8, 5, 13, 2)]
    there = on_device(batches)
    torch.openreg.synchronize()
    got = runs_ahead(lambda: [gradients(model, x) for x in there])
    compare(got, [gradients(reference, x) for x in batches])


# ---- Memory ----


def test_tensors_dropped_behind_a_slow_kernel_keep_results_right(runs_ahead):
    def run():
        torch.openreg._sleep(100_000_000)
        total = torch.zeros(1000, device=DEVICE)
        kept = []
        for i in range(200):
            x = torch.full((1000,), float(i), device=DEVICE)
            y = x * 2
            z = y + x
            total += z
            if i % 20 == 0:
                kept.append((i, z))
            del x, y, z
        return total, kept

    total, kept = runs_ahead(run)
    assert total.tolist() == [3.0 * sum(range(200))] * 1000
    for i, z in kept:
        assert z.tolist() == [3.0 * i] * 1000


def test_tensors_dropped_on_a_side_stream_keep_results_right(runs_ahead):
    side = torch.Stream(DEVICE)
    total = torch.zeros(1000, device=DEVICE)
    torch.openreg.synchronize()

    def run():
        with side:
            torch.openreg._sleep(100_000_000)
        for i in range(200):
            x = torch.full((1000,), float(i), device=DEVICE)
            side.wait_stream(torch.accelerator.current_stream())
            with side:
                y = x * 2
                total.add_(y)
            x.record_stream(side)
            del x, y

    runs_ahead(run)
    torch.accelerator.current_stream().wait_stream(side)
    assert total.tolist() == [2.0 * sum(range(200))] * 1000


@pytest.mark.usefixtures("nothing_left")
def test_results_are_counted_in_memory_allocated_once():
    torch.openreg.synchronize()
    x = torch.rand(1 << 16, device=DEVICE)
    before = torch.openreg.memory_allocated()
    y = x + 1
    assert torch.openreg.memory_allocated() == before + y.untyped_storage().nbytes()
    del y
    assert torch.openreg.memory_allocated() == before
    # A kernel's temporaries are no device memory, and a waited call's result is charged once.
    for _ in range(2):
        order = x.argsort(stable=True)
        values = torch.nonzero(x > 2)
        del order, values
    torch.openreg.synchronize()
    assert torch.openreg.memory_allocated() == before


@pytest.mark.slow
def test_threads_that_end_leave_no_memory_of_tasks_behind():
    x, before = torch.ones(3, device=DEVICE), torch_openreg._C._task_blocks()
    together = threading.Barrier(8)

    def work():
        x + 1
        together.wait()

    for _ in range(1000):
        with torch.openreg.testing.gate() as gate:
            gate.wait()
            threads = [threading.Thread(target=work) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    torch.openreg.synchronize()
    assert torch_openreg._C._task_blocks() - before <= 2 * 1024  # kept for all, and for this thread
