"""Batch norm: dtypes that the CPU's kernels do not mix, and the steps of nn.SyncBatchNorm."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from ranks import Ranks
from torch import nn

import torch_openreg  # noqa: F401

DEVICE = "openreg:1"
SIZE = 2
HALVES = [torch.bfloat16, torch.float16]


def same(got, expected, **close):
    assert got.device.type == "openreg" and got.dtype == expected.dtype, (got, expected)
    if close:
        torch.testing.assert_close(got.cpu(), expected, **close)
    else:
        assert torch.equal(got.cpu(), expected), (got, expected)


# ---- Mixed dtypes -------------------------------------------------------------------------------


def normed(device, x, weight, bias, mean, variance, training, gradient):
    """The result, the statistics afterwards and the gradients."""
    x, weight, bias, mean, variance = (
        None if t is None else t.clone().to(device).requires_grad_(i < 3)
        for i, t in enumerate((x, weight, bias, mean, variance))
    )
    y = F.batch_norm(x, mean, variance, weight, bias, training, momentum=0.3)
    y.backward(gradient.to(device))
    gradients = [None if t is None else t.grad for t in (x, weight, bias)]
    return [y.detach(), mean, variance, *gradients]


# Of weight, bias and statistics; evaluation needs these.
DTYPES = [(dtypes, True) for dtypes in itertools.product("hf", "hf", "hf-")]
DTYPES += [(dtypes, False) for dtypes in itertools.product("hf", "hf", "hf")]


@pytest.mark.parametrize(
    "dtypes,training", DTYPES, ids=lambda v: "".join(v) if isinstance(v, tuple) else str(v)
)
@pytest.mark.parametrize("half", HALVES, ids=str)
def test_batch_norm_takes_parameters_of_other_dtypes(half, dtypes, training):
    """The CPU's values with everything but the input in float32, in the dtypes that went in."""
    torch.manual_seed(0)
    known = {"h": half, "f": torch.float32}
    x, gradient = torch.randn(2, 8, 4, 5, 5).to(half)
    weight, bias = (torch.randn(4).to(known[d]) for d in dtypes[:2])
    statistics = [None, None]
    if dtypes[2] != "-":
        statistics = [torch.randn(4).to(known[dtypes[2]]), torch.rand(4).to(known[dtypes[2]])]
    given = [weight, bias, *statistics]
    got = normed(DEVICE, x, *given, training, gradient)
    plain = {t.dtype for t in given if t is not None} <= {half}
    ready = given if plain else [None if t is None else t.float() for t in given]
    expected = normed("cpu", x, *ready, training, gradient)
    expected[-1] = expected[-1].to(weight.dtype)  # as on CUDA, the gradient of bias is like weight
    before = [None, *statistics, None, weight, bias]
    for ours, theirs, given in zip(got, expected, before, strict=True):
        if theirs is not None:
            same(ours, theirs if given is None else theirs.to(given.dtype))


def test_batch_norm_module_keeps_float32_buffers():
    """FSDP's mixed precision, and model.half() with its buffers kept."""
    torch.manual_seed(0)
    module = nn.BatchNorm2d(4)
    on_cpu = nn.BatchNorm2d(4)
    module.to(DEVICE)
    for parameter in module.parameters():
        parameter.data = parameter.data.bfloat16()
    x = torch.randn(3, 4, 5, 5).bfloat16()
    for _ in range(2):
        same(module(x.to(DEVICE)).detach(), on_cpu(x).detach())
    assert module.running_var.dtype == torch.float32
    same(module.running_mean, on_cpu.running_mean)
    same(module.running_var, on_cpu.running_var)
    module.eval()
    on_cpu.eval()
    same(module(x.to(DEVICE)).detach(), on_cpu(x).detach())


