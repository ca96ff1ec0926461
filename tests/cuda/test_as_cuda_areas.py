"""Under as_cuda(): what programs do with streams, events, memory, several devices, autocast, random
numbers, optimizers, loading, files and the profiler, in CUDA's words."""

import os
import sys

import pytest

AS_CUDA = "import torch, torch_openreg\ntorch_openreg.as_cuda()\n"
QUIET = "import warnings; warnings.simplefilter('ignore')\n"


@pytest.fixture
def cuda(run_ok):
    def cuda(code, env=None, **options):
        return run_ok(AS_CUDA + code, env, **options)

    return cuda


def test_streams_work_under_cudas_names(cuda):
    cuda("""
default, side = torch.cuda.current_stream(), torch.cuda.Stream()
assert isinstance(default, torch.cuda.Stream) and default == torch.cuda.default_stream() != side
assert default.cuda_stream == 0 != side.cuda_stream and default.query()
assert torch.cuda.ExternalStream(side.cuda_stream) == side
assert torch.cuda.ExternalStream(0) == default
x = torch.ones(1000, device="cuda")
with torch_openreg.openreg.testing.gate() as gate:
    gate.wait(side)
    side.wait_stream(default)
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        y = x * 2
    assert torch.cuda.current_stream() == default and not side.query()
default.wait_stream(side)
y.record_stream(default)
assert y.sum().item() == 2000
other = torch.cuda.Stream(device="cuda:1", priority=-1)
assert other.device == torch.device("cuda:1") and other.priority == -1
with torch.cuda.stream(other):
    assert torch.cuda.current_device() == 1 and torch.ones(1, device="cuda").get_device() == 1
with torch.cuda.stream(None):
    assert torch.cuda.current_stream() == default
torch.cuda.set_stream(side)
assert torch.cuda.current_stream() == side
side.synchronize()
assert "cuda:0" in repr(side)
""")


def test_events_work_under_cudas_names(cuda):
    cuda("""
side, start, end = torch.cuda.Stream(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
with torch_openreg.openreg.testing.gate() as gate:
    gate.wait(side)
    start.record(side)
    end.record(side)
    assert not end.query()
    torch.cuda.current_stream().wait_event(end)
    x = torch.ones(2, device="cuda")
    assert not torch.cuda.current_stream().query()
end.synchronize()
assert end.query() and start.elapsed_time(end) >= 0 and start.cuda_event != end.cuda_event
assert isinstance(side.record_event(), torch.cuda.Event)
shared = torch.cuda.Event(interprocess=True)
shared.record(side)
again = torch.cuda.Event.from_ipc_handle(torch.device("cuda:0"), shared.ipc_handle())
side.synchronize()
assert again.query() and isinstance(again, torch.cuda.Event)
""")


def test_memory_functions_work_under_cudas_names(cuda):
    cuda("""
before = torch.cuda.memory_allocated()
x = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
assert torch.cuda.memory_allocated() - before == 1 << 20 and torch.cuda.memory_allocated(1) == 0
assert torch.cuda.max_memory_allocated("cuda:0") >= 1 << 20
assert torch.cuda.memory_reserved() >= 1 << 20
del x
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == before
free, total = torch.cuda.mem_get_info()
assert 0 < free <= total
for where in ({"device": "cuda"}, {"pin_memory": True}):
    try:
        torch.empty(1 << 50, **where)
    except torch.cuda.OutOfMemoryError as error:
        assert "CUDA out of memory" in str(error)
    else:
        raise AssertionError
torch.cuda.memory._record_memory_history()
y = torch.ones(3, device="cuda")
assert torch.cuda.memory._snapshot()["segments"]
assert torch.cuda.memory.get_allocator_backend() == "native"
torch.cuda.memory._record_memory_history(enabled=None)
assert "memory summary" in torch.cuda.memory_summary() and torch.cuda.memory_cached() > 0
from torch.utils.dlpack import from_dlpack
z = torch.from_dlpack(y)
assert z.device == y.device and z.data_ptr() == y.data_ptr()
side = torch.cuda.Stream()
with torch_openreg.openreg.testing.gate() as gate:
    gate.wait()
    y.add_(1)
    assert side.query()
    y.__dlpack__(stream=side.cuda_stream)  # which waits for what the producer has queued
    assert not side.query()
y.__dlpack__(stream=1)  # CUDA's number for the default stream
""")


