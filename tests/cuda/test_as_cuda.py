"""torch_openreg.as_cuda(): what a program that says "cuda" finds; each in a process of its own."""

import ast

import pytest

AS_CUDA = "import torch, torch_openreg\ntorch_openreg.as_cuda()\n"


@pytest.fixture
def cuda(run_ok):
    """Runs a program under as_cuda(); returns what it prints."""

    def cuda(code, env=None, **options):
        return run_ok(AS_CUDA + code, env, **options)

    return cuda


# ---- Who does not ask for it ----

STATE = """
import sys, torch
def state():
    # What as_cuda() changes, as it is, and not only as it answers.
    return [
        torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.is_initialized(),
        torch.version.cuda, torch.backends.cuda.is_built(), str(torch.device("cuda:1")),
        sorted(torch.device.__dict__), "is_cuda" in vars(torch.Tensor),
        "cuda" in vars(torch.Tensor),
        [n for n in sys.modules if "as_cuda" in n], torch.cuda.Stream.__module__,
        str(torch.profiler.ProfilerActivity.CUDA), torch._C._get_privateuse1_backend_name(),
        torch.distributed.is_nccl_available(),
        torch.distributed.Backend.default_device_backend_map["cuda"],
        torch.Tensor.type.__module__ if hasattr(torch.Tensor.type, "__module__") else None,
        hasattr(torch._C, "_cuda_getCurrentRawStream"),
    ]
"""


@pytest.mark.slow
def test_process_without_as_cuda_is_unchanged(run_ok):
    print_state = STATE + "print(state())"
    without = run_ok(
        print_state.replace("torch._C._get_privateuse1_backend_name()", "'openreg'"),
        {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    assert run_ok(print_state) == without
    assert run_ok(print_state, {"OPENREG_AS_CUDA": "0"}, fresh=True) == without
    used = "torch.ones(2, device='openreg')\ntorch.accelerator.synchronize()\n"
    assert run_ok(STATE + used + "print(state())") == without


def test_as_cuda_changes_the_state_that_is_compared(run_ok, cuda):
    """Or the test above could not fail."""
    before = ast.literal_eval(run_ok(STATE + "print(state())"))
    after = ast.literal_eval(cuda(STATE + "print(state())"))
    assert sum(a != b for a, b in zip(before, after, strict=True)) >= 8, (before, after)


# ---- When it does so ----


def test_as_cuda_may_be_called_twice(cuda):
    assert cuda("torch_openreg.as_cuda()\nprint(torch.ones(1, device='cuda'))").startswith("tensor")


def test_as_cuda_is_refused_after_cuda_was_used(run_ok):
    code = """
        import torch, torch_openreg
        torch.cuda._initialized = True
        try:
            torch_openreg.as_cuda()
        except RuntimeError as error:
            print(error)
        print(torch.device("openreg").type)
    """
    assert run_ok(code) == (
        "torch_openreg.as_cuda(): this process has used CUDA already\n"
        "  help: call it before anything does\n"
        "openreg\n"
    )


@pytest.mark.slow
def test_as_cuda_is_refused_after_inductor_was_imported(run_ok):
    """Which keeps the device's name. Dynamo and flex attention do not."""
    code = """
        import torch, torch_openreg
        import torch.nn.attention.flex_attention, torch._inductor.compile_fx
        try:
            torch_openreg.as_cuda()
        except RuntimeError as error:
            print(str(error).partition(",")[0], torch.device("openreg").type)
    """
    assert run_ok(code) == (
        "torch_openreg.as_cuda(): this process has imported Inductor (torch._inductor) openreg\n"
    )


WITH_GPU = """
import torch, torch_openreg
torch_openreg._C._may_have_gpu = lambda: True
try:
    torch_openreg.as_cuda(**{arguments})
except RuntimeError as error:
    print(error)
print(torch.cuda.is_available())
"""


def test_as_cuda_is_refused_where_a_gpu_is_unless_forced(run_ok):
    refused = run_ok(WITH_GPU.replace("{arguments}", "{}"))
    assert "seems to have a GPU" in refused and "force=True" in refused
    assert refused.endswith("False\n")
    assert run_ok(WITH_GPU.replace("{arguments}", "{'force': True}")) == "True\n"


def test_as_cuda_variable_acts_at_import(run, run_ok):
    code = "import torch; print(torch.ones(2, device='cuda').device)"
    assert run_ok(code, {"OPENREG_AS_CUDA": "1"}, fresh=True) == "cuda:0\n"
    done = run(code, {"OPENREG_AS_CUDA": "yes"}, fresh=True)
    assert done.code != 0 and "OPENREG_AS_CUDA is 0, 1 or force, not 'yes'" in done.err


@pytest.mark.slow
def test_as_cuda_holds_in_a_spawned_child(cuda):
    code = """
import os, subprocess, sys
child = "import torch; print(torch.ones(2).cuda().device)"
print(os.environ["OPENREG_AS_CUDA"], flush=True)
subprocess.run([sys.executable, "-c", child], check=True)
"""
    assert cuda(code).split() == ["1", "cuda:0"]


@pytest.mark.parametrize(
    "variables, found",
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2", "OPENREG_DEVICE_COUNT": "2"}, ["2", "None"]),
        *(
            pytest.param(variables, [count, "None"], marks=pytest.mark.slow)
            for variables, count in (
                ({}, "2"),
                ({"CUDA_VISIBLE_DEVICES": "1"}, "1"),
                ({"CUDA_VISIBLE_DEVICES": ""}, "0"),
                ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, "3"),
            )
        ),
    ],
)
def test_as_cuda_follows_cudas_variables(run_ok, variables, found):
    before = f"import os; os.environ.update({variables})\n"
    after = "print(torch.cuda.device_count(), os.environ.get('OPENREG_LAUNCH_BLOCKING'))"
    # Dynamo, which the fork server has imported, counts the devices.
    assert run_ok(before + AS_CUDA + after, fresh=True).split() == found


