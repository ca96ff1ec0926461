"""torch.compile: what Dynamo asks of the device, and Inductor's kernels as tasks of a stream."""

import inspect
import re
import warnings

import forks
import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.openreg import testing

from torch_openreg import _C

DEVICE = "openreg"


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def own_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def net():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
    )


def step(model, x, device):
    """The loss and gradients of a compiled step, on the CPU."""
    loss = torch.compile(model)(x.to(device)).square().mean()
    loss.backward()
    return [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters())]


# ---- Values ----


def test_compiled_step_has_the_values_of_native_compile():
    torch.manual_seed(0)
    here, x = net(), torch.randn(2, 3, 8, 8)
    there = net().to(DEVICE)
    there.load_state_dict(here.state_dict())
    for ours, native in zip(step(there, x, DEVICE), step(here, x, "cpu"), strict=True):
        torch.testing.assert_close(ours, native)


@pytest.mark.slow
@pytest.mark.parametrize("weights", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("inputs", [torch.channels_last, torch.contiguous_format])
def test_compiled_convolutions_keep_the_layout_of_eager(inputs, weights):
    layer = nn.Conv2d(8, 16, 3).to(DEVICE).to(memory_format=weights)
    x = torch.randn(2, 8, 12, 16, device=DEVICE).to(memory_format=inputs)
    made = torch.compile(lambda x: layer(x) * 2)(x)
    assert made.stride() == (layer(x) * 2).stride()


def test_nonzero_static_has_the_layout_of_eager():
    x = torch.tensor([[1, 0, 2], [0, 3, 4]], device=DEVICE)
    expected = torch.nonzero_static(x, size=5)
    made = torch.compile(lambda x: torch.nonzero_static(x, size=5))(x)
    assert torch.equal(made, expected) and made.stride() == expected.stride()


def test_pixel_shuffle_keeps_channels_last():
    x = torch.randn(2, 36, 3, 5, device=DEVICE).to(memory_format=torch.channels_last)

    def f(x):
        return nn.functional.pixel_shuffle(x, 2).reshape(-1)  # a copy, as it is not contiguous

    assert torch.equal(torch.compile(f, backend="aot_eager")(x), f(x))


@pytest.mark.slow
def test_inductor_is_prepared_by_the_first_compilation(run_ok):
    """From PyTorch 2.15 on, which asks the device for it and for more."""
    run_ok(
        """
        import sys
        import torch
        import torch._inductor.compile_fx
        from torch._dynamo.device_interface import get_interface_for_device
        newest, ours = torch.__version__ >= "2.15", "torch_openreg._compile.inductor"
        assert (ours in sys.modules) != newest
        from torch._inductor.utils import run_and_get_code
        torch.set_num_threads(2)
        x, huge = torch.ones(1 << 20, device="openreg"), {"openreg.min_chunk_factor": 1 << 40}
        for options in ({}, huge) if newest else ({},):
            torch._dynamo.reset()
            made, code = run_and_get_code(torch.compile(lambda x: x + 1, options=options), x)
            assert made.sum().item() == 2 << 20
            assert ("omp parallel" in code[0]) == (not options)
        assert ours in sys.modules
        interface = get_interface_for_device("openreg")
        if newest:
            assert not interface.is_gpu()  # whose kernels are Triton's
            assert interface.exposes_streams()
            count = torch.openreg.get_device_properties().multi_processor_count
            assert interface.get_multi_processor_count() == count
        """
    )


@pytest.mark.slow
def test_dynamic_sizes_with_numbers_and_cpu_scalars_are_right():
    f = torch.compile(lambda x, n, s: (x * n + s).sum(0), dynamic=True)
    for size, n in ((2, 3), (5, 4), (9, 0.5)):
        x = torch.arange(size * 3.0).view(size, 3)
        made = f(x.to(DEVICE), n, torch.tensor(2.0))
        torch.testing.assert_close(made.cpu(), (x * n + 2).sum(0))


def test_scalar_of_the_cpu_may_stand_first():
    def f(s, x):
        return s - x, torch.where(s > 1, x, s), *torch._foreach_mul([s, x], [x, s])

    scalar, x, f = torch.tensor(2.0), torch.arange(5.0, device=DEVICE), torch.compile(f)
    f(scalar, x)
    with testing.gate() as gate:
        gate.wait(torch.openreg.current_stream())
        made = f(scalar, x)  # does not wait for the device
        scalar.fill_(9)  # the call has read it
    expected = [[2, 1, 0, -1, -2], [0, 1, 2, 3, 4], [0, 2, 4, 6, 8], [0, 2, 4, 6, 8]]
    assert [t.tolist() for t in made] == expected
    assert {t.device for t in made} == {x.device}


@torch.library.custom_op("openreg_test::current_device", mutates_args=())
def _current_device(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, torch.openreg.current_device())


@_current_device.register_fake
def _(x):
    return torch.empty_like(x)


def test_operator_of_a_program_is_called_with_its_device_current():
    def f(x, y):
        with torch.openreg.device(1):
            return _current_device(x + 1), _current_device(y + 1)

    made = torch.compile(f)(torch.ones(2, device="openreg:1"), torch.ones(2, device="openreg:0"))
    assert [t.tolist() for t in made] == [[1, 1], [0, 0]]
    assert torch.openreg.current_device() == 0


def test_argmax_counts_in_the_logical_order_of_the_tensor():
    x = torch.tensor([[1.0, 5, 2], [5, 0, 5]], device=DEVICE).t()
    made = torch.compile(lambda x: (x.argmax(), x.argmin()))(x)
    assert [i.item() for i in made] == [1, 3]


def test_quotient_is_not_compiled_to_a_product():
    x = torch.arange(1.0, 2000, device=DEVICE)
    made = torch.compile(lambda x: torch.floor(x / 41.0))(x * 41)
    assert torch.equal(made, x)


@pytest.mark.slow
def test_dynamic_output_shape_compiles_in_one_graph():
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        f = torch.compile(lambda x: x[x > 0] * 2, fullgraph=True)
        assert f(torch.tensor([1.0, -1, 3], device=DEVICE)).tolist() == [2, 6]


@pytest.mark.slow
def test_control_flow_takes_the_branch_of_the_data():
    f = torch.compile(lambda x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)))
    assert f(torch.ones(3, device=DEVICE)).tolist() == [2, 2, 2]
    assert f(-torch.ones(3, device=DEVICE)).tolist() == [-2, -2, -2]