@pytest.mark.parametrize("dtypes", itertools.product("hf", repeat=2), ids="".join)
def test_batch_norm_in_evaluation_leaves_statistics_alone(dtypes):
    torch.manual_seed(0)
    known = {"h": torch.bfloat16, "f": torch.float32}
    x = torch.randn(4, 3, 5).bfloat16()
    weight, bias = torch.rand(2, 3).to(known[dtypes[0]])
    mean, variance = torch.rand(2, 3).to(known[dtypes[1]])
    given = [weight, bias, mean, variance]
    ready = given if dtypes[0] == dtypes[1] else [t.float() for t in given]
    expected = torch.ops.aten._batch_norm_no_update(x, *ready, 0.1, 1e-5)
    there = [t.to(DEVICE) for t in given]
    for _ in range(2):
        got = torch.ops.aten._batch_norm_no_update(x.to(DEVICE), *there, 0.1, 1e-5)
        out = [torch.empty_like(t) for t in got]
        torch.ops.aten._batch_norm_no_update.out(
            x.to(DEVICE), *there, 0.1, 1e-5, **{f"out{i}": t for i, t in enumerate(out)}
        )
        for ours, copied, theirs in zip(got, out, expected, strict=True):
            same(ours, theirs)
            same(copied, theirs)
    assert [t._version for t in there] == [0] * 4


def test_batch_norm_updates_statistics_where_kernels_reach_no_memory(run_ok, plugins):
    """They are copied, and come back."""
    out = run_ok(
        """
        import torch

        assert not torch.openreg.get_device_properties(0).can_map
        x = torch.arange(24.0).view(2, 3, 4)
        for dtype in (torch.float32, torch.bfloat16):
            module, on_cpu = torch.nn.BatchNorm1d(3).openreg(), torch.nn.BatchNorm1d(3)
            for parameter in module.parameters():
                parameter.data = parameter.data.to(dtype)
            y, expected = module(x.to(dtype).openreg()), on_cpu(x.to(dtype))
            assert torch.equal(y.cpu(), expected) and y.dtype == dtype
            assert torch.equal(module.running_mean.cpu(), on_cpu.running_mean)
            assert torch.equal(module.running_var.cpu(), on_cpu.running_var)
        print("right")
        """,
        env={"OPENREG_PLUGIN": str(plugins / "libvendor_nomap.so")},
    )
    assert out.split() == ["right"]


def test_batch_norm_of_mixed_dtypes_does_not_wait():
    x = torch.ones(8, 4, 5, 5, device=DEVICE, dtype=torch.half, requires_grad=True)
    weight = torch.ones(4, device=DEVICE, dtype=torch.half, requires_grad=True)
    mean, variance = torch.zeros(4, device=DEVICE), torch.ones(4, device=DEVICE)

    def step():
        F.batch_norm(x, mean, variance, weight, None, True).sum().backward()

    step()
    torch.openreg.synchronize(1)
    with torch.openreg.testing.gate(1) as gate:
        gate.wait()
        step()
        assert not torch.openreg.current_stream(1).query()


# ---- The steps of SyncBatchNorm -----------------------------------------------------------------

TYPES = [(torch.float32,) * 2, (torch.float64,) * 2]
TYPES += [(half, parameters) for half in HALVES for parameters in (half, torch.float32)]


