"""The C++ API of streams and the guard, used by an extension that is built here."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

import torch_openreg

pytestmark = pytest.mark.slow  # the compiler takes half a minute
SOURCES = Path(__file__).resolve().parents[1] / "cpp"


@pytest.fixture(scope="module")
def extension(tmp_path_factory):
    library = tmp_path_factory.mktemp("extension") / "api.so"
    root = Path(torch.__file__).parent
    command = [
        *os.environ.get("CXX", "c++").split(),
        *("-std=c++20", "-O0", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"),
        *(*sorted(SOURCES.glob("*.cpp")), "-o", library),
        *("-I", torch_openreg.get_include(), "-isystem", root / "include"),
        *(f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"),
        *(f"-L{torch_openreg.get_library_dir()}", "-lopenreg", torch_openreg._C.__file__),
    ]
    subprocess.run(command, check=True)
    return library


# Each in a process of its own, which loads this module and no other copy of it.
CALL = "import ctypes, torch; print(ctypes.CDLL({!r}).{}())"


@pytest.mark.parametrize("program", ["runStreams", "runGuard"])
def test_cpp_program_of_the_api_passes(extension, run_ok, program):
    assert run_ok(CALL.format(str(extension), program)) == "0\n"


def test_core_that_cannot_start_is_reported_to_cpp(extension, run_ok):
    program = CALL.format(str(extension), "runWithoutDevices")
    assert run_ok(program, {"OPENREG_PLUGIN": "/nowhere/libnothing.so"}) == "0\n"


def test_cpp_api_refuses_a_forked_child(extension, run_ok):
    program = f"""
        import ctypes, os, torch
        library = ctypes.CDLL({str(extension)!r})
        torch.ones(3, device="openreg")
        child = os.fork()
        if child == 0:
            os._exit(library.runInChild())
        print(os.waitpid(child, 0)[1])
    """
    assert run_ok(program) == "0\n"


def test_vendors_metadata_is_saved_and_loaded(extension, run_ok):
    program = f"""
        import ctypes, io, torch
        from torch._utils import get_tensor_metadata, set_tensor_metadata
        ctypes.CDLL({str(extension)!r}).registerBackendMeta()
        x = torch.arange(3.0, device="openreg:1")
        print(get_tensor_metadata(x))
        set_tensor_metadata(x, {{"vendor_layout": True}})
        file = io.BytesIO()
        torch.save(x, file)
        file.seek(0)
        again = torch.load(file, map_location="openreg:0")
        print(get_tensor_metadata(again), again.tolist(), (again + x.to(again.device)).tolist())
    """
    assert run_ok(program).splitlines() == [
        "{}",
        "{'vendor_layout': True} [0.0, 1.0, 2.0] [0.0, 2.0, 4.0]",
    ]


# ---- Kernels for the CPU that are made of PyTorch's operators ----

# Each program runs on the CPU and on the device: what it returns, raises and warns of is the same.
AS_ON_THE_CPU = """
import warnings
import torch
from torch.autograd import forward_ad

torch.ops.load_library({library!r})
ops = torch.ops.openreg_cpp

def leaf(device, *values):
    return torch.tensor(values, device=device, requires_grad=True)

def gradient(device):
    x = leaf(device, 3.0, 4.0)
    (ops.square(x).sum() + x.sum()).backward()
    return x.grad

def of_a_gradient(device):
    x = leaf(device, 3.0)
    (first,) = torch.autograd.grad(ops.square(x) * x, x, create_graph=True)
    return first, torch.autograd.grad(first, x)

def several_results(device):
    x, y = leaf(device, 3.0), leaf(device, 5.0)
    sum, product = ops.sum_and_product(x * 2, y)
    (sum * product).backward()
    return sum, product, x.grad, y.grad

def one_of_two(device):
    x, y = leaf(device, 3.0), torch.ones(1, device=device)
    product = ops.sum_and_product(y, x)[1]
    return product, torch.autograd.grad(product, x), y.requires_grad

def lists(device):
    x, y = leaf(device, 3.0), leaf(device, 5.0)
    made = ops.powers([x, y, x])
    sum(made).backward()
    return made, x.grad, y.grad

def in_place(device):
    x = leaf(device, 3.0)
    y = x * 1
    version = y._version
    ops.twice_(y)
    (y * y).backward()
    return x.grad, y, y._version > version

def in_place_on_a_view(device):
    x = leaf(device, 3.0, 4.0)
    y = x * 1
    ops.twice_(y[1:])
    (y * y).sum().backward()
    return y, x.grad

def in_place_returned(device):
    x = leaf(device, 1.0)
    y = x * 1
    same = ops.exp_(y)
    y.backward()
    return x.grad, y, same is y

def in_place_on_a_leaf(device):
    ops.twice_(leaf(device, 3.0))

def into_another(device):
    x, sum = leaf(device, 3.0), torch.ones(1, device=device)
    ops.add_to_(sum, x)
    (sum * sum).backward()
    return sum, x.grad

def saved_and_written(device, write=None):
    w, saved = leaf(device, 3.0), torch.ones(1, device=device)
    product = w * saved
    (write or ops.twice_)(saved)
    product.backward()
    return w.grad

def saved_and_written_by_a_loop(device):  # which nobody sees, here as there
    return saved_and_written(device, ops.twice_by_loop_)

def saved_and_written_through_a_view(device):
    return saved_and_written(device, lambda saved: ops.head(saved).mul_(2))

def without_grad_mode(device):
    x = leaf(device, 3.0)
    with torch.no_grad():
        y = ops.square(x)
        ops.twice_(x)
    return y, y.requires_grad, x, x._version