@pytest.mark.parametrize(
    "own, cudas", [(None, None), (None, "0"), (None, "1"), ("0", "1"), ("1", None)]
)
def test_launch_blocking_is_read_at_the_first_use(cuda, own, cudas):
    """Not when the devices are counted. The device's own variable is nearer."""
    variables = {"OPENREG_LAUNCH_BLOCKING": own, "CUDA_LAUNCH_BLOCKING": cudas}
    code = f"""
import os
assert torch.cuda.is_available() and torch.cuda.device_count() == 2
os.environ.update({ {k: v for k, v in variables.items() if v} })
stream = torch.cuda.current_stream()
torch.cuda._sleep(1)
os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # too late
torch.cuda._sleep(10**9)
print(stream.query())
"""
    waits = own == "1" or (own is None and cudas == "1")
    assert cuda(code).split() == [str(waits)]


# ---- Names of torch.cuda ----

NAMES = """
import sys, torch.cuda.comm
from torch_openreg._as_cuda import _names
kinds = {}
for place, module in sorted(sys.modules.items()):
    if not (place + ".").startswith("torch.cuda."):
        continue
    for name, value in vars(module).items():
        theirs = (getattr(value, "__module__", "") or "").startswith("torch.cuda")
        if not callable(value) or not theirs:
            continue
        made = getattr(value, "__new__", None) if isinstance(value, type) else value
        code = getattr(made, "__code__", None)
        defined = f"{value.__module__}.{name}"
        if code and code.co_name in ("refuse", "__new__") and "_as_cuda" in code.co_filename:
            kinds[f"{place}.{name}"] = "refused"
        elif defined in _names._KEPT or place.split(".")[-1] in _names._KEPT_MODULES or (
                place.startswith("torch.cuda.amp")):
            kinds[f"{place}.{name}"] = "kept"
        else:
            kinds[f"{place}.{name}"] = "forgotten"
print(kinds)
"""


def test_as_cuda_leaves_no_name_that_asks_for_a_gpu(cuda):
    """Each function and class is openreg's, kept on purpose, or raises; a new PyTorch's too."""
    kinds = ast.literal_eval(cuda(NAMES))
    assert [name for name, kind in kinds.items() if kind == "forgotten"] == []
    for name, kind in {
        "torch.cuda.cudart": "kept",
        "torch.cuda.CUDAPluggableAllocator": "refused",
        "torch.cuda._utils._get_device_index": "kept",
        "torch.cuda.amp.autocast": "kept",
    }.items():
        assert kinds[name] == kind


