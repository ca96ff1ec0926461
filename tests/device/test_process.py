"""Import, first use and exit: each in a process of its own."""

import os
import sys

import pytest
import torch

THREADS = "len(threads.names())"

WITHOUT = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}

CPU_ONLY = """
import os, threads, torch
def step():
    torch.manual_seed(3)
    x = torch.randn(5, requires_grad=True)
    (x * x).sum().backward()
    return x.grad.sum().item()
def child(function):
    pid = os.fork()
    if pid == 0:
        try:
            print(function(), flush=True)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
print(step(), flush=True)
child(step)
child(lambda: child(step))
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return torch.full((2,), float(i)) + step()
for batch in torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2):
    print(batch.sum().item(), flush=True)
print([name for name in threads.names() if name.startswith(("openreg", "pt_autograd"))])
"""


@pytest.mark.slow
def test_cpu_program_behaves_as_without_the_package(run_ok):
    assert run_ok(CPU_ONLY, fresh=True) == run_ok(CPU_ONLY, WITHOUT)


def test_import_and_queries_start_nothing(run_ok):
    out = run_ok(
        fresh=True,
        code=f"""
        import threads, torch
        before = {THREADS}
        torch.manual_seed(3)
        torch.openreg.get_rng_state_all()
        torch.openreg.device_count(), torch.openreg.is_available()
        torch.openreg.get_device_properties(1), torch.openreg.current_device()
        torch.openreg.current_stream(), torch.accelerator.current_stream()
        torch.openreg.synchronize(), torch.openreg.empty_cache()
        torch.openreg.memory_allocated(), torch.openreg.device_factories()
        torch.openreg.is_initialized(), torch.ones(3).is_pinned()
        torch.Event(device="openreg"), torch.openreg.default_generators[0].initial_seed()
        print({THREADS} - before, torch.openreg.is_initialized())
        maps = open("/proc/self/maps").read()
        print("openreg-" in maps or "memfd" in maps)
        torch.ones(3, device="openreg").sum().item()
        print({THREADS} > before, torch.openreg.is_initialized())
        """,
    )
    assert out.splitlines() == ["0 False", "False", "True True"]


@pytest.mark.slow
def test_import_works_alone_and_in_either_order(run_ok):
    show = "print(torch.ones(2, device='openreg:1').tolist())"
    for code in (
        f"import torch_openreg, torch; {show}; torch_openreg._autoload(); {show}",
        f"import torch; {show}; import torch_openreg; {show}",
    ):
        assert run_ok(code, fresh=True) == "[1.0, 1.0]\n" * 2
    out = run_ok(
        "import torch_openreg; import torch; print(torch.ones(2, device='openreg').tolist())",
        WITHOUT,
    )
    assert out.strip() == "[1.0, 1.0]"


def test_import_leaves_out_what_is_not_used(run_ok):
    out = run_ok(
        """
        import sys, torch
        before = set(sys.modules)
        import torch_openreg
        print(*sorted(set(sys.modules) - before - {"torch.openreg", "torch_openreg"}))
        """,
        WITHOUT,
    )
    others = [name for name in out.split() if not name.startswith("torch_openreg.")]
    last = {name.rpartition(".")[2] for name in out.split()}
    tools = {"sanitizer", "testing", "_reports", "_pictures", "_schedules", "_exploration"}
    tools |= {"_coverage", "_tapes", "_faults", "_threads", "_as_cuda", "sharding", "ppe"}
    assert (others, tools & last, "memory" in last) == ([], set(), True)


FIRST_IMPORTS = {
    "from": "from torch.openreg.testing import explore, gate",
    "alias": "import torch.openreg.testing as t; explore, gate = t.explore, t.gate",
    "attribute": "import torch; t = torch.openreg.testing; explore, gate = t.explore, t.gate",
    "ours": "import torch_openreg.openreg.testing as t; explore, gate = t.explore, t.gate",
}


@pytest.mark.parametrize("first", FIRST_IMPORTS)
def test_submodules_are_one_module_under_both_names(run_ok, first):
    out = run_ok(
        f"""
        {FIRST_IMPORTS[first]}
        import importlib, sys, torch
        import torch_openreg.openreg as ours
        for name in ours.SUBMODULES:
            theirs = importlib.import_module("torch.openreg." + name)
            assert theirs is getattr(torch.openreg, name) is vars(ours)[name], name
            assert theirs is sys.modules["torch_openreg.openreg." + name], name
            assert theirs.__spec__.name == theirs.__name__ == "torch_openreg.openreg." + name
            assert theirs.__spec__.loader is theirs.__loader__ and theirs.__file__
        assert torch.openreg.testing.explore is explore and torch.openreg.testing.gate is gate
        """
    )
    assert out == ""


