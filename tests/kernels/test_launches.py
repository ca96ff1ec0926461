"""Triton's launches on the device: arguments, order, refusals, tuning, graphs, compiled functions.
The operations of kernels are in test_operations.py."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

import torch_openreg  # noqa: E402

torch_openreg.triton()
gate = torch.openreg.testing.gate
DEVICE = "openreg:0"


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x, y = tl.load(x_ptr + offsets, mask=mask), tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + y, mask=mask)


@triton.jit
def increment_kernel(x_ptr, n, by, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) + by, mask=mask)


@triton.jit
def many_kernel(pair, x_desc, out_ptr, none_ptr, flag, scale, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tile = x_desc.load([0]) * scale + tl.load(pair[0] + at) * pair[1]
    if none_ptr is not None:
        tile += 1
    tl.store(out_ptr + at, tl.where(flag, tile, 0))


@triton.jit
def spreading_kernel(x_ptr):
    for i in range(-2, 7):
        tl.store(x_ptr + 3 * i, tl.load(x_ptr + 3 * i) + 100)


@triton.jit
def asserting_kernel(x_ptr):
    tl.device_assert(tl.load(x_ptr) > 0, "not positive")
    tl.store(x_ptr, 1.0)


def add(x, y):
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 64),)](x, y, out, x.numel(), BLOCK=64)
    return out


def numbers(n=300, device=DEVICE):
    return torch.arange(n, dtype=torch.float32, device=device)


def test_launches_run_in_stream_order_and_return_at_once():
    x = numbers()
    side = torch.openreg.Stream()
    with gate() as held:
        held.wait()
        out = add(x.add_(1), x.detach().requires_grad_())
        done = torch.openreg.current_stream().record_event()
        assert not done.query()
        side.wait_event(done)
        with torch.openreg.stream(side):
            increment_kernel[(5, 1)](out, 300, 0.5, BLOCK=64)
            increment_kernel[(0,)](out, 300, 0.5, BLOCK=64)  # an empty grid does nothing
    side.synchronize()
    assert torch.equal(out.cpu(), 2 * (numbers(device="cpu") + 1) + 0.5)


def test_arguments_of_all_kinds_arrive():
    descriptor = triton.tools.tensor_descriptor.TensorDescriptor.from_tensor(numbers(16), [16])
    out, x = torch.empty(16, device=DEVICE), torch.ones(16, device=DEVICE)
    many_kernel[(1,)]((x, 7), descriptor, out, None, True, 0.5, BLOCK=16)
    assert torch.equal(out.cpu(), numbers(16, "cpu") / 2 + 7)
    bits = triton.reinterpret(torch.tensor([1, 2], dtype=torch.int32, device=DEVICE), tl.uint32)
    increment_kernel[(1,)](bits, 2, 2**32 - 2, BLOCK=2)
    assert bits.base.tolist() == [-1, 0]
    pinned = torch.zeros(4).pin_memory()
    increment_kernel[(1,)](pinned[1:], 2, 3.0, BLOCK=2)
    torch.openreg.synchronize()
    assert pinned.tolist() == [0, 3, 3, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_memory_around_an_argument_is_written(dtype):
    x = torch.arange(30, dtype=dtype, device=DEVICE)
    spreading_kernel[(1,)](x[9:12:2])
    expected = torch.arange(30, dtype=dtype)
    expected[3::3] += 100
    assert torch.equal(x.cpu(), expected)


def test_refused_arguments_are_named_and_nothing_is_written():
    x, out = numbers(64), torch.zeros(64, device=DEVICE)
    refused = {
        r"\(at 1\) cannot be accessed from Triton \(cpu tensor": (x, x.cpu(), out),
        "argument 1 is a tensor of openreg:1, and .* on openreg:0": (x, x.to("openreg:1"), out),
    }
    for message, tensors in refused.items():
        with pytest.raises(ValueError, match=message):
            add_kernel[(1,)](*tensors, 64, BLOCK=64)
    with pytest.raises(ValueError, match="size 2 of the grid is 65536, allowed are 0 to 65535"):
        add_kernel[(1, 1, 65536)](x, x, out, 64, BLOCK=64)
    assert out.count_nonzero() == 0
    with torch.openreg.device(1):
        y = x.to("openreg:1")
        assert torch.equal(add(y, y).cpu(), 2 * numbers(64, "cpu"))


def test_autotune_takes_the_first_that_compiles_and_runs_nothing_else(caplog):
    configs = [triton.Config({"BLOCK": block}) for block in (100, 32, 64)]  # 100 is no power of 2

    def no_configuration(kernel, **options):
        return triton.autotune(configs[1:], key=["n"], **options)(kernel)

    x, hooks = torch.zeros(50, device=DEVICE), []
    tuned = no_configuration(increment_kernel, pre_hook=lambda *_, **__: hooks.append(1))
    with caplog.at_level("INFO", "torch_openreg.triton"):
        tuned[lambda meta: (triton.cdiv(50, meta["BLOCK"]),)](x, 50, 1.0)
    assert x.tolist() == [1.0] * 50 and tuned.best_config is configs[1]
    assert "increment_kernel: autotune took BLOCK: 32" in caplog.text
    assert caplog.text.count("autotune took") == 1

    x.fill_(5)
    reset = no_configuration(increment_kernel, reset_to_zero=["x_ptr"])
    reset[(2,)](x, 50, 1.0)
    reset[(2,)](x, 50, 1.0)
    assert x.tolist() == [2.0] * 50


def test_hook_of_a_configuration_runs_before_it_is_compiled():
    descriptor = triton.tools.tensor_descriptor.TensorDescriptor.from_tensor(numbers(16), [8])

    def set_block(arguments):
        arguments["x_desc"].block_shape = [arguments["BLOCK"]]

    configs = [triton.Config({"BLOCK": block}, pre_hook=set_block) for block in (16, 32)]
    tuned = triton.autotune(configs, key=[])(many_kernel)
    out, x = torch.empty(16, device=DEVICE), torch.ones(16, device=DEVICE)
    tuned[(1,)]((x, 7), descriptor, out, None, True, 0.5)
    assert torch.equal(out.cpu(), numbers(16, "cpu") / 2 + 7)


def test_heuristics_hooks_warmup_and_benchmarks_work():
    x, seen = numbers(64), []
    known = triton.heuristics({"BLOCK": lambda args: 64 if args["n"] > 32 else 32})(add_kernel)
    out = torch.empty_like(x)
    hooks = triton.knobs.runtime
    hooks.launch_enter_hook.add(lambda metadata: seen.append(metadata.get()["name"]))
    try:
        known[(1,)](x, x, out, 64)
    finally:
        hooks.launch_enter_hook.calls.clear()
    assert seen == ["add_kernel"] and torch.equal(out.cpu(), 2 * x.cpu())
    kernel = add_kernel.warmup(torch.int64, torch.int64, torch.int64, 64, BLOCK=8, grid=(1,))
    assert "openreg_entry" in kernel.asm["cpp"] and "tt.func" in kernel.asm["ttir"]
    assert triton.testing.do_bench(lambda: add(x, x), warmup=1, rep=1) > 0


def test_launches_are_captured_and_replayed():
    x, graph = numbers(), torch.openreg.Graph()
    with torch.openreg.graph(graph):
        out = add(x, x)
    x.fill_(4)
    graph.replay()
    assert out.unique().tolist() == [8.0]


@triton.jit
def through_table_kernel(table_ptr, out_ptr):
    at = tl.load(table_ptr).to(tl.pointer_type(tl.float32))
    tl.store(at + 1, 5.0)
    tl.store(out_ptr, out_ptr.to(tl.int64))


def test_addresses_in_memory_are_those_of_the_program():
    x, out = torch.zeros(2, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    table = torch.tensor([x.data_ptr()], device=DEVICE)
    through_table_kernel[(1,)](table, out)
    assert x.tolist() == [0, 5] and out.item() == out.data_ptr()
    table.fill_(4096)
    through_table_kernel[(1,)](table, out)
    line = through_table_kernel.def_file_line_number + 1
    with pytest.raises(RuntimeError, match=f"{__file__}:{line}.*is 0x1000, which no kernel"):
        torch.openreg.synchronize()


def test_profiler_and_late_errors_name_the_kernel():
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.PrivateUse1]
    ) as profile:
        add(numbers(), numbers())
        torch.openreg.synchronize()
    assert any("triton::add_kernel" in event.key for event in profile.key_averages())
    asserting_kernel[(1,)](numbers(1), debug=True)
    line = asserting_kernel.def_file_line_number + 1
    with pytest.raises(RuntimeError, match=f"{__file__}:{line}.*not positive") as caught:
        torch.openreg.synchronize()
    text = " ".join(str(caught.value).split())
    assert "raised by triton::asserting_kernel on openreg:0, which was queued here" in text
    assert "asserting_kernel[(1,)](numbers(1), debug=True)" in text and "CUDA" not in text


def doubled(x, y):
    return add(x * 2, y).relu() + 1


@torch.library.triton_op("openreg_test::add", mutates_args={})
def added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    launch = torch.library.wrap_triton(add_kernel)
    launch[(triton.cdiv(x.numel(), 64),)](x, y, out, x.numel(), BLOCK=64)
    return out


def by_operator(x, y):
    return added(x * 2, y).relu() + 1


@triton.jit
def add_described_kernel(x, y, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK
    out.store([at], x.load([at]) + y.load([at]))


def by_descriptors(x, y):
    x = x * 2
    out = torch.empty_like(x)
    described = [TensorDescriptor.from_tensor(tensor, [64]) for tensor in (x, y, out)]
    add_described_kernel[(triton.cdiv(x.numel(), 64),)](*described, BLOCK=64)
    return out.relu() + 1


@pytest.mark.parametrize("function", [doubled, by_operator, by_descriptors])
def test_compiled_functions_launch_kernels(function):
    compiled = torch.compile(function, fullgraph=True)
    for n in (300, 170, 90):  # the last two by one graph, whose size is a symbol
        x = numbers(n)
        assert torch.equal(compiled(x, x).cpu(), 3 * numbers(n, "cpu") + 1)
        assert torch.equal(function(x, x).cpu(), 3 * numbers(n, "cpu") + 1)


def test_compiled_functions_launch_with_the_options_of_the_call():
    @torch.compile(fullgraph=True)
    def checked(x):
        asserting_kernel[(1,)](x, debug=True)
        return x + 1

    checked(numbers(1))
    with pytest.raises(RuntimeError, match="not positive"):
        torch.openreg.synchronize()


AS_CUDA = """
import sys, torch
assert not [name for name in sys.modules if name.startswith("torch_openreg._triton")]
from torch.utils._triton import has_triton
import triton
from triton.runtime import driver
assert has_triton()
assert driver.active.get_current_target().backend == "cuda"
assert driver.active.get_active_torch_device() == torch.device("cuda", 0)
assert driver.active.get_device_interface() is torch.cuda
properties = driver.active.utils.get_device_properties(0)
count = torch.cuda.get_device_properties(0).multi_processor_count
assert properties["multiprocessor_count"] == count and properties["warpSize"] == 32
assert driver.active.get_device_capability() == torch.cuda.get_device_capability()
from torch._inductor.utils import run_and_get_code
x = torch.ones(40, device="cuda")
result, (code,) = run_and_get_code(torch.compile(lambda x: (x + 1).softmax(0)), x)
assert "#include" in code and "@triton" not in code
"""


@pytest.mark.slow
def test_libraries_find_triton_while_inductor_makes_cpp(run_ok):
    run_ok(AS_CUDA, {"OPENREG_AS_CUDA": "1"}, fresh=True)


REFUSED = """
import torch, triton
triton.__version__ = "3.1.0"
import torch_openreg
try:
    torch_openreg.triton()
except RuntimeError as error:
    assert "kernels of Triton 3.8.* and 3.9.*" in str(error), error
    assert "is Triton 3.1.0" in str(error), error
else:
    raise AssertionError("not refused")
"""


@pytest.mark.slow
def test_other_versions_are_refused(run_ok):
    run_ok(REFUSED, fresh=True)


def test_equal_kernels_are_compiled_once(monkeypatch, tmp_path):
    from torch_openreg._triton import library

    compilations = []
    run = library._run_compiler
    monkeypatch.setattr(library, "_run_compiler", lambda *a: compilations.append(a) or run(*a))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x = numbers(8)
    for warps in (1, 2, 4):
        increment_kernel[(1,)](x, 8, 3.0, BLOCK=4, num_warps=warps)
    assert len(compilations) == 1
    increment_kernel.device_caches.clear()  # as in another process
    increment_kernel[(1,)](x, 8, 3.0, BLOCK=4)
    assert len(compilations) == 1
    assert x.cpu()[0] == 12
