"""Operators: the CPU's kernels over the device's memory."""

import threading
import warnings

import pytest
import torch
import torch.nn.functional as F

import torch_openreg  # noqa: F401

DEVICE = "openreg:0"
OTHER = "openreg:1"
two_devices = pytest.mark.skipif("torch.openreg.device_count() < 2")


def same(function, *tensors, **kwargs):
    """The function gives the same on both sides, and its tensors are on the device."""
    expected = function(*tensors, **kwargs)
    got = function(*(t.to(DEVICE) for t in tensors), **kwargs)
    pairs = (
        [(got, expected)]
        if isinstance(got, torch.Tensor)
        else list(zip(got, expected, strict=True))
    )
    for result, wanted in pairs:
        assert result.device == torch.device(DEVICE)
        assert result.is_conj() == wanted.is_conj() and result.is_neg() == wanted.is_neg()
        torch.testing.assert_close(result.cpu(), wanted)
    return got


def test_arithmetic_has_the_cpus_values():
    x, y = torch.rand(5, 7), torch.rand(5, 7)
    for function in (
        torch.add,
        torch.mul,
        torch.sub,
        torch.div,
        torch.maximum,
        torch.atan2,
        torch.eq,
    ):
        same(function, x, y)
    for function in (
        torch.exp,
        torch.sigmoid,
        torch.neg,
        torch.sum,
        torch.argmax,
        torch.sort,
        torch.std,
    ):
        same(function, x)
    same(lambda t: t @ t.t(), x)
    same(lambda t: 2 // (t + 1), x)
    same(lambda t: t.to(torch.complex64) * 2j, x)
    same(lambda t: torch.cat([t, t[:2]]), x)
    same(lambda t: torch.where(t > 0.5, t, 0.0), x)
    same(lambda t: t[torch.tensor([0, 2])], x)
    same(lambda t: torch.topk(t, 3), x)
    same(torch.linalg.svdvals, x)
    same(torch.unique, torch.tensor([3, 1, 3, 2]))
    same(lambda t: t.split(2), x)


# By signature: T tensor, S number, W tensor that is written. These have kernels that take no boxes.
SIGNATURES = {
    "TT": lambda x, y, out: torch.relu(x),
    "TTT": lambda x, y, out: x * y,
    "TST": lambda x, y, out: x >= 0.5,
    "TTST": lambda x, y, out: torch.add(x, y, alpha=3),
    "TTTSST": lambda x, y, out: torch.addmm(x, x, y, beta=0.5, alpha=2),
    "TWW": lambda x, y, out: torch.exp(x, out=out),
    "TTWW": lambda x, y, out: torch.mm(x, y, out=out),
    "TTSWW": lambda x, y, out: torch.sub(x, y, alpha=2, out=out),
    "WW": lambda x, y, out: out.sigmoid_(),
    "WTW": lambda x, y, out: out.div_(y),
    "WSW": lambda x, y, out: out.gt_(0.5),
    "WTSW": lambda x, y, out: out.add_(x, alpha=2),
    "WTTSW": lambda x, y, out: out.addcmul_(x, y, value=0.5),
}


@pytest.mark.parametrize("signature", SIGNATURES)
def test_unboxed_signatures_have_the_cpus_values(signature, runs_ahead):
    call = SIGNATURES[signature]
    tensors = [torch.rand(4, 4) + 0.25 for _ in range(3)]
    on_device = [t.to(DEVICE) for t in tensors]
    for _ in range(2):  # the first call has to learn, the second is remembered
        expected, got = call(*tensors), call(*on_device)
        torch.testing.assert_close(got.cpu(), expected)
    assert (got is on_device[2]) == (expected is tensors[2])
    runs_ahead(lambda: call(*on_device))
    assert [t._use_count() for t in on_device] == [t._use_count() for t in tensors]


def test_refused_call_returns_what_it_borrowed():
    x, y = torch.rand(4, device=DEVICE), torch.rand(5, device=DEVICE)
    for other in (y, torch.rand(4)):
        before = x._use_count(), other._use_count()
        for _ in range(3):
            with pytest.raises(RuntimeError):
                torch.add(x, other)
        assert (x._use_count(), other._use_count()) == before


def test_in_place_returns_the_same_tensor():
    x = torch.zeros(4, device=DEVICE)
    assert x.add_(1) is x
    assert x[1:3].mul_(5) is not x
    x.t_().clamp_(max=4)
    assert x.tolist() == [1, 4, 4, 1]
    x[x > 2] = 0
    x[torch.tensor([0])] = 9
    assert x.tolist() == [9, 0, 0, 1]
    x.index_add_(0, torch.tensor([1, 1], device=DEVICE), torch.ones(2, device=DEVICE))
    assert x.tolist() == [9, 2, 0, 1]


def test_out_is_filled_and_resized():
    x = torch.arange(6.0, device=DEVICE)
    out = torch.empty(6, device=DEVICE)
    address = out.data_ptr()
    assert torch.add(x, 1, out=out) is out
    assert out.data_ptr() == address and out.tolist() == [1, 2, 3, 4, 5, 6]
    empty = torch.empty(0, device=DEVICE)
    assert torch.cumsum(x, 0, out=empty) is empty
    assert empty.tolist() == [0, 1, 3, 6, 10, 15]
    values, order = torch.empty(0, device=DEVICE), torch.empty(0, dtype=torch.long, device=DEVICE)
    torch.sort(x, descending=True, out=(values, order))
    assert values.tolist() == [5, 4, 3, 2, 1, 0] and order.tolist() == [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("part", [slice(2, 3), slice(6, 6), slice(1, 8, 3)], ids=str)
def test_out_that_shares_memory_may_be_resized(part):
    def call(device):
        whole = torch.arange(8.0, device=device)
        out = whole[part]
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            torch.cumsum(torch.ones(9, device=device), 0, out=out)
        return whole.tolist(), out.tolist(), out.storage_offset(), whole.untyped_storage().nbytes()

    assert call(DEVICE) == call("cpu")


def test_out_may_be_resized_by_the_kernel_itself():
    # nonzero's shape is known only to the kernel, which then resizes what it was given.
    x = torch.tensor([1, 0, 1] * 1000, device=DEVICE)
    out = torch.empty(0, dtype=torch.long, device=DEVICE)
    shared = torch.empty(0, dtype=torch.long, device=DEVICE).set_(out)
    assert torch.nonzero(x, out=out) is out
    assert out.shape == (2000, 1) and out[:2].flatten().tolist() == [0, 2]
    assert shared.untyped_storage().size() == out.untyped_storage().size()
    with pytest.warns(UserWarning, match="resized"):
        torch.nonzero(x[:2], out=out)
    assert out.tolist() == [[0]]


def test_foreach_operators_change_lists_of_tensors():
    xs = [torch.ones(3, device=DEVICE) for _ in range(40)]
    torch._foreach_add_(xs, 1)
    ys = torch._foreach_mul(xs, [torch.tensor(3.0, device=DEVICE)] * 40)
    assert all(x.tolist() == [2.0] * 3 for x in xs)
    assert all(y.tolist() == [6.0] * 3 for y in ys)


def test_conj_bit_of_a_fresh_result_is_kept():
    x = torch.randn(4, dtype=torch.complex64)
    same(torch.vdot, x, x.flip(0))
    same(torch.conj, x)
    matrix = torch.randn(3, 3, dtype=torch.complex64)
    same(lambda a: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), a, adjoint=True), matrix)
    same(torch.fft.ihfft, torch.randn(8))