def close(dtype):
    if dtype in HALVES:
        return {"rtol": 2e-2, "atol": 6e-2}
    return {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize("shape", [(8, 3), (8, 3, 6), (4, 3, 5, 5), (2, 3, 4, 4, 4)], ids=str)
@pytest.mark.parametrize("dtype,parameters", TYPES, ids=str)
def test_batch_norm_steps_give_what_batch_norm_gives(dtype, parameters, shape):
    """Two parts of a batch, of different sizes, as two ranks would have them."""
    torch.manual_seed(0)
    eps, momentum, channels = 1e-3, 0.3, shape[1]
    wide = torch.promote_types(dtype, torch.float32)
    x, gradient = torch.randn(2, *shape).to(dtype)
    weight, bias = torch.randn(2, channels).to(parameters)
    mean, variance = torch.randn(channels).to(wide), torch.rand(channels).to(wide)

    one = [t.to(wide).requires_grad_() for t in (x, weight, bias)]
    statistics = mean.clone(), variance.clone()
    whole = F.batch_norm(one[0], *statistics, *one[1:], True, momentum, eps)
    whole.backward(gradient.to(wide))

    split = [1, shape[0] - 1]
    parts = [part.to(DEVICE) for part in x.split(split)]
    gradients = [part.to(DEVICE) for part in gradient.split(split)]
    weight, bias, mean, variance = (t.to(DEVICE) for t in (weight, bias, mean, variance))
    stats = [torch.batch_norm_stats(part, eps) for part in parts]
    assert all(t.dtype == wide for pair in stats for t in pair)
    counts = torch.tensor([part.numel() / channels for part in parts]).to(wide).to(DEVICE)
    means, deviations = (torch.stack(t) for t in zip(*stats, strict=True))
    average, deviation = torch.batch_norm_gather_stats_with_counts(
        parts[0], means, deviations, mean, variance, momentum, eps, counts
    )
    same(mean, statistics[0], **close(wide))
    same(variance, statistics[1], **close(wide))
    known = weight, bias, average, deviation
    out = [torch.batch_norm_elemt(part, *known, eps) for part in parts]
    same(torch.cat(out), whole.detach().to(dtype), **close(dtype))
    other = torch.empty(0, dtype=dtype, device=DEVICE)
    assert torch.batch_norm_elemt(parts[1], *known, eps, out=other) is other
    assert torch.equal(other.cpu(), out[1].cpu())

    reduced = [
        torch.batch_norm_backward_reduce(g, part, average, deviation, weight, True, True, True)
        for g, part in zip(gradients, parts, strict=True)
    ]
    sum_dy, sum_dy_xmu, weights, biases = (sum(t) for t in zip(*reduced, strict=True))
    same(weights, one[1].grad.to(parameters), **close(parameters))
    same(biases, one[2].grad.to(parameters), **close(parameters))
    counts = counts.int()
    grads = [
        torch.batch_norm_backward_elemt(
            g, part, average, deviation, weight.to(wide), sum_dy, sum_dy_xmu, counts
        )
        for g, part in zip(gradients, parts, strict=True)
    ]
    same(torch.cat(grads), one[0].grad.to(dtype), **close(dtype))


def test_batch_norm_steps_work_without_optional_arguments():
    x = torch.randn(4, 3, 5, device=DEVICE)
    mean, deviation = torch.batch_norm_stats(x, 1e-5)
    all_mean, all_deviation = torch.batch_norm_gather_stats(
        x, mean[None], deviation[None], None, None, 0.1, 1e-5, 20
    )
    same(all_mean, mean.cpu(), rtol=1e-6, atol=1e-6)
    same(all_deviation, deviation.cpu(), rtol=1e-5, atol=1e-5)
    out = torch.batch_norm_elemt(x, None, None, mean, deviation, 1e-5)
    expected = F.batch_norm(x.cpu(), None, None, training=True)
    same(out, expected, rtol=1e-5, atol=1e-5)
    needs = torch.batch_norm_backward_reduce(x, x, mean, deviation, None, True, False, False)
    assert needs[0].shape == (3,) and needs[2] is None and needs[3] is None
    last = torch.randn(2, 3, 4, 5, device=DEVICE).to(memory_format=torch.channels_last)
    out = torch.batch_norm_elemt(last, None, None, mean, deviation, 1e-5)
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_batch_norm_steps_do_not_wait():
    x, counts = torch.randn(4, 3, 5, device=DEVICE), torch.ones(1, device=DEVICE)

    def steps():
        mean, deviation = torch.batch_norm_stats(x, 1e-5)
        rows = mean[None], deviation[None]
        torch.batch_norm_gather_stats_with_counts(x, *rows, mean, deviation, 0.1, 1e-5, counts)
        y = torch.batch_norm_elemt(x, None, None, mean, deviation, 1e-5)
        sums = torch.batch_norm_backward_reduce(y, x, mean, deviation, None, True, False, False)
        torch.batch_norm_backward_elemt(y, x, mean, deviation, None, *sums[:2], counts.int())

    with torch.openreg.testing.gate(1) as gate:  # from the first call on
        gate.wait()
        steps()
        assert not torch.openreg.current_stream(1).query()


def test_batch_norm_steps_refuse_bad_input():
    x, three, two = (torch.ones(s, device=DEVICE) for s in ((4, 3, 5), 3, 2))
    with pytest.raises(RuntimeError, match=r"2 or more dimensions, got sizes \[3\]"):
        torch.batch_norm_stats(three, 1e-5)
    with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
        torch.batch_norm_stats(x.long(), 1e-5)
    with pytest.raises(RuntimeError, match=r"a mean of 3 elements.*got 2"):
        torch.batch_norm_elemt(x, None, None, two, three, 1e-5)
    with pytest.raises(RuntimeError, match=r"each count, got sizes \[1, 3\].* 2 counts"):
        torch.batch_norm_gather_stats_with_counts(
            x, three[None], three[None], None, None, 0.1, 1e-5, two
        )
    with pytest.raises(RuntimeError, match=r"the input's sizes, \[4, 3, 5\], got \[3\]"):
        torch.batch_norm_backward_reduce(three, x, three, three, None, True, False, False)
    with pytest.raises(RuntimeError, match=r"a sum_dy of 3 elements.*got 2"):
        torch.batch_norm_backward_elemt(x, x, three, three, None, two, three, two)


# ---- SyncBatchNorm ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    ranks = Ranks(SIZE, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


def network(affine=True):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, affine=affine), nn.ReLU(), nn.Conv2d(4, 2, 3)
    )