@pytest.mark.slow
def test_several_devices_work_under_cudas_names(cuda):
    cuda(
        """
assert torch.cuda.device_count() == 3
x, y = (torch.arange(3.0, device=f"cuda:{i}") for i in (0, 2))
assert (x + y.to("cuda:0")).tolist() == [0, 2, 4]
try:
    x + y
except RuntimeError as error:
    assert "cuda:0" in str(error) and "cuda:2" in str(error)
else:
    raise AssertionError
torch.cuda.set_device("cuda:2")
assert torch.cuda.current_device() == 2 and torch.ones(1, device="cuda").get_device() == 2
with torch.cuda.device(1), torch.cuda.device_of(x):
    assert torch.cuda.current_device() == 0
with torch.cuda.device(x.device):
    torch.cuda.synchronize()
torch.cuda.synchronize("cuda:2")
assert torch.cuda.current_device() == 2 and torch.cuda.can_device_access_peer(0, 1)
from torch.utils.checkpoint import checkpoint
model = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Dropout()).cuda(1)
for reentrant in (False, True):
    inputs = torch.ones(20, 30, device="cuda:1", requires_grad=True)
    outputs = checkpoint(model, inputs, use_reentrant=reentrant)
    outputs.sum().backward()
    assert inputs.grad.get_device() == 1
    assert torch.equal(inputs.grad != 0, outputs != 0), "dropped others in the backward"
""",
        {"OPENREG_DEVICE_COUNT": "3"},
    )


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_autocast_and_scaler_work_under_cudas_names(cuda, dtype):
    cuda(f"""
dtype = torch.{dtype}
torch.manual_seed(0)
a = torch.ones(2, 2, device="cuda")
assert not torch.is_autocast_enabled("cuda") and torch.amp.is_autocast_available("cuda")
with torch.autocast("cuda", dtype=dtype):
    assert torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == dtype
    assert (a @ a).dtype == dtype and torch.softmax(a @ a, 0).dtype == torch.float32
    with torch.autocast("cuda", enabled=False):
        assert (a @ a).dtype == torch.float32
{QUIET}
with torch.cuda.amp.autocast(dtype=dtype):
    assert (a @ a).dtype == dtype

class Double(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x):
        assert not torch.is_autocast_enabled("cuda") and x.dtype == torch.float32
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, gradient):
        return gradient * 2

with torch.autocast("cuda", dtype=dtype):
    x = torch.ones(3, device="cuda", dtype=dtype, requires_grad=True)
    Double.apply(x).sum().backward()
assert x.grad.tolist() == [2, 2, 2]
for scaler in (torch.amp.GradScaler("cuda"), torch.cuda.amp.GradScaler()):
    assert scaler.is_enabled()
    model = torch.nn.Linear(4, 4).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(3):
        with torch.autocast("cuda", dtype=dtype):
            loss = model(torch.randn(2, 4, device="cuda")).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss * (float("inf") if step == 1 else 1)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0 ** 15 and model.weight.isfinite().all()
""")


@pytest.mark.slow
def test_autocast_without_a_device_is_the_devices(cuda):
    """Functions that name none mean CUDA's. The test fails where PyTorch has a new one."""
    cuda(
        QUIET
        + """
a = torch.ones(2, 2, device="cuda")
import re
known = "|".join((
    "(get|set)_autocast_gpu_dtype",  # these and (is|set)_autocast_enabled name no device
    "(get|is|set)_autocast_((cpu|ipu|xla)_)?(dtype|enabled)",
    "(is|set)_autocast_cache_enabled|clear_autocast_cache|autocast(_(de|in)crement_nesting)?",
))
assert not [name for name in dir(torch) if "autocast" in name and not re.fullmatch(known, name)]

def asks(x):
    return x.to(torch.get_autocast_gpu_dtype()) if torch.is_autocast_enabled() else x

compiled = torch.compile(asks, backend="eager", fullgraph=True)
for cast in asks, compiled:
    assert cast(a).dtype == torch.float32
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert cast(a).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert cast(a).dtype == torch.float32
with torch.autocast("cuda", dtype=torch.bfloat16):
    torch.set_autocast_enabled(False)
    assert (a @ a).dtype == torch.float32 and not torch.is_autocast_cpu_enabled()
    torch.set_autocast_enabled(True)
    torch.set_autocast_gpu_dtype(torch.float16)
    assert (a @ a).dtype == torch.float16
assert (a @ a).dtype == torch.float32 and not torch.is_autocast_enabled()
layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).cuda().eval()
with torch.no_grad(), torch.autocast("cuda"):
    assert layer(torch.ones(1, 3, 8, device="cuda")).shape == (1, 3, 8)
"""
    )