# ---- Devices ----


def test_operands_on_the_cpu_and_the_device_are_both_named():
    x = torch.ones(3, device=DEVICE)
    for function in (torch.add, torch.dot, torch.minimum):
        for pair in ((x, torch.ones(3)), (torch.ones(3), x)):
            with pytest.raises(
                RuntimeError, match=r"two devices, .*(openreg:0.*cpu|cpu.*openreg:0)"
            ):
                function(*pair)
    with pytest.raises(RuntimeError, match="openreg:0 and cpu"):
        torch.cat([x, torch.ones(3)])
    with pytest.raises(RuntimeError, match=r"(openreg:0 and cpu|cpu and openreg:0)"):
        torch.tensor(1.0).add_(x[0])


@two_devices
def test_operands_on_two_devices_are_both_named():
    x, y = torch.ones(3, device=DEVICE), torch.ones(3, device=OTHER)
    for function in (torch.add, torch.dot):
        with pytest.raises(RuntimeError, match="openreg:0 and openreg:1"):
            function(x, y)
    with pytest.raises(RuntimeError, match="openreg:0"):
        torch.add(x, torch.tensor(1.0, device=OTHER))


def test_cpu_scalars_mix_with_device_tensors():
    x = torch.ones(3, device=DEVICE)
    assert (x + torch.tensor(2.0)).tolist() == [3, 3, 3]
    assert torch.where(x > 0, torch.tensor(5.0), x).tolist() == [5, 5, 5]
    assert (torch.tensor(2.0) * x).device == x.device
    assert x[torch.tensor([0, 1])].tolist() == [1, 1]