def test_names_of_submodules_imported_later_resolve(run_ok):
    out = run_ok(
        """
        import pickle, torch
        assert {"sanitizer", "testing", "memory"} <= set(dir(torch.openreg))
        assert "sanitizer" not in vars(torch.openreg)
        everything = {}
        exec("from torch.openreg import *", everything)
        assert everything["testing"] is torch.openreg.testing
        for name in ("torch.openreg.nothing", "torch.openreg.testing.nothing"):
            try:
                __import__(name)
            except ModuleNotFoundError as error:
                print(error)
        print(pickle.dumps(torch.openreg.sanitizer.DataRaceError("x")).hex())
        """
    )
    *refused, error = out.splitlines()
    assert [line.split(";")[0] for line in refused] == [
        "No module named 'torch.openreg.nothing'",
        "No module named 'torch.openreg.testing.nothing'",
    ]
    out = run_ok(
        f"""
        import pickle, torch
        error = pickle.loads(bytes.fromhex("{error}"))
        print(type(error) is torch.openreg.sanitizer.DataRaceError, error)
        """
    )
    assert out == "True x\n"


def test_threads_that_import_at_once_see_the_whole_module(run_ok):
    """Each sees the whole module, by whatever name it asks."""
    out = run_ok(
        """
        import threading, torch
        ways = [
            "from torch.openreg.testing import explore, gate, inject",
            "from torch_openreg.openreg.testing import explore, gate, inject",
            "explore, inject = torch.openreg.testing.explore, torch.openreg.testing.inject",
            "import torch.openreg.sanitizer as s; s.enable, s.DataRaceError, s.Report",
            "torch.openreg.sanitizer.reports, torch.openreg.sanitizer.clear",
        ] * 4
        ready = threading.Barrier(len(ways))
        failed = []
        def ask(way):
            ready.wait()
            try:
                exec(way, {"torch": torch})
            except Exception as error:
                failed.append(error)
        threads = [threading.Thread(target=ask, args=(way,)) for way in ways]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(failed)
        """,
        fresh=True,
    )
    assert out == "[]\n"


def test_sanitizer_setting_is_read_at_the_import(run_ok):
    program = "import os, torch; os.environ['OPENREG_SANITIZER'] = {!r}; {}"
    ask = "print(torch.openreg.sanitizer.is_enabled())"
    assert run_ok(program.format("1", ask), {"OPENREG_SANITIZER": "0"}) == "False\n"
    assert run_ok(program.format("0", ask), {"OPENREG_SANITIZER": "1"}) == "True\n"


def test_sanitizer_reports_after_all_exit_handlers(run_ok):
    out = run_ok(
        """
        import atexit, torch
        atexit.register(print, "the program's handler")
        torch.openreg.sanitizer._take_left = lambda: print("the sanitizer's") or []
        """
    )
    assert out == "the program's handler\nthe sanitizer's\n"


def test_torch_of_another_version_is_refused(run):
    done = run(
        fresh=True,
        code="""
        import sys, types
        sys.modules["torch"] = types.ModuleType("torch")
        sys.modules["torch"].__version__ = "2.12.1"
        import torch_openreg
        """,
    )
    assert done.code != 0
    assert "ImportError" in done.err and "with PyTorch 2.12.1;" in done.err
    assert f"for PyTorch {'.'.join(torch.__version__.split('.')[:2])} " in done.err
    command = f"{sys.executable} -m pip install --no-build-isolation --no-cache-dir"
    tree = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    assert f"{command} --force-reinstall --no-deps -e {tree}\n" in done.err


def test_seeding_before_first_use_counts(run_ok):
    draw = "print(torch.randn(3, device='openreg:1').tolist())"
    first = run_ok("import torch; torch.manual_seed(11); " + draw)
    later = run_ok(
        "import torch; torch.ones(1, device='openreg:1'); torch.manual_seed(11); " + draw
    )
    other = run_ok("import torch; torch.manual_seed(12); " + draw)
    assert first == later != other


def test_lazy_call_that_fails_leaves_the_others(run_ok):
    out = run_ok(
        """
        import torch
        torch.openreg._lazy_call(lambda: 1 / 0)
        torch.openreg._lazy_call(lambda: print("called"))
        try:
            torch.ones(1, device="openreg")
        except ZeroDivisionError as error:
            print(error)
        torch.ones(1, device="openreg")
        """
    )
    assert out.splitlines() == ["division by zero", "called"]


def test_lazy_calls_run_at_first_use(run_ok):
    out = run_ok(
        """
        import torch
        torch.openreg._lazy_call(lambda: print("called"), seed=True)  # as PyTorch's own are called
        print("before")
        torch.empty(1, device="openreg")
        torch.openreg._lazy_call(lambda: print("at once"))
        """
    )
    assert out.split("\n")[:3] == ["before", "called", "at once"]