@pytest.mark.slow
def test_autocast_works_by_the_devices_own_name(cuda):
    """As torch.openreg's code says it: PyTorch compares it with that of a tensor's device."""
    cuda(
        QUIET.replace("ignore", "error")
        + """
own, a = "openreg", torch.ones(2, 2, device="openreg")
cast = []

class Double(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type=own, cast_inputs=torch.float32)
    def forward(ctx, x):
        cast.append(x.dtype)
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type=own)
    def backward(ctx, gradient):
        return gradient * 2

for dtype in (torch.float16, torch.bfloat16, torch.float64):
    with torch.autocast(own, dtype=dtype):
        assert torch.is_autocast_enabled("cuda") and (a @ a).dtype == dtype
with torch.autocast(device_type=own):
    x = torch.ones(3, device="cuda", dtype=torch.float16, requires_grad=True)
    Double.apply(x).sum().backward()
    assert cast == [torch.float32] and x.grad.tolist() == [2, 2, 2]
    with torch.autocast(own, enabled=False):
        assert (a @ a).dtype == torch.float32
with torch.openreg.amp.autocast():
    assert (a @ a).dtype == torch.float16

@torch.autocast(own)
def product(x):
    return x @ x

def inside(x):
    with torch.autocast(own, torch.bfloat16):
        return x @ x

assert product(a).dtype == torch.float16
assert torch.compile(inside, backend="eager", fullgraph=True)(a).dtype == torch.bfloat16
assert torch.amp.GradScaler(own).is_enabled()
"""
    )


def test_random_functions_work_under_cudas_names(cuda):
    cuda("""
def draw():
    return torch.rand(4, device="cuda")
torch.manual_seed(3)
first = draw()
torch.cuda.manual_seed(3)
assert draw().equal(first)
torch.cuda.manual_seed_all(3)
assert draw().equal(first) and torch.cuda.initial_seed() == 3
state, states = torch.cuda.get_rng_state("cuda:0"), torch.cuda.get_rng_state_all()
next_one = draw()
torch.cuda.set_rng_state(state, device="cuda")
assert draw().equal(next_one)
torch.cuda.set_rng_state_all(states)
with torch.random.fork_rng([0, 1]):
    assert draw().equal(next_one)
assert draw().equal(next_one)
assert torch.cuda.default_generators[1].device == torch.device("cuda:1")
generator = torch.Generator(device="cuda").manual_seed(5)
mine = torch.randn(2, generator=generator, device="cuda")
assert mine.equal(torch.randn(2, generator=generator.manual_seed(5), device="cuda"))
""")


def test_optimizers_step_on_cuda_parameters(cuda):
    cuda("""
for make, options in (
    (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {"foreach": True}),
    (torch.optim.Adam, {"fused": True}), (torch.optim.Adam, {"capturable": True}),
    (torch.optim.RMSprop, {}), (torch.optim.AdamW, {"lr": torch.tensor(0.1), "capturable": True}),
):
    weights = []
    for device in ("cpu", "cuda"):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 5, device=device))
        if device == "cpu":
            options = {k: v for k, v in options.items() if k != "capturable"} | {}
        optimizer = make([weight], **{"lr": 0.1, **options})
        for _ in range(3):
            optimizer.zero_grad()
            weight.square().sum().backward()
            optimizer.step()
        weights.append(weight.detach().cpu())
    torch.testing.assert_close(*weights)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
""")


def test_pinned_loaders_feed_cuda(cuda):
    cuda(
        QUIET
        + """
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.arange(8.0))
for options in ({}, {"pin_memory_device": "cuda"}, {"num_workers": 1}):
    total = 0
    for (batch,) in DataLoader(data, batch_size=4, pin_memory=True, **options):
        assert batch.is_pinned()
        total += batch.to("cuda", non_blocking=True).sum().item()
    assert total == 28
assert torch.ones(2).pin_memory("cuda").is_pinned("cuda")
assert torch.ones(2, pin_memory=True).is_pinned()
"""
    )


