"""Operators that are not PyTorch's: from Python, and docs/examples/custom_op with a kernel."""

import contextlib
import gc
import importlib.util
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch

import torch_openreg  # noqa: F401

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "custom_op" / "relu2.py"
DEVICE = "openreg:0"
CHECKS = ("test_schema", "test_faketensor")  # PyTorch has the others for its own devices
two_devices = pytest.mark.skipif("torch.openreg.device_count() < 2")


# ---- docs/examples/custom_op ----


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Where the example is built, once. Ninja may be this Python's alone, and PyTorch takes no
    launcher in front of a compiler."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    folder = tmp_path_factory.mktemp("extensions")
    compiler = os.environ.get("CXX", "c++").split()[-1]
    return {"TORCH_EXTENSIONS_DIR": str(folder), "PATH": path, "CXX": compiler}


@pytest.fixture(scope="module")
def relu2(settings):
    spec = importlib.util.spec_from_file_location("relu2_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        module.build()
    module.register()
    return torch.ops.custom_op.relu2


def expected(x):
    return x.cpu().relu().square()


@pytest.mark.slow
def test_custom_op_example_learns(relu2, settings):
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("step 0: loss")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7,), (3, 5), (100_003,)])
def test_custom_op_has_the_expected_values(relu2, shape, dtype):
    x = torch.randn(shape, dtype=dtype, device=DEVICE)
    y = relu2(x)
    assert y.device == x.device
    torch.testing.assert_close(y.cpu(), expected(x))


def test_custom_op_takes_views(relu2):
    x = torch.randn(6, 8, device=DEVICE)
    for view in (x.t(), x[::2, 1:], x[0, 0].expand(4, 4)):
        torch.testing.assert_close(relu2(view).cpu(), expected(view))


def test_custom_op_passes_gradcheck(relu2):
    x = torch.randn(4, 5, dtype=torch.float64, device=DEVICE, requires_grad=True)
    assert torch.autograd.gradcheck(relu2, x)
    assert torch.autograd.gradcheck(lambda x: relu2(x.t()), x)
    torch.library.opcheck(relu2, (x,), test_utils=CHECKS)


@two_devices
def test_custom_op_is_queued_on_the_current_stream_of_its_device(relu2, runs_ahead):
    x = torch.randn(1000, device="openreg:1", requires_grad=True)
    side = torch.openreg.Stream(1)
    side.wait_stream(torch.openreg.current_stream(1))
    with torch.openreg.stream(side):
        y = runs_ahead(lambda: relu2(x))
        runs_ahead(lambda: y.sum().backward())
    assert torch.openreg.current_device() == 0
    side.synchronize()
    torch.testing.assert_close(y.detach().cpu(), expected(x.detach()))
    torch.testing.assert_close(x.grad.cpu(), 2 * x.detach().cpu().relu())


def test_custom_op_uses_memory_of_dropped_tensors_in_stream_order(relu2):
    x = torch.randn(5000, device=DEVICE)
    torch.openreg.synchronize()
    with torch.openreg.testing.gate() as gate:
        gate.wait()
        y = relu2(x[::2])  # the dense copy is let go of before the kernel runs
        torch.full((2500,), 9.0, device=DEVICE)
    torch.testing.assert_close(y.cpu(), expected(x[::2]))


@pytest.mark.racy
@pytest.mark.filterwarnings("ignore")
def test_custom_op_reports_its_accesses_to_the_sanitizer(relu2, watching):
    sanitizer = torch.openreg.sanitizer
    sanitizer.enable("warn")
    side = torch.openreg.Stream()
    x = torch.randn(1000, device=DEVICE)
    side.wait_stream(torch.openreg.current_stream())
    with side:
        y = relu2(x)
    relu2(x)
    assert sanitizer.reports() == []
    y.add_(1)
    x.add_(1)
    found = [(r.earlier.operator, r.later.operator) for r in sanitizer.reports()]
    assert found == [("relu2", "aten::add_.Tensor")] * 2