@pytest.mark.slow
def test_compiled_random_numbers_are_the_generators():
    f = torch.compile(lambda x: nn.functional.dropout(x, 0.5))
    x = torch.ones(100, device=DEVICE)
    torch.manual_seed(3)
    first, second = f(x).tolist(), f(x).tolist()
    torch.manual_seed(3)
    assert f(x).tolist() == first != second
    with torch._inductor.config.patch(fallback_random=True):
        torch._dynamo.reset()
        torch.manual_seed(3)
        made = f(x)
    torch.manual_seed(3)
    assert torch.equal(made, nn.functional.dropout(x, 0.5))


def _dropping(x):
    return nn.functional.dropout(nn.functional.dropout(x.abs(), 0.2).abs(), 0.2)


def _checkpointed(x):
    """Where it is given ones, its gradient is what it returns."""
    for _ in range(2):
        x = torch.utils.checkpoint.checkpoint(_dropping, x, use_reentrant=False)
    return x


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_compiled_checkpoint_draws_the_same_numbers_again(backend):
    mode = {"mode": "reduce-overhead"} if backend == "inductor" else {}
    f = torch.compile(_checkpointed, backend=backend, **mode)
    seen = set()
    for _ in range(5):
        inputs = [torch.ones(1000, device=DEVICE, requires_grad=True) for _ in range(2)]
        made = [f(x) for x in inputs]
        for x, y in zip(reversed(inputs), reversed(made), strict=True):
            y.sum().backward()
            assert torch.equal(x.grad, y)
        seen |= {tuple(y.tolist()) for y in made}
    assert len(seen) == 10