def test_refused_functions_of_cuda_name_themselves_and_a_remedy(cuda):
    code = """
from torch.utils import cpp_extension
for call in (
    lambda: torch.cuda.cudart().cudaMalloc(8), torch.cuda.CUDAPluggableAllocator,
    torch.cuda.current_blas_handle,
    torch.cuda.nccl.unique_id, lambda: torch.cuda._compile_kernel("x", "x"),
    torch.cuda.jiterator._create_jit_fn("template <typename T> T f(T x) { return x; }"),
    torch.cuda.tunable.enable,
    torch.cuda._gpu_trace.
    register_callback_for_event_creation, lambda: cpp_extension.CUDAExtension("x", ["x.cu"]),
    lambda: cpp_extension.load_inline("x", cpp_sources="", cuda_sources="x"),
    lambda: cpp_extension.load("x", ["x.cpp", "x.cu"]),
    torch.distributed.ProcessGroupNCCL.Options, torch.cuda.temperature, torch.cuda.utilization,
    torch.cuda.CUDAGraph().raw_cuda_graph, lambda: torch.cuda.graph(None, enable_annotations=True),
):
    try:
        print("passed", call, call())
    except NotImplementedError as error:
        print(" ".join(str(error).split()))
try:
    torch.ones(1, device="cuda").__cuda_array_interface__
except AttributeError as error:
    print(" ".join(str(error).split()))
"""
    texts = cuda(code).splitlines()
    assert not [text for text in texts if text.startswith("passed")]
    for name, text in zip(
        (
            "torch.cuda.cudart.cudaMalloc",
            "torch.cuda.CUDAPluggableAllocator",
            "torch.cuda.current_blas_handle",
            "torch.cuda.nccl.unique_id",
            "torch.cuda._compile_kernel",
            "torch.cuda.jiterator",
            "torch.cuda.tunable.enable",
            "torch.cuda._gpu_trace.register_callback_for_event_creation",
            "torch.utils.cpp_extension.CUDAExtension",
            "torch.utils.cpp_extension.load_inline",
            "torch.utils.cpp_extension.load",
            "torch.distributed.ProcessGroupNCCL.Options",
            "temperature",
            "utilization",
            "torch.cuda.CUDAGraph.raw_cuda_graph",
            "enable_annotations",
            "torch.Tensor.__cuda_array_interface__",
        ),
        texts,
        strict=True,
    ):
        assert name in text, text
        assert ";" in text or "help: " in text or "a cuda device is simulated" in text


def test_names_imported_from_torch_cuda_before_are_replaced(run_ok):
    code = """
import sys, types
import torch
early = types.ModuleType("early")
sys.modules["early"] = early
exec("from torch.cuda import Stream, is_available\\nfrom torch.cuda.memory import memory_allocated",
     vars(early))
import torch_openreg
torch_openreg.as_cuda()
print(early.is_available(), early.Stream is torch.cuda.Stream, early.memory_allocated())
"""
    assert run_ok(code) == "True True 0\n"


# ---- Devices by name ----


def test_device_is_found_by_every_way_to_name_it(cuda):
    code = """
import pickle
named = torch.device("cuda:1")
assert named == torch.device("openreg:1") == torch.device("cuda", 1) == torch.device(1)
assert (named.type, named.index, str(named), repr(named)) == (
    "cuda", 1, "cuda:1", "device(type='cuda', index=1)")
assert pickle.loads(pickle.dumps(named)) == named and hash(named) == hash(torch.device("cuda", 1))
assert torch.accelerator.current_accelerator() == torch.device("cuda")
assert torch.get_device_module("cuda") is torch.cuda
x = torch.ones(3, device="cuda:1")
on = [x, torch.ones(3, device=named), torch.ones(3).to("cuda:1"), torch.ones(3).cuda(1),
      torch.ones(3).cuda("cuda:1"), torch.ones(3).cuda(named), x.new_zeros(3), torch.zeros_like(x),
      torch.tensor([1.0], device="cuda:1"), torch.as_tensor([1.0], device="cuda:1"),
      torch.nn.Linear(2, 2, device="cuda:1").weight, torch.nn.Linear(2, 2).cuda(1).weight,
      torch.nn.Linear(2, 2).to("cuda:1", torch.float64).weight, torch.ones(1, device="openreg:1"),
      torch.ones(1).openreg(1), torch.empty(1, device=1),
      torch.sparse_coo_tensor([[0]], [1.0], (2,), device="cuda:1", check_invariants=False),
      torch.nn.utils.rnn.pack_sequence([torch.ones(2)]).to("cuda:1").data]
assert all(t.device == named and t.is_cuda and t.is_openreg for t in on), [t.device for t in on]
assert x.to("cuda:1") is x and x.cuda(1) is x and x.to("cuda") is not x
assert not torch.ones(1).is_cuda and not x.is_cpu and x.get_device() == 1
assert x.untyped_storage().is_cuda and x.cpu().untyped_storage().cuda().device.type == "cuda"
assert torch.Generator("cuda").device.type == "cuda" and torch.Stream("cuda").device.type == "cuda"
with torch.cuda.device(1):
    assert torch.ones(1, device="cuda").device == named == torch.ones(1).cuda().device
with torch.device("cuda:1"):
    assert torch.ones(1).device == named
torch.set_default_device("cuda")
assert torch.ones(1).is_cuda
torch.set_default_device(None)
print(x, torch.ones(1, device="cuda"))
for call in (lambda: torch.ones(1, device="cuda:7"), lambda: torch.ones(1).cuda("cpu"),
             lambda: torch.device("kuda")):
    try:
        call()
    except Exception as error:
        print(type(error).__name__, str(error).splitlines()[0])
"""
    lines = cuda(code).splitlines()
    assert lines[0] == "tensor([1., 1., 1.], device='cuda:1') tensor([1.], device='cuda:0')"
    assert "index 7 is out of range" in lines[1]
    assert lines[2] == "ValueError expected a cuda device, got 'cpu'"
    assert lines[3].startswith("RuntimeError Expected one of cpu, cuda") and "kuda" in lines[3]


