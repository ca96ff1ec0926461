"""Deterministic, inference and anomaly mode, default device and dtype, and modes of one's own."""

import pytest
import torch
import torch.nn.functional as F
from cpu_reference import DEVICE, Recorder, alike, drawn
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

import torch_openreg  # noqa: F401

# ---- Deterministic ----


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


UNINITIALIZED = {
    "empty": lambda d, dtype: torch.empty(3, dtype=dtype, device=d),
    "empty_strided": lambda d, dtype: torch.empty_strided((2, 2), (1, 2), dtype=dtype, device=d),
    "empty_like": lambda d, dtype: torch.empty_like(torch.ones(3, dtype=dtype, device=d)),
    "new_empty": lambda d, dtype: torch.ones(3, device=d).new_empty(3, dtype=dtype),
    "resize": lambda d, dtype: torch.ones(2, dtype=dtype, device=d).resize_(5),
}
DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("name", UNINITIALIZED)
def test_deterministic_mode_fills_uninitialized_memory(name, deterministic):
    for dtype in DTYPES:
        alike(lambda device, dtype=dtype: UNINITIALIZED[name](device, dtype))


def test_deterministic_mode_fills_nothing_when_turned_off(deterministic):
    torch.openreg.synchronize(DEVICE)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.openreg.fallback_stats(reset=True)
    torch.empty(3, device=DEVICE)
    assert torch.openreg.fallback_stats() == {}


def accumulated(device):
    x, i = torch.zeros(5, device=device), torch.tensor([0, 0, 1], device=device)
    ones = torch.ones(3, device=device)
    return [
        x.clone().index_put_((i,), ones, accumulate=True),
        x.clone().scatter_add_(0, i, ones),
        x.clone().put_(i, ones, accumulate=True),
        x.clone().index_add_(0, i, ones),
        torch.bincount(i), torch.bincount(i, weights=ones), torch.cumsum(ones, 0),
    ]  # fmt: skip


def through_images(device):
    results = []
    for function in (
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
        lambda x: F.adaptive_avg_pool2d(x, 2),
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.grid_sample(x, torch.zeros(1, 2, 2, 2, device=device), align_corners=True),
        lambda x: F.conv2d(x, torch.ones(1, 2, 3, 3, device=device)),
        lambda x: x.kthvalue(2)[0],
        lambda x: x.median(),
    ):
        x = drawn(device, 1, 2, 4, 4)
        out = function(x)
        results.append((out, torch.autograd.grad(out.sum(), x)))
    return results


@pytest.mark.parametrize("program", [accumulated, through_images])
def test_deterministic_mode_gives_the_cpus_results(program, deterministic):
    alike(program)


def refusal(device):
    x = drawn(device, 1, 1, 4, 4)
    try:
        F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2).sum().backward()
    except RuntimeError as error:
        return str(error).replace(torch.device(device).type, "device")
    return None


def test_deterministic_mode_refuses_what_it_refuses_on_the_cpu(deterministic):
    alike(refusal)


ALERTS = {
    "put_": lambda x, i, v: x.put_(i, v),
    "put": lambda x, i, v: x.put(i, v),
    "max_unpool1d": lambda x, i, v: F.max_unpool1d(v.view(1, -1), i.view(1, -1), 2),
    "max_unpool2d": lambda x, i, v: F.max_unpool2d(v.view(1, 1, -1), i.view(1, 1, -1), 2),
    "max_unpool3d": lambda x, i, v: F.max_unpool3d(v.view(1, 1, 1, -1), i.view(1, 1, 1, -1), 2),
}


@pytest.mark.parametrize("name", ALERTS)
def test_deterministic_mode_of_the_call_decides_a_refusal(name):
    arguments = torch.zeros(4), torch.tensor([0, 2]), torch.ones(2)
    there = [value.to(DEVICE) for value in arguments]
    for _ in range(2):  # a first one, and one that is remembered from a call without the mode
        torch.use_deterministic_algorithms(True)
        try:
            for values in (arguments, there):
                with pytest.raises(RuntimeError, match="does not have a deterministic"):
                    ALERTS[name](*values)
        finally:
            torch.use_deterministic_algorithms(False)
        torch.openreg.synchronize(DEVICE)
        got = ALERTS[name](*there)
        assert torch.equal(got.cpu(), ALERTS[name](*arguments))


def test_deterministic_mode_that_warns_does_so_at_the_call():
    x, i, v = (t.to(DEVICE) for t in (torch.zeros(4), torch.tensor([0, 2]), torch.ones(2)))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with pytest.warns(UserWarning, match="put_ does not have a deterministic"):
            x.put_(i, v)
    finally:
        torch.use_deterministic_algorithms(False)
    assert x.tolist() == [1, 0, 1, 0]


def test_nondeterministic_operator_runs_ahead_without_the_mode(runs_ahead):
    x, i, v = (t.to("openreg") for t in (torch.zeros(4), torch.tensor([0, 2]), torch.ones(2)))
    runs_ahead(lambda: x.put_(i, v))
    assert x.tolist() == [1, 0, 1, 0]


# ---- Inference ----