@pytest.mark.parametrize("device", ["openreg", torch.device("openreg:1")], ids=str)
def test_recorded_graph_saves_and_restores_generator_states(device):
    """What a checkpoint is made of, as make_fx records it: by the name of a device, too."""
    from torch._inductor import compile_fx  # noqa: F401 (brings ours)
    from torch._prims import rng_prims
    from torch.fx.experimental.proxy_tensor import make_fx

    given = torch.ops.aten.rand.default, [1000]

    def draw_again():
        state, first = rng_prims.run_and_save_rng_state(*given, device=device)
        return first, rng_prims.run_with_rng_state(state, *given, device=device)

    graph = make_fx(draw_again)()
    torch.manual_seed(5)
    first, again = graph()
    torch.manual_seed(5)
    assert first.equal(again) and first.equal(torch.rand(1000, device=device))


@pytest.mark.slow
@pytest.mark.parametrize("device", ["openreg:0", "openreg:1"])
def test_compiled_checkpoint_draws_eagers_random_numbers(device):
    x = torch.ones(1000, device=device, requires_grad=True)

    def gradient(f):
        torch.manual_seed(3)
        made = f(x)
        return made, *torch.autograd.grad(made.sum(), x)

    with torch._inductor.config.patch(fallback_random=True):
        torch.testing.assert_close(gradient(torch.compile(_checkpointed)), gradient(_checkpointed))


@pytest.mark.slow
def test_compiled_autocast_has_its_dtype():
    layer = nn.Linear(8, 8).to(DEVICE)

    @torch.compile
    def f(x):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            return layer(x)

    assert f(torch.ones(2, 8, device=DEVICE)).dtype is torch.bfloat16


@pytest.mark.slow
def test_combo_kernels_are_left_to_triton():
    def f(a, b):
        return a.sin() + 1, b.cos() * 2

    a, b = torch.randn(100, device=DEVICE), torch.randn(200, device=DEVICE)
    with torch._inductor.config.patch(combo_kernels=True, benchmark_combo_kernel=True):
        for made, right in zip(torch.compile(f)(a, b), f(a, b), strict=True):
            torch.testing.assert_close(made, right)


def test_max_autotune_takes_pytorchs_kernels():
    f = torch.compile(lambda a, b: (a @ b).relu(), mode="max-autotune")
    a, b = torch.randn(4, 32, 64, device=DEVICE), torch.randn(4, 64, 32, device=DEVICE)
    a.requires_grad_()
    torch.testing.assert_close(f(a, b), (a @ b).relu())
    made, expected = (torch.autograd.grad(y.sum(), a) for y in (f(a, b), (a @ b).relu()))
    torch.testing.assert_close(made, expected)


@pytest.mark.slow
def test_flex_attention_is_scaled_dot_product_attention():
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 2, 64, 16, device=DEVICE)
    f = torch.compile(flex_attention)
    torch.testing.assert_close(f(q, q, q), nn.functional.scaled_dot_product_attention(q, q, q))
    # The template has no backward: the operators that it is made of have.
    q.requires_grad_()
    expected = torch.autograd.grad(nn.functional.scaled_dot_product_attention(q, q, q).sum(), q)
    torch.testing.assert_close(torch.autograd.grad(f(q, q, q).sum(), q), expected)
    torch._dynamo.reset()  # where it has given up once, it asks no more
    with pytest.raises(RuntimeError, match="does not support backward on openreg devices"):
        torch.compile(flex_attention, fullgraph=True)(q, q, q)