def test_tensor_types_have_cudas_names(cuda):
    code = """
x = torch.ones(2, device="cuda:1")
assert x.type() == "torch.cuda.FloatTensor" and x.double().type() == "torch.cuda.DoubleTensor"
y = x.type("torch.cuda.HalfTensor")
assert (y.dtype, y.device) == (torch.float16, x.device)
assert torch.ones(2).type("torch.cuda.LongTensor").type() == "torch.cuda.LongTensor"
assert x.type("torch.DoubleTensor").type() == "torch.DoubleTensor" and x.type(torch.int8).is_cuda
assert x.type(torch.cuda.HalfTensor).type() == "torch.cuda.HalfTensor"
try:
    x.type("torch.cuda.QuirkTensor")
except ValueError as error:
    print(error)
torch.set_default_tensor_type("torch.cuda.DoubleTensor")
assert torch.ones(2).type() == "torch.cuda.DoubleTensor"
torch.set_default_tensor_type("torch.FloatTensor")
assert torch.ones(2).type() == "torch.FloatTensor"
"""
    assert cuda("import warnings; warnings.simplefilter('ignore')\n" + code) == (
        "invalid type: 'torch.cuda.QuirkTensor'\n"
    )


def test_torchscript_names_cuda_devices(cuda):
    code = """
unit = torch.jit.CompilationUnit('''
def f(x):
    return torch.zeros(2, device=torch.device("cuda:1")), x.device.type, x.to("cuda:1")
''')
made, kind, moved = unit.f(torch.ones(1, device="cuda"))
print(made.device, kind, moved.device)
"""
    ignore = "import warnings; warnings.simplefilter('ignore')\n"
    assert cuda(ignore + code) == "cuda:1 cuda cuda:1\n"


def test_device_properties_answer_what_programs_ask_first(cuda):
    code = """
properties = torch.cuda.get_device_properties(0)
assert torch.cuda.is_available() and torch.cuda.device_count() == 2
assert torch.cuda.get_device_capability() == (properties.major, properties.minor) == (8, 0)
assert properties.total_memory > 0 and properties.multi_processor_count > 0
assert len(properties.uuid.bytes) == 16 and not hasattr(properties, "warp_size")
try:
    properties.L2_cache_size
except AttributeError as error:
    assert "get_device_properties.L2_cache_size is not supported" in str(error), error
    assert "no parts of NVIDIA's" in str(error), error
else:
    raise AssertionError("no error")
assert isinstance(torch.cuda.get_device_name(), str) and torch.cuda.is_bf16_supported()
assert torch.backends.cuda.is_built() and int(torch.version.cuda.split(".")[0]) >= 11
assert not torch.backends.cudnn.is_available() and torch.backends.cudnn.version() is None
assert not torch.backends.cudnn.is_acceptable(torch.ones(1, device="cuda"))
for place, name, value in (
    (torch.backends.cudnn, "benchmark", True), (torch.backends.cudnn, "deterministic", True),
    (torch.backends.cudnn, "allow_tf32", False), (torch.backends.cuda.matmul, "allow_tf32", True),
):
    setattr(place, name, value)
    assert getattr(place, name) == value
with torch.backends.cudnn.flags(enabled=False):
    torch.nn.LSTM(2, 2).cuda()(torch.ones(3, 1, 2, device="cuda"))
torch.cuda.ipc_collect()
with torch.cuda.profiler.profile(), torch.cuda.nvtx.range("a {}", 1):
    assert torch.cuda.nvtx.range_push("b") == 1 and torch.cuda.nvtx.range_pop() == 1
torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("c"))
from torch.utils._triton import has_triton
from importlib.util import find_spec
assert has_triton() == (find_spec("triton") is not None)
"""
    cuda(code)