def in_inference_mode(device):
    with torch.inference_mode():
        x = torch.ones(2, device=device)
        ops.twice_(x)
        return ops.square(x), x

def autograd_of_its_own(device):
    x = leaf(device, 3.0)
    y = ops.flat(x)
    return y, y.requires_grad

def autograd_inside(device):
    return ops.slope(torch.full((2,), 3.0, device=device))

def forward_mode(device):
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.full((1,), 3.0, device=device), torch.ones(1, device=device))
        return forward_ad.unpack_dual(ops.square(x)).tangent

def hooks_on_what_is_saved(device):
    shapes = []
    keep = lambda t: shapes.append(t.shape) or t
    x = leaf(device, 3.0, 4.0)
    with torch.autograd.graph.saved_tensors_hooks(keep, keep):
        y = ops.square(x)
    y.sum().backward()
    return x.grad, shapes

def plain(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value

def outcome(program, device):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = plain(program(device))
        except RuntimeError as error:
            result = type(error).__name__, str(error).partition(":")[0].replace("CPU", "")
    texts = [str(w.message).partition("(")[0] for w in caught]
    return result, sum("backprop through it" in text for text in texts)

torch.set_warn_always(True)
programs = [f for f in list(globals().values()) if getattr(f, "__code__", None) and
            f.__code__.co_varnames[:1] == ("device",) and f is not leaf]
for program in programs:
    expected = outcome(program, "cpu")
    got = [outcome(program, "openreg") for _ in range(2)]
    if got != [expected] * 2:
        print(program.__name__, expected, *got)
print(len(programs))
"""


def test_cpu_only_cpp_operators_work_with_autograd(extension, run_ok):
    out = run_ok(AS_ON_THE_CPU.format(library=str(extension)))
    assert out.split("\n")[:-1] == ["19"], out


def test_cpu_only_cpp_operators_are_refused_where_autograd_needs_more(extension, run_ok):
    out = run_ok(
        f"""
        import torch
        torch.ops.load_library({str(extension)!r})
        ops = torch.ops.openreg_cpp
        x = torch.ones(2, device="openreg", requires_grad=True)
        y = x * 1
        for call in (lambda: ops.head(x), lambda: ops.add_to_(y[:1], y)):
            try:
                call()
            except NotImplementedError as error:
                print(str(error).partition(" on ")[0], "derivative of its own" in str(error))
        print(y.tolist(), ops.head(x.detach()).tolist())
        """
    )
    assert out.splitlines() == [
        "openreg_cpp::head True",
        "openreg_cpp::add_to_ True",
        "[1.0, 1.0] [1.0]",
    ]


def test_cpu_only_cpp_operator_on_copies_is_as_on_the_cpu(extension, run_ok, plugins):
    """In inference mode, and with the gradient of an expanded tensor."""
    program = f"""
        import warnings
        import torch
        torch.ops.load_library({str(extension)!r})
        ops = torch.ops.openreg_cpp
        warnings.simplefilter("ignore")  # of an operator without a derivative of its own
        for device in "cpu", "openreg":
            x = torch.ones(3, device=device)
            with torch.inference_mode():
                ops.twice_(x)
                y = torch.ones(4, device=device)
                ops.twice_unsaid(y[1:])
                ops.twice_around_(y[1:2])
            weights = torch.tensor([1.0, 2.0, 6.0], device=device)
            one = torch.ones(1, device=device).expand(3).requires_grad_()
            ops.sum_and_product(one, weights)[1].sum().backward()
            print(x.tolist(), y.tolist(), one.grad.tolist())
    """
    out = run_ok(program, {"OPENREG_PLUGIN": str(plugins / "libvendor_nomap.so")}).splitlines()
    assert out == ["[2.0, 2.0, 2.0] [2.0, 4.0, 4.0, 4.0] [1.0, 2.0, 6.0]"] * 2


def test_cpu_only_cpp_operator_works_inside_of_another_operator(extension, run_ok):
    """By a handler of the warning that the first one waits."""
    out = run_ok(
        f"""
        import warnings
        import torch
        torch.ops.load_library({str(extension)!r})
        ops = torch.ops.openreg_cpp
        x = torch.full((2,), 3.0, device="openreg")
        inner = []

        def show(*args, **kwargs):
            if not inner:
                inner.append(None)
                inner[0] = ops.sum_and_product(x, x)

        warnings.showwarning = show
        warnings.simplefilter("always")
        torch.openreg.set_sync_debug_mode("warn")
        result = ops.square(x)
        torch.openreg.set_sync_debug_mode("default")
        print(result.tolist(), [y.tolist() for y in inner[0]])
        """,
        {"MALLOC_PERTURB_": "165"},  # memory that is freed changes
    )
    assert out == "[9.0, 9.0] [[6.0, 6.0], [9.0, 9.0]]\n"


def test_cpp_operator_defined_anew_in_aten_works(extension, run_ok):
    out = run_ok(
        f"""
        import ctypes
        import torch
        torch.ops.load_library({str(extension)!r})
        library = ctypes.CDLL({str(extension)!r})
        x = torch.full((2,), 3.0, device="openreg")
        for pair in (0, 1) * 4:
            library.defineAnew(pair)
            print(*torch.ops.aten.openreg_anew(*[x, x][: pair + 1]))
            library.undefine()
            del torch.ops.aten.openreg_anew
        """
    )
    one, two = out.splitlines()[:2]
    assert out.splitlines() == [one, two] * 4 and "9." in one and "6." in two