@pytest.mark.parametrize("compiled", [False, True])
def test_higher_order_operators_work_under_autocast(compiled):
    from torch.nn.attention.flex_attention import flex_attention

    def branches(x):
        return torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: x @ -x, (x,))

    attention = flex_attention
    if compiled:
        branches, attention = torch.compile(branches), torch.compile(attention)
    q, x = torch.randn(1, 2, 64, 16, device=DEVICE), torch.ones(4, 4, device=DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        with torch.autocast("openreg", torch.bfloat16):
            y, z = attention(q, q, q), branches(x)
    assert y.dtype == z.dtype == torch.bfloat16
    half = q.bfloat16()
    expected = nn.functional.scaled_dot_product_attention(half, half, half)
    torch.testing.assert_close(y, expected, atol=2e-2, rtol=2e-2)
    assert z.tolist() == [[4] * 4] * 4


@pytest.mark.slow
def test_flex_attention_works_without_a_compiler(run_ok):
    run_ok(
        """
        import torch, warnings
        from torch.nn.attention.flex_attention import flex_attention
        warnings.simplefilter("ignore")  # that it is not compiled
        q = torch.randn(1, 2, 64, 16, device="openreg", requires_grad=True)
        a, b = flex_attention(q, q, q), torch.nn.functional.scaled_dot_product_attention(q, q, q)
        torch.testing.assert_close(a, b)
        made, expected = (torch.autograd.grad(y.sum(), q) for y in (a, b))
        torch.testing.assert_close(made, expected)
        """
    )


@pytest.mark.slow
def test_compile_works_without_compile_processes(monkeypatch):
    from torch._inductor import codecache

    monkeypatch.setattr(codecache, "LOCK_TIMEOUT", 5)  # seconds for who waits for itself
    x = torch.ones(3, device=DEVICE)
    with torch._inductor.config.patch(compile_threads=1), fresh_cache():
        assert torch.compile(lambda x: x * 2 + 1)(x).tolist() == [3, 3, 3]


# ---- Devices, streams, events ----


@pytest.mark.parametrize(
    ("device", "chunks", "divided"), [("cpu", 1, True), (DEVICE, 3, False), (DEVICE, 4, True)]
)
def test_kernel_threads_have_four_times_the_work_of_the_cpus(device, chunks, divided, own_threads):
    x = torch.ones(2 * chunks * torch._inductor.config.cpp.min_chunk_size, device=device)
    torch.set_num_threads(2)
    _, (code,) = run_and_get_code(torch.compile(lambda t: t.sin() + 1), x)
    assert ("#pragma omp parallel" in code) == divided


@pytest.mark.slow
def test_kernel_cache_is_kept_by_thread_count(own_threads):
    """What Inductor keeps is found by the number of threads that it was made for."""
    x = torch.ones(1 << 14, device=DEVICE)
    codes = []
    with fresh_cache():
        for count in (1, 2, 1):
            torch._dynamo.reset()
            torch.set_num_threads(count)
            codes += run_and_get_code(torch.compile(lambda t: t.sin().sum()), x)[1]
    assert ["#pragma omp parallel" in code for code in codes] == [False, True, False]


@pytest.mark.slow
def test_kernel_has_no_more_threads_than_it_was_made_for(run_ok):
    """A backward that is compiled with fewer threads than autograd's thread of the device has. For
    as many as there are cores, Inductor leaves the number of threads to OpenMP."""
    run_ok(
        """
        import os, torch
        torch.set_num_threads(os.cpu_count() + 4)
        w = torch.randn(300, 700, device="openreg", requires_grad=True)
        (w * 2).sum().backward()  # begins that thread
        torch.set_num_threads(os.cpu_count())
        x = torch.randn(300, 700, device="openreg")
        b = torch.tensor(0.5, device="openreg", requires_grad=True)
        f = lambda x, b: (x * b).sin().sum()
        torch.compile(f, dynamic=True)(x, b).backward()
        compiled, b.grad = b.grad, None
        f(x, b).backward()
        torch.testing.assert_close(compiled, b.grad)
        """
    )


def test_kernel_is_queued_and_its_caller_goes_on():
    gate = testing.gate()
    f = torch.compile(lambda x: x * 2 + 1)
    x = torch.ones(1000, device=DEVICE)
    f(x)
    gate.wait(torch.openreg.current_stream())
    made = f(x)
    assert not torch.openreg.current_stream().query()
    gate.open()
    assert made.tolist() == [3] * 1000


@pytest.mark.slow
def test_streams_and_events_compile_in_one_graph():
    @torch.compile(fullgraph=True)
    def f(x):
        side, done = torch.openreg.Stream(), torch.Event(device=DEVICE)
        side.wait_stream(torch.openreg.current_stream())
        with torch.openreg.stream(side):
            y = x * 2 + 1
            done.record(side)
        torch.accelerator.current_stream().wait_event(done)
        return y.sin()

    x = torch.randn(1000, device=DEVICE)
    torch.testing.assert_close(f(x), (x * 2 + 1).sin())


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_training_on_a_side_stream_compiles(backend):
    forks.check_training(backend, DEVICE)


@pytest.mark.slow
def test_training_on_a_side_stream_compiles_by_cudas_name(run_ok):
    run_ok(
        """
        import torch_openreg
        torch_openreg.as_cuda()
        import forks
        for backend in "aot_eager", "inductor":
            forks.check_training(backend, "cuda")
        """
    )


@pytest.mark.slow
def test_backward_pass_is_joined_with_the_callers_stream():
    side = torch.openreg.Stream()

    @torch.compile(fullgraph=True)
    def f(x):
        with side:
            return x.sin()

    def total():
        torch.openreg.synchronize()
        made = f(x)
        torch.openreg.synchronize()
        return made.sum()

    x = torch.ones(4, device=DEVICE, requires_grad=True)
    total().backward()
    made = total()
    with testing.gate() as gate:
        gate.wait(side)
        made.backward()
        assert not torch.openreg.current_stream().query()
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())