@two_devices
def test_custom_op_refuses_a_bad_call_at_once(relu2):
    x = torch.randn(3, device=DEVICE)
    backward = torch.ops.custom_op.relu2_backward
    with pytest.raises(TypeError, match="float32 or float64, not Int"):
        relu2(torch.ones(3, dtype=torch.int32, device=DEVICE))
    for grad in (x[:2], x.double(), x.cpu(), x.to("openreg:1")):
        with pytest.raises(RuntimeError, match="expected a gradient like x"):
            backward(grad, x)
    with pytest.raises(NotImplementedError, match=r"custom_op::relu2.* 'CPU' backend"):
        relu2(torch.randn(3))
    torch.testing.assert_close(relu2(x).cpu(), expected(x))


# ---- From Python ----


def test_custom_op_in_python_runs_ahead_with_gradients(runs_ahead):
    @torch.library.custom_op("openreg_test::scale", mutates_args=(), device_types="openreg")
    def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    scale.register_fake(lambda x, factor: torch.empty_like(x))
    scale.register_autograd(
        lambda ctx, grad: (scale(grad, ctx.factor), None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
    )
    x = torch.randn(5, device=DEVICE, requires_grad=True)
    y = runs_ahead(lambda: scale(x, 3.0))
    y.sum().backward()
    assert torch.equal(y.cpu(), x.cpu() * 3) and x.grad.tolist() == [3.0] * 5
    torch.library.opcheck(scale, (x, 2.0), test_utils=CHECKS)
    with pytest.raises(NotImplementedError, match="openreg_test::scale"):
        scale(torch.randn(5), 3.0)


def test_custom_op_that_writes_counts_a_version():
    @torch.library.custom_op("openreg_test::fill", mutates_args={"x"}, device_types="openreg")
    def fill(x: torch.Tensor, value: float) -> None:
        x.fill_(value)

    x = torch.zeros(3, device=DEVICE)
    version = x._version
    fill(x, 2.0)
    assert x.tolist() == [2.0] * 3 and x._version > version


def test_custom_op_for_another_device_alone_is_refused_by_name():
    @torch.library.custom_op("openreg_test::cpu_only", mutates_args=(), device_types="cpu")
    def cpu_only(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    x = torch.ones(3, device=DEVICE)
    with pytest.raises(NotImplementedError, match="openreg_test::cpu_only"):
        cpu_only(x)
    cpu_only.register_kernel("openreg")(lambda x: x + 2)
    assert cpu_only(x).tolist() == [3.0] * 3


def test_operator_without_any_kernel_is_refused_by_name():
    torch.library.define("openreg_test::nothing", "(Tensor x) -> Tensor")
    with pytest.raises(NotImplementedError, match="openreg_test::nothing"):
        torch.ops.openreg_test.nothing(torch.ones(3, device=DEVICE))


def test_compiled_cpu_only_kernel_serves_the_device():
    tensors = torch.randn(4, 5), torch.randn(3, 5), torch.randn(3)
    linear = torch.ops.mkldnn._linear_pointwise  # PyTorch's, but not of ATen
    got = linear(*(t.to(DEVICE) for t in tensors), "relu", [], "")
    torch.testing.assert_close(got.cpu(), linear(*tensors, "relu", [], ""))
    assert got.device == torch.device(DEVICE)


# ---- Kernels for the CPU from Python ----


@pytest.fixture
def replace():
    """Registers kernels of Python for the CPU until the test ends. Gives the library of each, and
    the threads that it has run on."""
    libraries = []

    def replace(name, function, key="CPU"):
        ran = []

        def kernel(*args, **kwargs):
            ran.append(threading.current_thread())
            return function(*args, **kwargs)

        libraries.append(torch.library.Library("aten", "IMPL"))
        libraries[-1].impl(name, kernel, key)
        return libraries[-1], ran

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        yield replace
    for library in libraries:
        library._destroy()


def test_python_cpu_kernel_is_for_the_cpus_tensors_alone(replace, runs_ahead):
    library, ran = replace("mul.Tensor", torch.add)
    x = torch.full((3,), 5.0, device=DEVICE)
    for _ in range(2):
        assert (x * x).tolist() == [25.0] * 3
    (y,) = runs_ahead(lambda: [x * x])
    assert y.tolist() == [25.0] * 3 and not ran
    assert (x.cpu() * x.cpu()).tolist() == [10.0] * 3 and ran == [threading.main_thread()]
    library._destroy()
    assert (x.cpu() * x.cpu()).tolist() == (x * x).tolist() == [25.0] * 3 and len(ran) == 1


def _gradient(device):
    x = torch.full((3,), 5.0, device=device, requires_grad=True)
    (x * x).sum().backward()
    return x.grad.tolist()


def _list(device):
    x = torch.full((3,), 5.0, device=device)
    return torch._foreach_mul([x, x], [x, x])[1].tolist()


def _inside_of_a_kernel(device):
    """PyTorch's kernel for the CPU multiplies with the operator."""
    x = torch.full((3,), 5.0, device=device)
    return torch.nn.functional.binary_cross_entropy(x / 10, x / 10, weight=x).item()


def _replayed(device):
    x = torch.full((3,), 5.0, device=DEVICE)
    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph):
        y = x * x
    for _ in range(2):
        graph.replay()
    return y.tolist()


def _by_number_and_in_place(device):
    x = torch.full((3,), 5.0, device=device)
    x.mul_(x)
    return torch.mul(x, x, out=torch.empty(3, device=device)).tolist()


@pytest.mark.parametrize(
    "program", [_gradient, _list, _inside_of_a_kernel, _replayed, _by_number_and_in_place]
)
def test_python_cpu_kernel_leaves_programs_of_the_device_alone(program, replace):
    expected = [program(DEVICE) for _ in range(2)]
    _, ran = replace("mul.Tensor", torch.add)
    _, also = replace("mul.out", lambda a, b, out: torch.add(a, b, out=out))
    _, third = replace("mul_.Tensor", lambda a, b: a.add_(b))
    assert [program(DEVICE) for _ in range(2)] == expected
    assert not ran and not also and not third


def test_python_cpu_kernel_leaves_first_calls_of_the_device_alone(replace):
    """It is tried on stand-ins, which are the device's as well."""
    names = ["hypot", "fill_.Scalar", "zero_", "copy_", "masked_select"]
    ran = [replace(name, lambda *args: args[0])[1] for name in names]
    x = torch.full((3, 7), 3.0, device=DEVICE)
    assert torch.hypot(x, x + 1).tolist() == [[5.0] * 7] * 3
    assert torch.masked_select(x, x > 2).tolist() == [3.0] * 21
    big = torch.ones(1 << 10, 1 << 10, device=DEVICE)
    assert big.t().contiguous().sum().item() == 1 << 20  # divided among threads
    assert ran[0] == ran[4] == []
    assert all(thread is threading.main_thread() for threads in ran for thread in threads)


def test_python_cpu_kernel_for_sparse_leaves_the_devices_alone(replace):
    """PyTorch has one kernel for all backends in this place, which takes the device's tensors."""
    x = torch.full((3, 3), 5.0, device=DEVICE)
    expected = (x.to_sparse() @ x).tolist(), x.to_sparse().coalesce().indices().tolist()
    ran = [replace(name, torch.sub, "SparseCPU")[1] for name in ("mm", "_coalesce", "add.Tensor")]
    for _ in range(2):
        assert (x.to_sparse() @ x).tolist() == expected[0]
        assert x.to_sparse().coalesce().indices().tolist() == expected[1]
        assert (x.to_sparse() + x.to_sparse()).to_dense().tolist() == [[10.0] * 3] * 3
    assert ran == [[]] * 3


def test_python_cpu_kernels_above_each_other_leave_the_device_alone(replace):
    first, second = replace("mul.Tensor", torch.add), replace("mul.Tensor", torch.sub)
    x = torch.full((3,), 5.0, device=DEVICE)
    host = torch.full((3,), 5.0)
    assert (host * host).tolist() == [0.0] * 3 and (x * x).tolist() == [25.0] * 3
    first[0]._destroy()
    assert (host * host).tolist() == [0.0] * 3 and (x * x).tolist() == [25.0] * 3
    second[0]._destroy()
    assert (host * host).tolist() == (x * x).tolist() == [25.0] * 3


def test_python_cpu_kernel_ends_with_its_library():
    x = torch.full((3,), 5.0, device=DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch's is raised when the kernel is registered
        library = torch.library.Library("aten", "IMPL")
        for function in (torch.add, torch.sub):
            with contextlib.suppress(UserWarning):
                library.impl("mul.Tensor", function, "CPU")
    assert (x * x).tolist() == [25.0] * 3 != (x.cpu() * x.cpu()).tolist()
    del library
    gc.collect()
    assert (x * x).tolist() == (x.cpu() * x.cpu()).tolist() == [25.0] * 3


@pytest.mark.slow
def test_python_cpu_kernel_older_than_the_import_is_refused_by_name(run_ok):
    """What it has replaced cannot be found."""
    out = run_ok(
        """
        import warnings
        import torch
        warnings.simplefilter("ignore")
        library = torch.library.Library("aten", "IMPL")
        for name in "hypot", "hypot.out", "mul_.Tensor":
            library.impl(name, lambda a, b, out=None: torch.add(a, b), "CPU")
        import torch_openreg
        x = torch.full((2,), 3.0, device="openreg")

        def inside_of_a_kernel(x, y):
            torch.nn.functional.binary_cross_entropy(x / 10, y / 10, weight=x)
            torch.openreg.synchronize()

        for function in torch.hypot, inside_of_a_kernel:
            try:
                function(x, x)
            except NotImplementedError as error:
                print("aten::hypot" in str(error), "aten::mul" in str(error))
        print(torch.hypot(x.cpu(), x.cpu()).tolist())
        library._destroy()
        inside_of_a_kernel(x, x)
        print(torch.hypot(x, x).tolist() == torch.hypot(x.cpu(), x.cpu()).tolist())
        """,
        {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    assert out.splitlines() == ["True False", "False True", "[6.0, 6.0]", "True"]


def test_python_cpu_kernel_does_not_reach_kernels_that_run(replace):
    x = torch.full((3,), 5.0, device=DEVICE)
    x * x
    torch.openreg.synchronize()
    with torch.openreg.testing.gate() as gate:
        gate.wait()
        before = x * x
        library, ran = replace("mul.Tensor", torch.add)
        under = x * x
    assert before.tolist() == under.tolist() == [25.0] * 3
    with torch.openreg.testing.gate() as gate:
        gate.wait()
        under = x * x
        library._destroy()
    assert under.tolist() == [25.0] * 3 and not ran


@pytest.mark.parametrize("file", ["train.py", "train", "<stdin>", "kernels.cpp"])
def test_python_cpu_only_kernel_is_refused_by_name_from_any_file(file):
    ran = []
    source = """
library = torch.library.Library("openreg_test_file", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: ran.append(x) or x * 2, "CPU")
"""
    scope = {"torch": torch, "ran": ran}
    exec(compile(source, file, "exec"), scope)
    try:
        for _ in range(2):
            with pytest.raises(NotImplementedError, match="openreg_test_file::twice"):
                torch.ops.openreg_test_file.twice(torch.ones(2, device=DEVICE))
        assert not ran
        assert torch.ops.openreg_test_file.twice(torch.ones(2)).tolist() == [2.0] * 2
    finally:
        scope["library"]._destroy()


def test_python_cpu_kernel_leaves_compiled_functions_alone(replace):
    function = torch.compile(lambda x: (x * x).cumsum(0) * torch.special.erfcx(x))
    x = torch.full((3,), 5.0, device=DEVICE)
    expected = function(x).tolist()
    ran = [replace(name, lambda *args: args[0])[1] for name in ("mul.Tensor", "cumsum")]
    ran.append(replace("special_erfcx", torch.exp)[1])
    torch._dynamo.reset()
    assert function(x).tolist() == expected and ran == [[]] * 3