@pytest.mark.slow
def test_saved_files_name_cuda_and_load_anywhere(cuda, run_ok, tmp_path):
    path = tmp_path / "state.pt"
    cuda(f"""
import copy, io, pickle
model = torch.nn.Linear(2, 2).cuda()
state = {{"x": torch.arange(3.0, device="cuda:1"), "model": model.state_dict()}}
torch.save(state, {str(path)!r})
for place, expected in (
    (None, "cuda:1"), ("cpu", "cpu"), ("cuda", "cuda:0"), ("cuda:0", "cuda:0"),
    ({{"cuda:1": "cuda:0"}}, "cuda:0"), (lambda storage, tag: storage.cuda(0), "cuda:0"),
    (torch.device("cuda:0"), "cuda:0"), ("openreg:1", "cuda:1"),
):
    x = torch.load({str(path)!r}, map_location=place)["x"]
    assert x.device == torch.device(expected) and x.tolist() == [0, 1, 2]
x = state["x"]
assert copy.deepcopy(x).device == x.device == pickle.loads(pickle.dumps(x)).device
for legacy in (False, True):
    file = io.BytesIO()
    torch.save(x, file, _use_new_zipfile_serialization=not legacy)
    file.seek(0)
    assert torch.load(file, weights_only=True).device == x.device
""")
    # Who has no GPU, and no as_cuda(), hears what everyone hears of a file of CUDA's.
    code = f"""
import torch
try:
    torch.load({str(path)!r})
except RuntimeError as error:
    print("deserialize object on a CUDA device" in str(error))
print(torch.load({str(path)!r}, map_location="openreg:0")["x"].device)
torch.save(torch.ones(2, device="openreg:1"), {str(path)!r})
"""
    assert run_ok(code) == "True\nopenreg:0\n"
    assert cuda(f"print(torch.load({str(path)!r}).device)") == "cuda:1\n"


def test_torchscript_files_name_cuda_and_load_anywhere(cuda):
    cuda(
        QUIET
        + """
import io
file = io.BytesIO()
example = torch.ones(1, 2, device="cuda")
torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2).cuda(), example), file)
for place, expected in ((None, "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", "cpu")):
    file.seek(0)
    model = torch.jit.load(file, map_location=place)
    assert next(model.parameters()).device == torch.device(expected)
"""
    )


@pytest.mark.slow
def test_profiler_shows_cuda_activities(cuda):
    cuda("""
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
assert ProfilerActivity.CUDA in torch.profiler.supported_activities()
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
    x = torch.ones(100, 100, device="cuda")
    with torch.cuda.nvtx.range("mine"):
        torch.mm(x, x)
    torch.cuda.synchronize()
on_device = [event.name for event in found.events() if event.device_type == DeviceType.CUDA]
assert "aten::mm" in on_device, on_device
averages = {event.key: event for event in found.key_averages()}
assert averages["aten::mm"].device_time_total > 0 and "mine" in averages
assert "CUDA time total" in found.key_averages().table(sort_by="cuda_time_total")
for options in ({}, {"use_kineto": False}):
    with torch.autograd.profiler.profile(use_device="cuda", **options) as found:
        torch.mm(x, x)
    assert any(event.device_time_total > 0 for event in found.key_averages())
""")


@pytest.mark.slow
def test_compile_and_fake_tensors_work_under_cudas_names(cuda):
    cuda("""
from torch._subclasses import FakeTensorMode
with FakeTensorMode():
    x = torch.ones(3, device="cuda")
    assert x.is_cuda and (x + 1).device == torch.device("cuda:0")
    assert torch.ones(3).cuda(1).device == torch.device("cuda:1")
x = torch.ones(3, device="cuda")
assert torch.compile(lambda x: x * 2, backend="eager")(x).tolist() == [2, 2, 2]
assert torch.compile(lambda x: x * 2 + 1)(x).tolist() == [3, 3, 3]
x = torch.randn(16, 16, 16, device="cuda", dtype=torch.bfloat16)
softmax = torch.compile(lambda x: torch.softmax(x, -1))  # otherwise for Triton
torch.testing.assert_close(softmax(x), torch.softmax(x, -1))
""")


def test_sync_debug_mode_and_cudas_sanitizer_work(cuda):
    cuda("""
import warnings
import torch.cuda._sanitizer
x = torch.ones(100, device="cuda")
torch.cuda.set_sync_debug_mode("error")
try:
    x.sum().item()
except RuntimeError as error:
    assert "synchronizing" in str(error)
else:
    raise AssertionError
torch.cuda.set_sync_debug_mode("default")
from torch.openreg.sanitizer import DataRaceError, disable, enable

def races():
    y = torch.ones(100, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        y.mul_(2)
    torch.cuda.synchronize()

torch.cuda._sanitizer.enable_cuda_sanitizer()
try:
    races()
except DataRaceError:
    disable()
else:
    raise AssertionError
enable("warn")
torch.cuda._sanitizer.enable_cuda_sanitizer()
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    races()
assert [str(w.message) for w in found if "data race" in str(w.message)]
""")


@pytest.mark.slow
def test_nvtx_and_cudagraph_hints_do_nothing(cuda):
    cuda("""
x = torch.ones(3, device="cuda")
with torch.autograd.profiler.emit_nvtx(record_shapes=True):
    y = x * 2
f = torch.compile(lambda x: x + 1, mode="reduce-overhead")
for _ in range(2):
    torch.compiler.cudagraph_mark_step_begin()
    y = f(y)
assert y.tolist() == [4, 4, 4]
""")