def test_kernel_is_queued_on_its_stream():
    side = torch.openreg.Stream()

    @torch.compile(fullgraph=True)
    def f(x):
        with side:
            return x * 2

    x = torch.ones(4, device=DEVICE)
    torch.openreg.synchronize()
    f(x)
    torch.openreg.synchronize()
    x.fill_(3)
    torch.openreg.synchronize()
    with testing.gate() as gate:
        gate.wait(torch.openreg.current_stream())
        made = f(x)
        with side:
            assert made.tolist() == [6] * 4


def test_graph_breaks_where_a_stream_is_current():
    side = torch.openreg.Stream()

    def step(x):
        side.wait_stream(torch.openreg.current_stream())
        with torch.openreg.stream(side):
            y = x * 2
            torch._dynamo.graph_break()
            here = torch.openreg.current_stream() == side
            z = y.cos()
        torch.openreg.current_stream().wait_stream(side)
        return z, here

    x = torch.randn(5, device=DEVICE)
    z, here = torch.compile(step)(x)
    assert here
    assert torch.openreg.current_stream() != side
    torch.testing.assert_close(z, (x * 2).cos())


def test_synchronize_compiles_in_one_graph():
    def f(x):
        y = x * 2
        torch.accelerator.synchronize()
        return y + 1

    x = torch.ones(3, device=DEVICE)
    assert torch.compile(f, fullgraph=True)(x).tolist() == [3.0] * 3


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_optimizer_is_traced_where_pytorchs_is(device):
    torch.openreg.init()
    weight = nn.Parameter(torch.ones(3, device=device))
    optimizer = torch.optim.Adam([weight], lr=0.5)
    weight.grad = torch.ones(3, device=device)
    torch.compile(optimizer.step, backend="eager")()
    assert weight.tolist() == pytest.approx([0.5] * 3, rel=1e-4)
    assert not [why for why in torch._dynamo.utils.counters["graph_break"] if "openreg" in why]