def rank_trains(rank, dtype, affine, sizes):
    torch.openreg.set_device(rank)
    try:
        device = f"openreg:{rank}"
        torch.manual_seed(1)
        batch = torch.randn(sum(sizes), 2, 8, 8)
        one = network(affine)
        model = nn.SyncBatchNorm.convert_sync_batchnorm(network(affine)).to(device)
        model = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
        part = batch.split(sizes)[rank].to(device)
        for _ in range(2):
            model.zero_grad()
            one.zero_grad()
            with torch.autocast("openreg", dtype, enabled=dtype != torch.float32):
                y = model(part)
            # DDP divides by the number of ranks.
            y.float().square().sum().mul(SIZE).backward()
            whole = one(batch)
            whole.square().sum().backward()
            near = close(dtype)
            expected = whole.detach().split(sizes)[rank]
            torch.testing.assert_close(y.detach().cpu().float(), expected, **near)
        if dtype == torch.float32:
            for ours, theirs in zip(model.parameters(), one.parameters(), strict=True):
                torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-3, atol=1e-3)
        for ours, theirs in zip(model.buffers(), one.buffers(), strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, **near)
        model.eval()
        one.eval()
        y = model(part).detach().cpu()
        torch.testing.assert_close(y, one(batch).detach().split(sizes)[rank], **near)
    finally:
        torch.openreg.set_device(0)


@pytest.mark.parametrize(
    "dtype,affine,sizes",
    [
        (torch.float32, True, [4, 4]),
        (torch.float32, False, [1, 5]),
        (torch.bfloat16, True, [4, 4]),
        (torch.float16, True, [4, 4]),
    ],
    ids=["float32", "other sizes", "bfloat16", "float16"],
)
def test_sync_batch_norm_is_batch_norm_of_the_whole_batch(ranks, dtype, affine, sizes):
    ranks.run(rank_trains, dtype, affine, sizes)
