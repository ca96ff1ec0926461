"""torch.autocast and torch.amp on the device, with CUDA's policies."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.autocast_test_lists import AutocastTestLists, TestAutocast

DEVICE = "openreg:1"
HALVES = [torch.float16, torch.bfloat16]
halves = pytest.mark.parametrize("half", HALVES, ids=str)
CUDNN = {"aten::cudnn_convolution", "aten::cudnn_convolution_transpose", "aten::_cudnn_rnn"}


def on(half):
    return torch.autocast("openreg", dtype=half)


# ---- The lists ----


def test_autocast_lists_the_operators_of_cuda():
    registered = {
        key: set(torch._C._dispatch_get_registrations_for_dispatch_key(key))
        for key in ("AutocastCUDA", "AutocastPrivateUse1")
    }
    assert registered["AutocastCUDA"] - registered["AutocastPrivateUse1"] <= CUDNN
    assert registered["AutocastPrivateUse1"] < registered["AutocastCUDA"]
    assert len(registered["AutocastPrivateUse1"]) > 110


# The operators and arguments of PyTorch's own test of CUDA's autocast. "einsum" stands there with
# arguments that its own test skips.
LISTS = AutocastTestLists("cpu")
MODULES = {"torch": torch, "nn": torch._C._nn, "linalg": torch._C._linalg, "methods": None}
LOWER = [
    (kind, entry)
    for kind in MODULES
    for entry in getattr(LISTS, f"{kind}_fp16", ())
    if f"aten::{entry[0]}" not in CUDNN and entry[0] != "einsum"
]
FLOAT32 = [(kind, entry) for kind in MODULES for entry in getattr(LISTS, f"{kind}_fp32", ())]
BUILTIN = [
    (kind, entry)
    for kind in MODULES
    for entry in getattr(LISTS, f"{kind}_expect_builtin_promote", ())
]
PROMOTED = [("torch", entry) for entry in LISTS.torch_need_autocast_promote]


def on_device(value, half):
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE, half if value.dtype == torch.float16 else value.dtype)
    if isinstance(value, tuple | list):
        return type(value)(on_device(v, half) for v in value)
    return value


def check(kind, entry, half, run_as, out=None):
    op, args, *rest = entry
    options = rest[0] if rest and isinstance(rest[0], dict) else {}
    TestAutocast()._run_autocast_outofplace(
        op,
        on_device(args, half),
        run_as,
        "openreg",
        out,
        module=MODULES[kind],
        add_kwargs=options,
        amp_dtype=half,
    )


# Two operators of the lists are deprecated, or called in a way that is.
DEPRECATED = pytest.mark.filterwarnings("ignore:.*(is deprecated|without specifying the dim arg)")


def each(entries):
    return pytest.mark.parametrize(
        "kind, entry", entries, ids=[f"{kind}.{entry[0]}" for kind, entry in entries]
    )


@halves
@DEPRECATED
@each(LOWER)
def test_autocast_runs_listed_operators_in_lower_precision(kind, entry, half):
    check(kind, entry, half, half)


@halves
@each(FLOAT32)
def test_autocast_runs_listed_operators_in_float32(kind, entry, half):
    check(kind, entry, half, torch.float32)


@halves
@DEPRECATED
@each(PROMOTED)
def test_autocast_promotes_to_the_widest_dtype(kind, entry, half):
    check(kind, entry, half, torch.float32)


@halves
@each(BUILTIN)
def test_autocast_leaves_operators_that_promote_by_themselves(kind, entry, half):
    check(kind, entry[:2], half, torch.float32, entry[2])


@halves
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_autocast_interpolates_in_float32(mode, half):
    x = torch.rand(1, 2, 4, 4, device=DEVICE, dtype=half)
    with on(half):
        assert F.interpolate(x, scale_factor=2, mode=mode).dtype == torch.float32
        if mode.startswith("bi"):
            y = F.interpolate(x, scale_factor=2, mode=mode, antialias=True)
            assert y.dtype == torch.float32
    assert F.interpolate(x, scale_factor=2, mode=mode).dtype == half


@halves
def test_autocast_covers_operators_outside_of_pytorchs_lists(half):
    x = torch.rand(2, 4, 8, 8, device=DEVICE)
    low = x.to(half)
    with on(half):
        assert torch.einsum("bkhd,bqhd->bqkh", x, x).dtype == half
        assert F.scaled_dot_product_attention(x, x, x).dtype == half
        assert F.huber_loss(low, low).dtype == torch.float32
        assert torch.linalg.vector_norm(low).dtype == torch.float32
        assert torch.linalg.matrix_norm(low).dtype == torch.float32
        # float64 is nobody's to lower.
        assert torch.mm(x[0, 0].double(), x[0, 0].double()).dtype == torch.float64
        # A dtype that is asked for wins.
        assert torch.softmax(low, 0, dtype=torch.float64).dtype == torch.float64
        # Neither integers nor tensors of other devices are cast.
        assert torch.ones(2, 2, dtype=torch.int64, device=DEVICE).cumsum(0).dtype == torch.int64
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32


@halves
@pytest.mark.parametrize("loss", [F.binary_cross_entropy, torch.nn.BCELoss()])
def test_autocast_refuses_an_unsafe_loss(loss, half):
    p = torch.rand(4, device=DEVICE, requires_grad=True)
    target = torch.ones(4, device=DEVICE)
    with on(half):
        with pytest.raises(RuntimeError, match=r"unsafe to autocast.*BCEWithLogitsLoss"):
            loss(p, target)
        with torch.autocast("openreg", enabled=False):
            loss(p, target).backward()
        assert F.binary_cross_entropy_with_logits(p, target).dtype == torch.float32
    assert p.grad is not None


@halves
def test_autocast_runs_recurrent_nets_in_lower_precision(half):
    x = torch.rand(5, 3, 8, device=DEVICE)
    for kind in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
        net = kind(8, 8).to(DEVICE)
        with on(half):
            out = net(x)[0]
        assert out.dtype == half
        out.float().sum().backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())


# ---- The context ----


def test_autocast_state_nests_and_is_restored():
    assert torch.amp.is_autocast_available("openreg")
    assert torch.openreg.get_amp_supported_dtype() == HALVES
    x = torch.rand(3, 3, device=DEVICE)
    with torch.autocast("openreg"):
        assert torch.is_autocast_enabled("openreg")
        assert torch.mm(x, x).dtype == torch.get_autocast_dtype("openreg") in HALVES
        with on(torch.bfloat16):
            assert torch.mm(x, x).dtype == torch.bfloat16
            with torch.autocast("openreg", enabled=False):
                assert torch.mm(x, x).dtype == torch.float32
            assert torch.mm(x, x).dtype == torch.bfloat16
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.mm(x, x).dtype == torch.get_autocast_dtype("openreg")
    assert not torch.is_autocast_enabled("openreg")
    assert torch.mm(x, x).dtype == torch.float32


def test_autocast_of_an_unsupported_dtype_warns_and_is_disabled():
    x = torch.rand(3, 3, device=DEVICE)
    with pytest.warns(UserWarning, match="float16.*bfloat16|bfloat16.*float16"):
        context = torch.autocast("openreg", dtype=torch.float64)
    with context:
        assert torch.mm(x, x).dtype == torch.float32


@pytest.mark.usefixtures("nothing_left")
def test_autocast_casts_weights_once():
    weight = torch.rand(64, 64, device=DEVICE, requires_grad=True)
    x = torch.rand(64, 64, device=DEVICE, dtype=torch.float16)

    allocated = []
    for cache in (True, False):
        with torch.autocast("openreg", dtype=torch.float16, cache_enabled=cache):
            before = torch.openreg.memory_stats(1)["allocation.all.allocated"]
            for _ in range(4):
                torch.mm(x, weight)
            allocated.append(torch.openreg.memory_stats(1)["allocation.all.allocated"] - before)
    assert allocated == [5, 8]


def test_autocast_passes_gradients_through_a_cast_weight():
    weight = torch.rand(8, 8, device=DEVICE, requires_grad=True)
    x = torch.rand(4, 8, device=DEVICE)
    with on(torch.bfloat16):
        out = torch.mm(x, weight)
        loss = (out.float() ** 2).sum()
    loss.backward()
    assert weight.grad.dtype == torch.float32
    expected = 2 * x.bfloat16().t() @ out.detach()
    assert torch.equal(weight.grad, expected.float())


def test_autocast_holds_in_custom_autograd_functions():
    seen = []

    class Double(torch.autograd.Function):
        @staticmethod
        @torch.openreg.amp.custom_fwd(cast_inputs=torch.float32)
        def forward(ctx, x):
            seen.append((x.dtype, torch.is_autocast_enabled("openreg")))
            return x * 2

        @staticmethod
        @torch.openreg.amp.custom_bwd
        def backward(ctx, grad):
            seen.append(torch.is_autocast_enabled("openreg"))
            return grad * 2

    x = torch.rand(3, device=DEVICE, dtype=torch.float16, requires_grad=True)
    with torch.openreg.amp.autocast():
        Double.apply(x).sum().backward()
    assert seen == [(torch.float32, False), False]
    assert x.grad.tolist() == [2, 2, 2]


def test_autocast_and_scaler_have_names_in_openreg_amp():
    with torch.openreg.amp.autocast(dtype=torch.bfloat16):
        x = torch.rand(3, 3, device=DEVICE)
        assert torch.mm(x, x).dtype == torch.bfloat16

    @torch.openreg.amp.autocast(enabled=False)
    def plain(x):
        return torch.mm(x, x)

    with on(torch.float16):
        assert plain(x).dtype == torch.float32
    scaler = torch.openreg.amp.GradScaler(init_scale=8.0)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.scale(torch.ones((), device=DEVICE)).item() == 8


# ---- GradScaler ----


def model_and_data(device, seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    data = torch.randn(16, 8), torch.randint(0, 4, (16,))
    return model.to(device), *(t.to(device) for t in data)


@pytest.mark.parametrize("fused", [False, True])
def test_scaler_skips_a_step_with_infinities(fused):
    model, x, y = model_and_data(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("openreg", init_scale=2.0**10, growth_interval=3)
    scales = []
    for step in range(6):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        with on(torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        if step == 1:
            model[0].weight.grad[0, 0] = torch.inf
        if step == 2:
            model[2].bias.grad[1] = torch.nan
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert all(same) if step in (1, 2) else not any(same)
    assert scales == [1024, 512, 256, 256, 256, 512]


def test_autocast_training_matches_the_cpu():
    losses = {}
    for device in ("cpu", DEVICE):
        model, x, y = model_and_data(device)
        kind = torch.device(device).type
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        scaler = torch.amp.GradScaler(kind, init_scale=2.0**17)
        losses[device] = []
        for _ in range(8):
            optimizer.zero_grad()
            with torch.autocast(kind, dtype=torch.bfloat16):
                out = model(x)
            # What autocast lowers is the same on both; the loss is on CUDA's list alone.
            loss = F.cross_entropy(out.float(), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses[device].append(loss.item())
    assert losses[DEVICE] == pytest.approx(losses["cpu"], rel=1e-5)
    assert losses["cpu"][-1] < losses["cpu"][0]


def test_scaler_state_is_saved_and_restored():
    scaler = torch.amp.GradScaler("openreg", init_scale=64.0, growth_interval=2)
    model, x, y = model_and_data(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
    state = scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (64.0, 1)
    again = torch.amp.GradScaler("openreg")
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert pickle.loads(pickle.dumps(scaler)).state_dict() == state
    assert again.scale(torch.ones((), device="openreg:0")).item() == 64.0


def test_scaler_serves_several_optimizers_and_devices():
    models = [torch.nn.Linear(4, 1).to(f"openreg:{i}") for i in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in models]
    both = torch.optim.SGD([p for m in models for p in m.parameters()], 0.1)
    scaler = torch.amp.GradScaler("openreg", init_scale=16.0)
    x = torch.ones(2, 4)
    losses = [m(x.to(f"openreg:{i}")).sum() for i, m in enumerate(models)]
    torch.autograd.backward(scaler.scale(losses))
    models[1].weight.grad.fill_(torch.inf)
    before = [m.weight.detach().clone() for m in models]
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    changed = [not torch.equal(a, m.weight) for a, m in zip(before, models, strict=True)]
    assert changed == [True, False]
    assert scaler.get_scale() == 8.0
    # One optimizer over both devices: an infinity on one skips both.
    models[0].weight.grad.fill_(1.0)
    before = [m.weight.detach().clone() for m in models]
    scaler.step(both)
    assert all(torch.equal(a, m.weight) for a, m in zip(before, models, strict=True))


@pytest.mark.parametrize("bad", [None, torch.inf, -torch.inf, torch.nan])
def test_scaler_unscales_and_finds_infinities_as_the_cpu(bad):
    grads = [torch.full((3,), 4.0), torch.full((2, 2), 8.0), torch.full((4, 3), 2.0).t()]
    if bad is not None:
        grads[1][1, 1] = bad
    expected = copy.deepcopy(grads)
    there = [g.to(DEVICE) for g in grads]
    results = []
    for list_, device in ((expected, "cpu"), (there, DEVICE)):
        found = torch.zeros((), device=device)
        inverse = torch.full((), 0.5, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(list_, found, inverse)
        results.append(found.item())
    assert results == [float(bad is not None)] * 2
    for got, want in zip(there, expected, strict=True):
        torch.testing.assert_close(got.cpu(), want, equal_nan=True)


def test_scaler_updates_its_scale_by_what_was_found():
    def update(found, tracker, interval):
        scale = torch.full((), 4.0, device=DEVICE)
        tracker = torch.full((), tracker, dtype=torch.int32, device=DEVICE)
        found = torch.full((), found, device=DEVICE)
        torch._amp_update_scale_(scale, tracker, found, 2.0, 0.25, interval)
        return scale.item(), tracker.item()

    assert update(0.0, 0, 2) == (4.0, 1)
    assert update(0.0, 1, 2) == (8.0, 0)
    assert update(1.0, 1, 2) == (1.0, 0)


def test_scaler_does_not_wait(runs_ahead):
    scaler = torch.amp.GradScaler("openreg", init_scale=4.0)
    model, x, y = model_and_data("openreg:0")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        with on(torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.update()
        optimizer.zero_grad()

    step()
    runs_ahead(step)