@pytest.mark.slow
def test_devices_compile_in_one_graph():
    @torch.compile(fullgraph=True)
    def f(x):
        with torch.openreg.device(1):
            y = torch.ones(3, device=DEVICE)
        z = (x.to("openreg:1") + y).sin()
        if torch.openreg.is_available() and torch.accelerator.is_available():
            z = z + torch.openreg.device_count() + torch.openreg.current_device()
        return z, z.to("openreg:0") + torch.accelerator.current_device_index()

    there, here = f(torch.zeros(3, device=DEVICE))
    assert (there.device.index, here.device.index) == (1, 0)
    expected = torch.ones(3).sin() + torch.openreg.device_count()
    torch.testing.assert_close(there.cpu(), expected)
    torch.testing.assert_close(here.cpu(), expected)


@pytest.mark.slow
def test_cpu_and_device_tensors_compile_in_one_graph():
    f = torch.compile(lambda x, c: (x * 2 + 1, c * 2 + 1, (c * 2 + 1).to(DEVICE)))
    made = f(torch.ones(3, device=DEVICE), torch.ones(3))
    assert [t.device.type for t in made] == [DEVICE, "cpu", DEVICE]
    assert all(t.tolist() == [3, 3, 3] for t in made)


def test_compiled_function_is_captured_in_a_graph():
    f = torch.compile(lambda x: x * 2 + 1)
    x = torch.ones(100, device=DEVICE)
    f(x)
    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph):
        made = f(x)
    x.fill_(4)
    graph.replay()
    assert made.tolist() == [9] * 100


# ---- Faults ----


@pytest.fixture(params=[1, 2])
def threads(request, own_threads):
    torch.set_num_threads(request.param)


def test_index_out_of_range_is_the_devices_error(threads):
    f = torch.compile(lambda table, i: table[i] * 2)
    table = torch.randn(10000, 64, device=DEVICE)
    i = torch.randint(0, 10000, (5000,), device=DEVICE)
    right = f(table, i)
    wrong = i.clone()
    wrong[77] = 123456
    f(table, wrong)  # nothing is known of it yet
    with pytest.raises(RuntimeError, match=r"index out of bounds: 0 <= \w+ < 10000"):
        torch.openreg.synchronize()
    assert torch.equal(f(table, i), right)


def test_kernel_with_a_long_name_raises_its_own_error():
    def long(table, i):
        y = table[i].sin().cos().exp().tanh().sigmoid().sqrt().floor().ceil().erf().rsqrt()
        return y.abs().reciprocal().atan().asinh().acosh().log1p().expm1().square().round()

    torch.compile(long)(torch.ones(8, device=DEVICE), torch.tensor([1, 99], device=DEVICE))
    with pytest.raises(RuntimeError, match=r"raised\s+by\s+cpp_fused_\w{80,}\s+on\s"):
        torch.openreg.synchronize()


SHARED_OUT = """extern "C" void kernel(int64_t* out)
{
    #pragma omp parallel
    {
        #pragma omp for collapse(2)
        for(int64_t x0=0; x0<3; x0+=1)
        {
            for(int64_t x1=0; x1<300; x1+=1)
            {
                TORCH_CHECK(nested);
            }
        }
        #pragma omp single
        {
            TORCH_CHECK(alone);
        }
    }
}
"""


def test_kernel_checks_are_caught_in_collapsed_loops_and_single_blocks():
    from torch._inductor import compile_fx  # noqa: F401

    from torch_openreg._compile.kernels import catch_in_parallel

    made = catch_in_parallel(SHARED_OUT)
    assert re.search(r"collapse\(2\)\n.*\n\s*\{\s*for\(int64_t x1[^\n]*\s*\{ try \{", made)
    assert re.search(r"single\n\s*\{ try \{\s*TORCH_CHECK\(alone", made)
    assert made.count("catch (...)") == 2