@two_devices
def test_operator_runs_on_its_tensors_device():
    x = torch.ones(3, device=OTHER)
    assert x.sort()[0].device == x.device
    assert (x + 1).device == x.device
    assert torch.accelerator.current_device_index() == 0


def test_streams_order_operators(eventually):
    side = torch.Stream(DEVICE)
    x = torch.zeros(4, device=DEVICE)
    torch.accelerator.synchronize()
    values, nonzero = [], []

    def work():
        with side:
            x.add_(1)  # queued
            values.append(x * 2)  # so is this
            nonzero.append(x.nonzero())  # its size is known when it has run

    with torch.openreg.testing.gate() as gate:
        gate.wait(side)
        thread = threading.Thread(target=work)
        thread.start()
        eventually(lambda: values)
        # The default stream does not wait for the side stream, nor does this thread for the other.
        assert x.tolist() == [0] * 4
        assert not side.query() and not nonzero
    thread.join()
    side.synchronize()
    assert x.tolist() == [1] * 4
    assert values[0].tolist() == [2] * 4 and len(nonzero[0]) == 4


# ---- Errors and warnings ----


def test_exceptions_keep_their_type():
    x = torch.ones(3, 3, device=DEVICE)
    with pytest.raises(IndexError):
        x.sum(dim=7)
    with pytest.raises(IndexError):
        x[torch.tensor([5], device=DEVICE)].tolist()
    with pytest.raises(torch.linalg.LinAlgError):
        torch.linalg.inv(torch.zeros(2, 2, device=DEVICE))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        x @ torch.ones(2, 2, device=DEVICE)
    assert x.sum().item() == 9


def test_operator_without_any_kernel_is_named():
    x = torch.ones(3, 3, device=DEVICE)
    with pytest.raises(NotImplementedError, match="_cslt_compress on openreg"):
        torch.ops.aten._cslt_compress(x)