FIRST_CALLS = {
    "dense": "empty.memory_format([2, 2], device=device)",
    "fallback": "tril_indices.default(2, 2, device=device)",
    "sparse": "sparse_coo_tensor.size([2, 2], layout=torch.sparse_coo, device=device)",
    "csr": "empty.memory_format([2, 2], layout=torch.sparse_csr, device=device)",
    "quantized": "_empty_affine_quantized.default([2], dtype=torch.quint8, device=device)",
}


@pytest.mark.parametrize("kind", FIRST_CALLS)
def test_first_call_registers_the_operators(run, kind):
    """Most operators are registered at the first use. Calls of torch.ops, as those of C++, do not
    go through torch.openreg._lazy_init."""
    done = run(
        f"""
        import torch
        device = torch.device("openreg")
        def few():
            counts = {{"PrivateUse1": 200, "SparsePrivateUse1": 10}}
            all = torch._C._dispatch_get_registrations_for_dispatch_key
            return [len(all(key)) < count for key, count in counts.items()]
        print(few(), torch.ops.aten.{FIRST_CALLS[kind]}.is_openreg, few())
        """
    )
    expected = "[True, True] True [False, False]\n"
    assert (done.code, done.out) == (0, expected), done.err  # beta layouts warn


def test_autocast_casts_fakes_of_a_device_that_nothing_has_used(run):
    done = run(
        """
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode
        with FakeTensorMode():
            made = torch.empty(2, 2, device="openreg:0")
            with torch.autocast("openreg"):
                print((made @ made).dtype)
        """
    )
    assert (done.code, done.out) == (0, "torch.float16\n"), done.err


@pytest.mark.parametrize("turn", range(10))
def test_exit_with_queued_work_is_quiet(run_ok, turn):
    out = run_ok(
        """
        import torch
        kept = []
        for index in range(2):
            for stream in (torch.openreg.default_stream(index), torch.openreg.Stream(index),
                           torch.openreg.Stream(index, -1)):
                with torch.openreg.stream(stream):
                    torch.openreg._sleep(10**12)
                    kept.append(torch.empty(1000, device=f"openreg:{index}"))
                    kept.append(torch.ones(10).pin_memory().to(f"openreg:{index}",
                                                               non_blocking=True))
                    kept.append(stream.record_event())
        print("end")
        """
    )
    assert out == "end\n"


def test_exit_with_a_closed_gate_is_quiet(run_ok):
    out = run_ok(
        """
        import torch
        held = torch.openreg.testing.gate()
        held.wait()
        torch.openreg._sleep(1)
        print("end")
        """
    )
    assert out == "end\n"


def test_exit_by_an_exception_in_a_thread_that_waits_is_clean(run):
    done = run(
        """
        import threading, time, torch
        held = torch.openreg.testing.gate()
        held.wait()
        threading.Thread(target=torch.openreg.synchronize, daemon=True).start()
        time.sleep(0.1)
        raise SystemExit(3)
        """,
        timeout=60,
    )
    assert (done.code, done.err) == (3, "")


def test_autograd_threads_have_ended_when_python_ends(run_ok):
    """One that let go of a graph at that time would ask for the GIL, and abort the process."""
    out = run_ok(
        fresh=True,
        code="""
        import atexit, threads, time
        def names():
            return sorted(name for name in threads.names() if name.startswith("pt_autograd"))
        atexit.register(lambda: print("at exit", names()))  # before PyTorch: runs after its own
        import torch
        x = torch.ones(3, device="openreg", requires_grad=True)
        atexit.register(lambda: (x * 2).sum().backward())
        (x * 2).sum().backward()
        limit = time.monotonic() + 60
        while len(names()) < 2 and time.monotonic() < limit:
            time.sleep(0.01)  # a thread sets its name itself, and nothing tells when
        print(names())
        """,
    )
    assert out == "['pt_autograd_0', 'pt_autograd_1']\nat exit []\n"


def test_32_streams_stay_within_8_lanes(run_ok):
    out = run_ok(
        """
        import threads, torch
        def lanes():
            return sum(name.startswith("openreg") for name in threads.names())
        streams = [torch.openreg.Stream(i % 2, -(i % 4)) for i in range(32)]
        for stream in streams:
            with stream:
                torch.openreg._sleep(50_000_000)
        started = lanes()
        torch.openreg.synchronize()
        print(started <= 8, 1 <= lanes() <= 8, torch.openreg.get_device_properties(0).lanes <= 8)
        """,
        {"OPENREG_DEVICE_COUNT": "2"},
    )
    assert out.split() == ["True", "True", "True"]


def test_host_cannot_read_device_memory(run):
    for held in (False, True):
        done = run(
            f"""
            import ctypes, torch
            x = torch.ones(1000, device="openreg:1")
            torch.openreg.synchronize(1)
            if {held}:
                with torch.openreg.stream(torch.openreg.Stream(1)):
                    torch.openreg._sleep(5_000_000_000)
            print(x.data_ptr() != 0, flush=True)
            ctypes.string_at(x.data_ptr(), 4)
            """
        )
        assert done.out == "True\n"
        assert done.code == -11