def test_inference_mode_marks_results_as_the_cpu_does():
    def program(device):
        facts = []
        with torch.inference_mode():
            x = torch.ones(3, device=device)
            y = x * 2
            view, rest = y.view(3, 1), [y.nonzero(), y.split(1)[0], y[y > 1], y.sort()[0], x.cpu()]
            y.add_(1)
            facts += [t.is_inference() for t in (x, y, view, *rest)]
        net, w = nn.Linear(3, 3).to(device), torch.ones(3, device=device, requires_grad=True)
        for function in (
            lambda: net(y),
            lambda: y.add_(1),
            lambda: torch.add(y, 1, out=y),
            lambda: (y * w).sum(),
            lambda: y.requires_grad_(),
            lambda: y.view(1, 3),
            lambda: y.clone().add_(w),
        ):
            try:
                function()
                facts.append("fine")
            except RuntimeError as error:
                facts.append(str(error))
        return facts

    alike(program)


# ---- Anomalies ----


def anomaly(function, **options):
    def program(device):
        with torch.autograd.detect_anomaly(**options):
            x = torch.zeros(2, device=device, requires_grad=True)
            try:
                function(x).backward()
            except RuntimeError as error:
                return str(error)
            return torch.autograd.grad(function(x), x)

    return program


@pytest.mark.parametrize(
    "options", [{}, {"check_nan": False}], ids=["names-the-function", "without-a-check"]
)
def test_anomaly_mode_names_the_forward_call(options):
    with pytest.warns(UserWarning) as warned:
        message = alike(anomaly(lambda x: (x.sqrt() * 0).sum(), **options))
    traces = [str(w.message) for w in warned if "Traceback of forward call" in str(w.message)]
    if options:
        assert not traces and message[0].isnan().all()
    else:
        assert "SqrtBackward0" in message and "nan" in message
        assert len(traces) == 3 and all("x.sqrt()" in trace for trace in traces)


def test_anomaly_mode_leaves_a_queued_kernels_error():
    """The check for NaN waits, so what failed in forward is told inside of backward."""
    table = drawn(DEVICE, 3, 2)

    def look_up(row):
        return F.embedding(torch.tensor([row], device=DEVICE), table).sum()

    with torch.autograd.set_detect_anomaly(True):
        look_up(1).backward()
        loss = look_up(7)
        with (
            pytest.warns(UserWarning, match="forward call"),
            pytest.raises(IndexError, match="raised by embedding"),
        ):
            loss.backward()
        look_up(2).backward()


# ---- Defaults ----


def test_default_device_places_factories_and_modules():
    with torch.device(DEVICE):
        made = [torch.ones(3), nn.Linear(2, 2).weight, torch.tensor(1.0), torch.randperm(4)]
    torch.set_default_device(DEVICE)
    try:
        made += [torch.zeros(2), torch.linspace(0, 1, 3), nn.Conv1d(1, 1, 1).bias, torch.rand(2)]
        assert torch.get_default_device() == torch.device(DEVICE)
    finally:
        torch.set_default_device(None)
    assert {t.device for t in made} == {torch.device(DEVICE)}
    assert torch.ones(1).device.type == "cpu"


def test_meta_modules_are_given_memory_by_to_empty():
    with torch.device("meta"):
        net = nn.Linear(3, 3)
    net = net.to_empty(device=DEVICE)
    nn.init.ones_(net.weight)
    nn.init.zeros_(net.bias)
    assert net(torch.ones(3, device=DEVICE)).tolist() == [3.0] * 3


# ---- Modes and tensors of one's own ----


@pytest.mark.usefixtures("nothing_left")
def test_fake_tensors_have_the_cpus_shapes():
    def program(device):
        with FakeTensorMode():
            x = torch.empty(2, 3, device=device, requires_grad=True)
            out = nn.Linear(3, 4, device=device)(x).relu()
            out.sum().backward()
            image = torch.empty(1, 1, 5, 5, device=device)
            heads = torch.empty(1, 2, 3, 8, device=device)
            sequence = torch.empty(2, 1, 3, device=device)
            made = [
                out,
                x.grad,
                nn.Conv2d(1, 2, 3, device=device)(image),
                nn.LSTM(3, 4, device=device)(sequence)[0],
                F.scaled_dot_product_attention(heads, heads, heads),
                torch.fft.rfft(x),
                x.sort()[1],
                x.to("cpu"),
            ]
        wanted = torch.device(device).type
        return [(t.shape, t.dtype, t.stride(), t.device.type in (wanted, "cpu")) for t in made]

    torch.openreg.synchronize(DEVICE)
    before = torch.openreg.memory_stats(DEVICE)["allocation.all.allocated"]
    alike(program)
    assert torch.openreg.memory_stats(DEVICE)["allocation.all.allocated"] == before


def test_dispatch_mode_sees_what_the_cpu_runs():
    def program(device):
        x = drawn(device, 3, 3)
        with Recorder() as recorder:
            (x @ x).relu().sum().backward()
            nn.functional.layer_norm(x, [3]).softmax(1)
        with FlopCounterMode(display=False) as counter:
            x @ x
            F.conv2d(drawn(device, 1, 1, 5, 5), drawn(device, 2, 1, 3, 3))
            F.scaled_dot_product_attention(*[drawn(device, 1, 2, 4, 8)] * 3)
        return recorder.names, counter.get_total_flops()

    alike(program)


class Wrapper(torch.Tensor):
    """A tensor around another, which runs what it is asked for on the inner one."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, strides=inner.stride()
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, function(*args, **kwargs))


def test_tensor_wrappers_move_and_differentiate():
    def program(device):
        x = Wrapper(torch.randn(3, 3)).to(device)
        assert type(x) is Wrapper and x.device == x.inner.device == torch.device(device)
        weight = nn.Parameter(Wrapper(torch.randn(3, 3).to(device)))
        out = (x @ weight).relu()[0].sum()
        out.backward()
        return out.inner, weight.grad.inner

    alike(program)