def test_python_cpu_only_kernel_is_refused_until_the_device_has_one():
    library = torch.library.Library("openreg_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    x = torch.ones(3, device=DEVICE)
    with pytest.raises(NotImplementedError, match="openreg_test::twice on openreg"):
        torch.ops.openreg_test.twice(x)
    library.impl("twice", lambda x: x + x, "PrivateUse1")
    assert torch.ops.openreg_test.twice(x).tolist() == [2.0] * 3


def test_warnings_reach_the_caller():
    x = torch.ones(3, device=DEVICE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.add(x, x, out=torch.ones(2, device=DEVICE))
    assert any("resized" in str(w.message) for w in caught)


# ---- Random numbers ----


def test_random_numbers_repeat_after_a_seed():
    torch.manual_seed(7)
    first = torch.randn(5, device=DEVICE), F.dropout(torch.ones(64, device=DEVICE))
    torch.manual_seed(7)
    again = torch.randn(5, device=DEVICE), F.dropout(torch.ones(64, device=DEVICE))
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(first, again, strict=True))
    assert not torch.equal(torch.randn(5, device=DEVICE).cpu(), first[0].cpu())


def test_cpu_generator_is_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    torch.randn(9, device=DEVICE)
    F.dropout(torch.ones(9, device=DEVICE))
    torch.bernoulli(torch.full((9,), 0.5, device=DEVICE))
    assert torch.equal(torch.rand(3), expected)


def test_generator_repeats_after_a_seed():
    generator = torch.Generator(DEVICE).manual_seed(5)
    first = torch.rand(4, device=DEVICE, generator=generator)
    assert not torch.equal(torch.rand(4, device=DEVICE, generator=generator).cpu(), first.cpu())
    generator.manual_seed(5)
    assert torch.equal(torch.rand(4, device=DEVICE, generator=generator).cpu(), first.cpu())
    with pytest.raises(RuntimeError, match="'openreg' device type for generator but found 'cpu'"):
        torch.ones(2, device=DEVICE).normal_(generator=torch.Generator())


@two_devices
def test_generator_of_another_device_is_refused():
    with pytest.raises(RuntimeError, match=r"openreg:0.*openreg:1"):
        torch.ones(2, device=DEVICE).normal_(generator=torch.Generator(OTHER))


# ---- Autograd ----


def test_autocast_casts_products_and_keeps_sums():
    x, y = torch.rand(3, 3, device=DEVICE), torch.rand(3, 3, device=DEVICE)
    with torch.autocast("openreg", dtype=torch.bfloat16):
        assert (x @ y).dtype == torch.bfloat16
        assert (x @ y).softmax(0).dtype == torch.float32
        assert (x + y).dtype == torch.float32
        assert torch.rand(3, device=DEVICE).dtype == torch.float32
        with pytest.raises(RuntimeError, match="binary_cross_entropy"):
            F.binary_cross_entropy(x, y)
    assert (x @ y).dtype == torch.float32


def test_zero_gradients_without_memory_are_usable():
    x = torch.randn(4, device=DEVICE, requires_grad=True)
    torch.sgn(x).sum().backward()
    assert x.grad.tolist() == [0.0] * 4
    zeros = torch._efficientzerotensor(3, device=DEVICE)
    assert (torch.ones(3, device=DEVICE) + zeros).tolist() == [1.0] * 3
    assert zeros.cpu().tolist() == [0.0] * 3
    assert zeros.sort()[0].tolist() == [0.0] * 3


def test_backward_runs_on_the_forward_stream():
    side = torch.Stream(DEVICE)
    with side:
        x = torch.ones(4, device=DEVICE, requires_grad=True)
        y = (x * 3).sum()
    y.backward()
    side.synchronize()
    assert x.grad.tolist() == [3.0] * 4


def test_wide_lane_alone_uses_several_threads(run_ok):
    # OpenMP's workers carry the name of the lane that started them, and lane 0 is the wide one. A
    # new lane has its parent's name for a moment.
    out = run_ok(
        """
        import threads
        import time
        import torch

        x = torch.rand(512, 512, device="openreg")
        x.exp(), x.mm(x), x.sum()
        torch.openreg.synchronize()
        with torch.openreg.testing.gate() as gate:
            for _ in range(6):
                with torch.Stream("openreg") as stream:
                    gate.wait(stream)
                    for _ in range(30):
                        x.exp(), x.mm(x), x.sum()
        torch.openreg.synchronize()

        def teams():
            names = [name for name in threads.names() if name.startswith("openreg-")]
            return len(set(names)), {name for name in names if names.count(name) > 1}

        limit = time.monotonic() + 20
        while not teams()[1] <= {"openreg-0"} and time.monotonic() < limit:
            time.sleep(0.01)
        print(*teams())
        """
    )
    lanes, team = out.split(maxsplit=1)
    assert int(lanes) >= 2
    assert team.strip() in ("set()", "{'openreg-0'}")


def test_fallback_stats_tell_which_way_an_operator_went():
    x = torch.ones(100, device=DEVICE)
    torch.openreg.synchronize()
    torch.openreg.fallback_stats(reset=True)
    for _ in range(3):
        torch.add(x, 1, out=x)
    torch.openreg.synchronize()
    assert x.nonzero().shape == (100, 1)
    stats = torch.openreg.fallback_stats()
    ways = {
        name: {way: figures["count"] for way, figures in stats[f"aten::{name}"].items()}
        for name in ("add.out", "nonzero")
    }
    assert ways["add.out"] == {"asynchronous": 3, "waited": 0, "copying": 0}
    assert ways["nonzero"] == {"asynchronous": 0, "waited": 1, "copying": 0}
    assert all(
        (figures["seconds"] > 0) == (figures["count"] > 0)
        for ways in stats.values()
        for figures in ways.values()
    )
    assert torch.openreg.fallback_stats(reset=True) == stats
    assert torch.openreg.fallback_stats() == {}


def test_fallback_stats_count_queued_calls_when_they_have_run():
    x = torch.ones(100, device=DEVICE)
    torch.add(x, 1, out=x)
    torch.openreg.synchronize()
    torch.openreg.fallback_stats(reset=True)
    with torch.openreg.testing.gate() as gate:
        gate.wait()
        torch.add(x, 1, out=x)
        assert torch.openreg.fallback_stats() == {}
    torch.openreg.synchronize()
    assert torch.openreg.fallback_stats()["aten::add.out"]["asynchronous"]["count"] == 1


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_histc_takes_integers_as_cudas_does(dtype):
    x = torch.tensor([1, 2, 2, 3, 5, 9, 30]).to(dtype)
    for bounds in ((), (2, 9), (0, 7), (2.9, 9.9), (2, 2)):
        expected = torch.histc(x.double(), 7, *(int(b) for b in bounds)).to(dtype)
        for _ in range(2):
            got = torch.histc(x.to(DEVICE), 7, *bounds)
            assert got.dtype == dtype and torch.equal(got.cpu(), expected)
        out = torch.empty(0, dtype=dtype, device=DEVICE)
        assert torch.histc(x.to(DEVICE), 7, *bounds, out=out) is out
        assert torch.equal(out.cpu(), expected)


def test_histc_without_bounds_reads_those_of_the_data():
    for x in (torch.rand(100), torch.full((3,), 2.0), torch.empty(0)):
        for bounds in ((), (2, 2), (0.25, 0.5)):
            for _ in range(2):
                same(lambda t, b=bounds: torch.histc(t, 5, *b), x)


def test_memory_that_a_call_on_copies_overwrites_is_not_read(run_ok, plugins):
    program = """
        import warnings
        import torch

        warnings.simplefilter("ignore")
        torch.openreg.sanitizer.enable("warn", initcheck=True)
        x, out = torch.zeros(3, device="openreg"), torch.empty(3, device="openreg")
        made = torch.full((2,), 2.0, device="openreg"), torch.rand(3, device="openreg")
        torch.clamp(x, 1, 2, out=out)
        torch.add(out, x, out=out)
        out[0].fill_(out[0])
        print(out.tolist(), x.bernoulli_(x).fill_(x[1]).tolist())
        x, saved = torch.ones(2, 3, device="openreg"), [torch.full((3,), 5.0, device="openreg")] * 2
        outs = [torch.empty_like(x), *saved]
        torch.ops.aten.native_batch_norm.out(
            x, None, None, saved[0], saved[0], False, 0.1, 1e-5,
            out=outs[0], save_mean=saved[0].clone(), save_invstd=outs[1],
        )
        print(outs[1].tolist())
        print([report.kind for report in torch.openreg.sanitizer.reports()])
        partly = torch.empty(2, 3, device="openreg")
        partly[:, :1].expand(2, 2).fill_(3)
        partly[0, 1:].add_(1)
        print([report.kind for report in torch.openreg.sanitizer.reports()])
    """
    out = run_ok(program, {"OPENREG_PLUGIN": str(plugins / "libvendor_nomap.so")})
    assert out.splitlines() == [
        "[1.0, 1.0, 1.0] [0.0, 0.0, 0.0]",
        "[5.0, 5.0, 5.0]",
        "[]",
        "['uninitialized']",
    ]


def test_kernel_on_copies_is_a_task_of_the_stream(run_ok, plugins):
    program = """
        import warnings
        import torch
        from torch.profiler import ProfilerActivity, profile

        warnings.simplefilter("ignore")
        x = torch.arange(4.0, device="openreg")
        with torch.openreg.testing.inject("kernel_error"):
            try:
                x.nonzero()
            except RuntimeError as error:
                print(str(error).partition("\\n")[0])
        with profile(activities=[ProfilerActivity.PrivateUse1]) as p:
            x.mul_(2)
        print([row.name for row in p.events() if "aten" in row.name or "Memcpy " in row.name])
        twice = torch.zeros(3, device="openreg")[1:2].expand(2)  # whose elements share memory
        twice.index_fill_(0, torch.tensor([1], device="openreg"), 7)
        print(twice.tolist(), twice._base.tolist())
    """
    out = run_ok(program, {"OPENREG_PLUGIN": str(plugins / "libvendor_nomap.so")})
    assert out.splitlines() == [
        'orErrorLaunchFailure: nonzero on openreg:0 failed: injected fault "kernel_error"',
        "['Memcpy DtoH', 'aten::mul_', 'Memcpy HtoD']",
        "[7.0, 7.0] [0.0, 7.0, 0.0]",
    ]