@pytest.mark.slow
def test_compiler_reset_drops_compiled_graphs(cuda):
    cuda("""
torch.compiler.reset()
torch.set_float32_matmul_precision("high")  # or Inductor warns
f = torch.compile(lambda x: x @ x, mode="reduce-overhead")
for _ in range(3):
    f(torch.ones(64, 64, device="cuda"))
torch.cuda.empty_cache()
assert torch.cuda.memory_reserved() > 0  # which no tensor owns
torch.compiler.reset()
torch.cuda.empty_cache()
assert torch.cuda.memory_reserved() == 0
""")


# PyTorch starts CUDA's at its import, which would take what an event orders for a race.
RACES_UNLESS_ORDERED = """
import sys
import torch
x = torch.zeros(100, device="cuda")
side = torch.cuda.Stream()
if sys.argv[1:]:
    side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    x.add_(1)
torch.cuda.synchronize()
print(torch.openreg.sanitizer.is_enabled())
"""


@pytest.mark.slow
@pytest.mark.parametrize("by_command", [False, True])
def test_sanitizer_is_switched_on_by_cudas_variable(run, tmp_path, by_command):
    program = tmp_path / "program.py"
    program.write_text(RACES_UNLESS_ORDERED)
    env = {"TORCH_CUDA_SANITIZER": "1"} | ({} if by_command else {"OPENREG_AS_CUDA": "1"})
    command = ("-m", "torch_openreg", "run", "--as-cuda") if by_command else ()
    done = run("", env, arguments=(*command, program, "ordered"))
    assert (done.code, done.out, done.err) == (0, "True\n", "")
    done = run("", env, arguments=(*command, program))
    assert done.code == 1 and "DataRaceError: data race on openreg:0" in done.err


def test_data_parallel_and_typed_classes_work_under_cudas_names(cuda):
    cuda(
        QUIET
        + """
x = torch.cuda.FloatTensor([1, 2])
assert x.tolist() == [1, 2] and x.device == torch.device("cuda:0")
assert isinstance(x, torch.cuda.FloatTensor) and not isinstance(x, torch.cuda.LongTensor)
assert not isinstance(x.cpu(), torch.cuda.FloatTensor) and torch.cuda.FloatTensor.is_cuda
assert x.type(torch.cuda.LongTensor).type() == "torch.cuda.LongTensor"
for kind in (torch.cuda.FloatStorage, torch.openreg.FloatStorage):
    assert kind(3).device.type == "cuda"
torch.set_default_tensor_type(torch.cuda.HalfTensor)
assert torch.ones(1).type() == "torch.cuda.HalfTensor"
torch.set_default_tensor_type(torch.FloatTensor)
import torch.cuda.comm
parts = torch.cuda.comm.broadcast(x, [0, 1])
assert [part.device.index for part in parts] == [0, 1]
assert torch.cuda.comm.gather(parts, destination=1).tolist() == [1, 2, 1, 2]
model = torch.nn.DataParallel(torch.nn.Linear(2, 1).cuda())
with torch.autocast("cuda"):
    out = model(torch.ones(4, 2, device="cuda"))
assert model.device_ids == [0, 1] and out.dtype == torch.float16 and out.shape == (4, 1)
out.sum().backward()
assert model.module.weight.grad.tolist() == [[4, 4]]
"""
    )


# ---- Kernels that are registered for CUDA's dispatch keys ----

REGISTERS = """
import gc, warnings
warnings.simplefilter("error")
x = torch.ones(2, device="cuda")
def times(n):
    return lambda x: x * n
def registered(name, *more):
    lib = torch.library.Library("upper", "FRAGMENT")
    lib.define(f"{name}(Tensor x) -> Tensor")
    return lib, getattr(torch.ops.upper, name)
"""


def test_kernel_for_cudas_key_is_the_devices(cuda):
    out = cuda(
        REGISTERS
        + """
lib, kernel = registered("kernel")
lib.impl("kernel", times(7), "CUDA")
print(kernel(x).tolist(), kernel(x).tolist())
lib, grad = registered("grad")
lib.impl("grad", times(1), "CompositeExplicitAutograd")
lib.impl("grad", times(5), "AutogradCUDA")
lib.impl("grad", times(3), "AutocastCUDA")
with torch.autocast("cuda"):
    cast = grad(x).tolist()
print(grad(x).tolist(), cast)
warnings.filterwarnings("ignore", "Warning only once")  # it replaces a kernel, as on CUDA
keyed = torch.library.Library("aten", "IMPL", "CUDA")
keyed.impl("frac", times(9))
print(torch.frac(x).tolist())
keyed._destroy()
print(torch.frac(x).tolist())
del lib, keyed, grad
gc.collect()
@torch.library.custom_op("upper::made", mutates_args=(), device_types="cuda")
def made(x: torch.Tensor) -> torch.Tensor:
    return x * 4
print(made(x).tolist())
"""
    )
    assert out.splitlines() == [
        "[7.0, 7.0] [7.0, 7.0]",
        "[5.0, 5.0] [3.0, 3.0]",
        "[9.0, 9.0]",
        "[0.0, 0.0]",
        "[4.0, 4.0]",
    ]