@pytest.mark.slow
def test_device_without_map_computes_on_copies(run_ok, plugins):
    run_ok(
        """
        import torch

        x = torch.randn(64, 32, device="openreg")
        model = torch.nn.Sequential(torch.nn.Linear(32, 8), torch.nn.Tanh()).to("openreg")
        expected = torch.autograd.grad(model(x).square().sum(), model.parameters())
        made = torch.autograd.grad(torch.compile(model)(x).square().sum(), model.parameters())
        torch.testing.assert_close(made, expected)

        def shift(x):  # reads and writes one storage, from two offsets
            x[8:] += x[:8].sum()
            return x.mean(0)

        y = x.clone()
        expected = shift(y)
        torch.testing.assert_close((torch.compile(shift)(x), x), (expected, y))
        """,
        {"OPENREG_PLUGIN": str(plugins / "libvendor_nomap.so")},
    )


@pytest.mark.slow
def test_copies_leave_alone_what_another_stream_writes(run_ok, plugins):
    run_ok(
        """
        import threading
        import torch

        def add(x):
            return x.add_(1)

        def run(function, part):
            with torch.openreg.stream(torch.openreg.Stream()):
                for _ in range(300):
                    function(part)
                torch.openreg.current_stream().synchronize()

        compiled = torch.compile(add)
        both = torch.zeros(2, 4096, device="openreg")
        compiled(both[1])
        both.zero_()
        torch.openreg.synchronize()
        halves = zip((add, compiled), both)
        threads = [threading.Thread(target=run, args=each) for each in halves]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert both.unique().tolist() == [300]
        """,
        {"OPENREG_PLUGIN": str(plugins / "libvendor_nomap.so")},
    )


BESIDE = """
#include <torch/csrc/inductor/cpp_prefix.h>
static std::atomic<int> error{0};
extern "C" void begin() { inductor_cpu_integer_div_error_flag = &error; }
extern "C" int end() {
  const bool kept = inductor_cpu_integer_div_error_flag == &error;
  inductor_cpu_integer_div_error_flag = nullptr;
  return kept ? error.load() : -1;
}
"""