def test_kernel_for_the_device_itself_serves_before_one_for_cuda(cuda):
    out = cuda(
        REGISTERS
        + """
for order in (("CUDA", "PrivateUse1"), ("PrivateUse1", "CUDA")):
    lib, op = registered("_".join(order))
    for key in order:
        lib.impl("_".join(order), times(2 if key == "CUDA" else 3), key)
    print(op(x).tolist())
import torch.distributed.fsdp, torch.nn.attention
print(torch.nn.functional.gelu(x).shape)
"""
    )
    assert out.splitlines() == ["[3.0, 3.0]", "[3.0, 3.0]", "torch.Size([2])"]


def test_kernel_for_cudas_key_outlives_an_earlier_kernels_library(cuda):
    out = cuda(
        REGISTERS
        + """
warnings.simplefilter("ignore")  # each replaces a kernel
base, kernel = registered("again")
base.impl("again", times(1), "CompositeExplicitAutograd")
def library(n):
    made = torch.library.Library("upper", "FRAGMENT")
    made.impl("again", times(n), "AutogradCUDA")
    return made
former, latter = library(2), library(3)
del former
gc.collect()
print(kernel(x).tolist())
former, latter = latter, library(4)
former._destroy()
print(kernel(x).tolist())
latter._destroy()
print(kernel(x).tolist())
"""
    )
    assert out.splitlines() == ["[3.0, 3.0]", "[4.0, 4.0]", "[1.0, 1.0]"]


def test_kernel_for_cudas_key_serves_again_when_later_ones_go(cuda):
    out = cuda(
        REGISTERS
        + """
warnings.simplefilter("ignore")  # each replaces a kernel
def stacked(op, key, ends):
    first = torch.library.Library("upper", "FRAGMENT")
    first.define(f"{op}(Tensor x) -> Tensor")
    first.impl(op, times(1), "CompositeExplicitAutograd")
    first.impl(op, times(2), "CUDA")
    later = [torch.library.Library("upper", "IMPL") for _ in range(3)]
    for n, (library, name) in enumerate(zip(later, ("CUDA", key, "CUDA")), 3):
        library.impl(op, times(n), name)
    call, values = getattr(torch.ops.upper, op), []
    del library
    for at in ends:
        values.append(int(call(x)[0]))
        if at % 2:
            later[at]._destroy()
        later[at] = None
        gc.collect()
    values.append(int(call(x)[0]))
    first._destroy()
    return values
print(stacked("a", "CUDA", (2, 1, 0)), stacked("b", "CUDA", (0, 2, 1)))
print(stacked("c", "PrivateUse1", (2, 1, 0)), stacked("d", "PrivateUse1", (1, 2, 0)))
lib, op = registered("wrong")
lib.impl("wrong", times(8), "CUDA")
try:
    lib.impl("wrong", "no function", "PrivateUse1")
except TypeError:
    print(op(x).tolist())
"""
    )
    assert out.splitlines() == [
        "[5, 4, 3, 2] [5, 5, 4, 2]",
        "[4, 4, 3, 2] [4, 5, 3, 2]",
        "[8.0, 8.0]",
    ]


def test_kernel_for_autocast_calls_its_operator_without_autocast(cuda):
    out = cuda(
        REGISTERS
        + """
lib, cast = registered("cast")
lib.impl("cast", times(1), "CUDA")
autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
def to_half(x):
    with torch._C._ExcludeDispatchKeyGuard(autocast):
        return cast(x.half())
lib.impl("cast", to_half, "AutocastCUDA")
torch.library.define("upper::cast_by_name", "(Tensor x) -> Tensor", lib=lib)
torch.library.impl("upper::cast_by_name", "cuda", times(1), lib=lib)
torch.library.register_autocast("upper::cast_by_name", "cuda", torch.float16, lib=lib)
with torch.autocast("cuda"):
    print(cast(x).dtype, torch.ops.upper.cast_by_name(x).dtype)
print(cast(x).dtype)
"""
    )
    assert out.split() == ["torch.float16", "torch.float16", "torch.float32"]


@pytest.mark.slow
def test_kernels_in_cpp_for_cudas_keys_are_the_devices(cuda, tmp_path):
    """Of an extension that is built for the CPU: the functions get the device's tensors."""
    source = """
    #include <torch/library.h>
    #include <ATen/core/grad_mode.h>
    #include <ATen/ops/mul.h>
    template <int by>
    at::Tensor times(const at::Tensor &x) { return at::mul(x, at::Scalar(by)); }
    template <int by>
    at::Tensor detached(const at::Tensor &x) { return times<by>(x.detach()); }
    TORCH_LIBRARY(upper_cpp, m) {
      m.def("seven(Tensor x) -> Tensor");
      m.def("composite(Tensor x) -> Tensor", &times<1>);
      for (auto name : {"both", "with_autograd", "with_autocast", "for_the_device"}) {
        m.def((std::string(name) + "(Tensor x) -> Tensor").c_str());
      }
    }
    TORCH_LIBRARY_IMPL(upper_cpp, CPU, m) { m.impl("both", &times<1>); }
    TORCH_LIBRARY_IMPL(upper_cpp, CUDA, m) {
      for (auto name : {"seven", "composite", "both", "with_autograd", "with_autocast"}) {
        m.impl(name, &times<7>);
      }
    }
    TORCH_LIBRARY_IMPL(upper_cpp, PrivateUse1, m) { m.impl("for_the_device", &times<8>); }
    TORCH_LIBRARY_IMPL(upper_cpp, CUDA, n) { n.impl("for_the_device", &times<1>); }
    TORCH_LIBRARY_IMPL(upper_cpp, AutogradCUDA, m) { m.impl("with_autograd", &detached<9>); }
    TORCH_LIBRARY_IMPL(upper_cpp, AutocastCUDA, m) { m.impl("with_autocast", &times<1>); }
    """
    out = cuda(
        f"""
from torch.utils import cpp_extension
cpp_extension.load_inline(
    "upper_cpp", {source!r}, build_directory={str(tmp_path)!r}, is_python_module=False
)
x, ops = torch.ones(2, device="cuda:1"), torch.ops.upper_cpp
for _ in range(3):
    print(ops.seven(x))
print(*(op(x)[0].item() for op in (ops.composite, ops.both, ops.for_the_device)))
leaf = x.clone().requires_grad_()
print(ops.with_autograd(leaf)[0].item(), ops.with_autograd(leaf).requires_grad)
print(ops.with_autocast(x)[0].item(), ops.both(torch.ones(1)).item())
with torch.autocast("cuda"):
    try:
        ops.with_autocast(x)
    except NotImplementedError as error:
        print(str(error).split(". ")[0])
""",
        {"PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])},
    )
    lines = out.splitlines()
    assert lines[:3] == ["tensor([7., 7.], device='cuda:1')"] * 3
    assert lines[3:6] == ["7.0 7.0 8.0", "9.0 False", "7.0 1.0"]
    assert lines[6].startswith("upper_cpp::with_autocast: its kernel for AutocastCUDA is in C++")


def test_host_register_pins_existing_memory(cuda):
    cuda("""
import weakref
from torch.cuda import _pin_memory_utils as pins
runtime = torch.cuda.cudart()
x = torch.zeros(1 << 16)
where = x.data_ptr(), x.nbytes
assert not x.is_pinned()
torch.cuda.check_error(runtime.cudaHostRegister(*where, 0))
assert x.is_pinned()
assert int(runtime.cudaHostRegister(*where, 0)) == 712 and runtime.cudaHostRegister(0, 0, 0) == 1
with torch_openreg.openreg.testing.gate() as gate:
    gate.wait()
    x.copy_(torch.ones(1 << 16, device="cuda"), non_blocking=True)
    assert not torch.cuda.current_stream().query()  # the host did not wait
torch.cuda.synchronize()
assert x.sum() == 1 << 16
torch.cuda.check_error(runtime.cudaHostUnregister(where[0]))
assert not x.is_pinned()
pins.pin_memory(*where)
assert x.is_pinned()
pins.unpin_memory(where[0])
for call in (lambda: pins.unpin_memory(where[0]), lambda: pins.pin_memory(where[0], 0)):
    try:
        call()
    except (AssertionError, RuntimeError) as error:
        assert "713" in str(error) or "cudaError: 1." in str(error), error
    else:
        raise SystemExit("taken")
try:
    torch.cuda.check_error(runtime.cudaHostUnregister(where[0]))
except torch.cuda.CudaError as error:
    assert "(713)" in str(error)
else:
    raise SystemExit("taken")
""")


def test_checkpoint_is_staged_in_pinned_memory(cuda, tmp_path):
    """By the default stager, while training goes on."""
    cuda(f"""
import warnings
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager
warnings.filterwarnings("ignore", message="torch.distributed is disabled")
x = torch.arange(1 << 16, dtype=torch.float32, device="cuda")
stager = DefaultStager()
for step in range(2):
    want = x.cpu()
    saved = dcp.async_save({{"x": x}}, checkpoint_id="{tmp_path}/" + str(step), async_stager=stager,
                           no_dist=True)
    saved.staging_completion.result()
    x.add_(1)
    saved.upload_completion.result()
    blank = {{"x": torch.zeros_like(x)}}
    dcp.load(blank, checkpoint_id="{tmp_path}/" + str(step), no_dist=True)
    assert torch.equal(blank["x"].cpu(), want)
stager.close()
""")


def test_errors_name_the_device_as_the_program_does(cuda):
    """Those of the shim, of the C core, and of Python."""
    cuda("""
x = torch.ones(3, device="cuda")
for call in (
    lambda: torch.rand(2, device="cuda", generator=torch.Generator()),
    lambda: torch.rand(2, device="cuda", generator=torch.Generator("cuda:1")),
    lambda: torch.ones(2, device="cuda:7"),
    lambda: torch.empty(1 << 50, device="cuda"),
    lambda: torch.empty(1 << 50, dtype=torch.uint8, device="cuda:1"),
    lambda: torch.cuda.set_device(9),
    lambda: torch.cuda.Stream(device="cpu"),
    lambda: torch.empty(2, device="cuda", layout=torch._mkldnn),
    lambda: x.to_sparse().cos().erfinv().bitwise_not(),
    lambda: x + torch.ones(3, device="cuda:1"),
    lambda: torch.cuda.default_generators[5],
    lambda: torch.cuda.get_device_properties("cpu"),
    lambda: torch.nn.parallel.comm.gather([x, x.cpu()]),
    lambda: x.untyped_storage().byteswap(torch.float32),
):
    try:
        call()
    except (RuntimeError, ValueError, NotImplementedError, IndexError, AssertionError) as error:
        text = str(error).replace("libopenreg", "").replace("torch.openreg", "")
        assert "openreg" not in text.splitlines()[0], text
        assert "cuda" in text.lower(), text
    else:
        raise SystemExit("taken")
torch.embedding(x.view(3, 1), torch.tensor([7], device="cuda"))
try:
    torch.cuda.synchronize()
except IndexError as error:
    assert "openreg" not in str(error), error
    assert "\\n  a card raises: CUDA error: device-side assert triggered" in str(error), error
torch.cuda.set_sync_debug_mode("error")
try:
    x.sum().item()
except RuntimeError as error:
    assert "synchronizing cuda operation" in str(error).lower()
""")


def test_linear_algebra_library_choices_are_accepted(cuda):
    cuda("""
from torch.backends import cuda as backends
m = torch.randn(6, 4, device="cuda")
for driver in ("gesvd", "gesvdj", "gesvda"):
    for _ in range(2):
        u, s, v = torch.linalg.svd(m, full_matrices=False, driver=driver)
        assert torch.equal(s, torch.linalg.svd(m, full_matrices=False)[1])
        assert torch.equal(torch.linalg.svdvals(m, driver=driver), torch.linalg.svdvals(m))
out = [torch.empty(0, device="cuda") for _ in range(3)]
torch.linalg.svd(m, driver="gesvd", out=out)
assert out[0].shape == (6, 6)
for driver in (None, "gels"):
    assert torch.allclose(m @ torch.linalg.lstsq(m, m, driver=driver).solution, m, atol=1e-4)
for call, text in (
    (lambda: torch.linalg.svd(m, driver="none"), "unknown svd driver none"),
    (lambda: torch.linalg.lstsq(m, m, driver="gelsd"), "other than `gels` is not"),
    (lambda: torch.linalg.lstsq(m, m, driver="gelsy"), "other than `gels` is not"),
    (lambda: backends.preferred_blas_library("x"), "Choose from"),
    (lambda: backends.preferred_linalg_library("x"), "Choose from"),
):
    for _ in range(2):
        try:
            call()
        except RuntimeError as error:
            assert text in str(error), error
        else:
            raise SystemExit(text)
for prefer, names in ((backends.preferred_linalg_library, ("cusolver", "magma", "default")),
                      (backends.preferred_blas_library, ("cublaslt", "cublas", "default"))):
    for name in names:
        kept = prefer(name)
        assert kept.name.lower() == name and prefer() == kept
plans = backends.cufft_plan_cache
assert (plans.size, plans[1].size) == (0, 0)
plans.max_size = 10
assert (plans.max_size, plans[0].max_size, plans[1].max_size) == (10, 10, 4096)
plans.clear()
""")