def test_divisions_by_zero_of_two_kernels_are_not_mixed_up(threads):
    from torch._inductor.codecache import CppCodeCache

    f = torch.compile(lambda x, y: x // y)
    x = torch.arange(100000, device=DEVICE)
    y = torch.ones_like(x)
    assert torch.equal(f(x, y), x)
    y[77] = 0
    beside = CppCodeCache.load(BESIDE)
    beside.begin()  # as in a kernel of the CPU, which runs meanwhile
    f(x, y)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        torch.openreg.synchronize()
    assert beside.end() == 0


@pytest.mark.racy
def test_missing_wait_report_names_the_kernel_and_the_line():
    f = torch.compile(lambda x: (x * 2 + 1).sin())
    f(torch.randn(1000, device=DEVICE))
    with torch.openreg.sanitizer.enable():
        x = torch.randn(1000, device=DEVICE)
        side = torch.openreg.Stream()
        with (
            torch.openreg.stream(side),
            pytest.raises(torch.openreg.sanitizer.DataRaceError) as found,
        ):
            f(x)
        side.wait_stream(torch.openreg.current_stream())
        with torch.openreg.stream(side):
            f(x)
        torch.openreg.synchronize()
    assert re.search(r"cpp_fused_\w*sin\w* on stream .* reads", found.value.report.details())
    assert "(x * 2 + 1).sin()" in str(found.value) and "test_compile.py" in str(found.value)


@pytest.mark.slow
@pytest.mark.racy
def test_missing_wait_is_shown_by_a_schedule():
    f = torch.compile(lambda x: x * 2 + 1)
    f(torch.ones(10, device=DEVICE))

    def program(ordered):
        x = torch.zeros(10, device=DEVICE)
        side = torch.openreg.Stream()
        torch.openreg.synchronize()
        x.fill_(3)
        if ordered:
            side.wait_stream(torch.openreg.current_stream())
        with torch.openreg.stream(side):
            made = f(x)
        torch.openreg.synchronize()
        return made[0].item()

    assert {r.value for r in testing.explore(lambda: program(False), 12).results} == {1, 7}
    assert testing.explore(lambda: program(True), 12).ok


def test_cpp_wrapper_is_refused_by_name():
    f = torch.compile(lambda x: x * 2 + 1)
    x = torch.ones(3, device=DEVICE)
    with (
        torch._inductor.config.patch(cpp_wrapper=True),
        pytest.raises(
            Exception, match="cpp_wrapper and AOTInductor are not implemented for openreg devices"
        ),
    ):
        f(x)


# ---- The object and its imports ----


def test_kernel_object_refuses_bad_arguments():
    with pytest.raises(ValueError, match="roles of arguments are r, w, b, n and f, got 'rx'"):
        _C._CompiledKernel(1, "k", "rx", 1)
    kernel = _C._CompiledKernel(1, "k", "rn", 1)
    x = torch.ones(2, device=DEVICE)
    with pytest.raises(TypeError, match="k takes 2 arguments, got 1"):
        kernel(x)
    with pytest.raises(TypeError, match="argument 0 has to be a tensor"):
        kernel(1, 1)
    with pytest.raises(TypeError):
        kernel(x, "many")
    two = _C._CompiledKernel(1, "k", "rr", 1)
    with pytest.raises(ValueError, match="where it cannot read a tensor of openreg:1"):
        two(x, x.to("openreg:1"))
    with pytest.raises(ValueError, match="where it cannot read a tensor of cpu"):
        two(x, torch.ones(2))


def test_import_of_the_compiler_waits_for_the_first_compile(run_ok):
    out = run_ok(
        """
        import sys
        import torch
        torch.ones(2, device="openreg").add(1).cpu()
        names = "torch_openreg._compile", "torch._inductor", "torch._dynamo"
        print([m for m in sys.modules if m.startswith(names)])
        """,
        fresh=True,
    )
    assert out.strip() == "[]"


def test_pytorchs_callers_use_the_names_that_are_replaced():
    from torch import _meta_registrations
    from torch._dynamo import trace_rules
    from torch._dynamo.variables.user_defined import UserDefinedClassVariable
    from torch._inductor import (
        compile_fx,  # noqa: F401 (brings ours)
        ir,
        lowering,
        memory,
        scheduler,
    )
    from torch._subclasses import fake_tensor
    from torch.nn.attention import flex_attention
    from torch.utils import _runtime_estimation

    for module, name in (
        (scheduler, "V.graph.additional_buffer_deps[node.get_name()]"),
        (memory, "= get_freeable_input_buf("),
        (_meta_registrations, 'device_hint(input) == "cuda"'),
        (fake_tensor, "func not in meta_table"),
        (_runtime_estimation, "_dram_gbps("),
        (_runtime_estimation, "= get_device_tflops("),
        (scheduler, ".is_cpu()"),
        (scheduler, ".combinable_nodes("),
        (ir, " get_device_type("),
        (lowering, "ir.get_device_type("),
        (lowering, ":= get_constant_value("),
        (lowering, "if is_gpu(i.get_device().type)"),
        (flex_attention, "_validate_device("),
        (flex_attention, "_apply_kernel_options("),
    ):
        assert name in inspect.getsource(module), (module, name)
    assert torch.openreg.Stream in UserDefinedClassVariable._in_graph_classes()
    ours = torch.openreg.current_stream.__code__.co_filename
    assert trace_rules.check_file(ours).skipped
    assert not trace_rules.check_file(ours, is_inlined_call=True).skipped
