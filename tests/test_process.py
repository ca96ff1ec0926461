"""Import, first use, fork and exit: each in a process of its own."""

import os
import shlex
import subprocess
import sys

import pytest
import torch

THREADS = "len(threads.names())"

LIMIT = 60  # seconds, for a child that hangs
FORKS = int(os.environ.get("OPENREG_FORKS", "10"))

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


def test_a_cpu_program_behaves_as_without_the_package(run_ok):
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


def test_import_of_the_package_alone_and_in_either_order(run_ok):
    for code in (
        "import torch_openreg, torch",
        "import torch, torch_openreg",
        "import torch_openreg; import torch; torch_openreg._autoload()",
        "import torch; torch.openreg",
    ):
        code += "; import torch; print(torch.ones(2, device='openreg:1').tolist())"
        out = run_ok(code, fresh=True)
        assert out.strip() == "[1.0, 1.0]"
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
    tools |= {"_coverage", "_tapes", "_faults", "_threads", "_as_cuda", "_sharding", "ppe"}
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


def test_names_of_what_is_imported_later(run_ok):
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


def test_threads_import_at_once(run_ok):
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


def test_the_setting_for_the_sanitizer_is_read_at_the_import(run_ok):
    program = "import os, torch; os.environ['OPENREG_SANITIZER'] = {!r}; {}"
    ask = "print(torch.openreg.sanitizer.is_enabled())"
    assert run_ok(program.format("1", ask), {"OPENREG_SANITIZER": "0"}) == "False\n"
    assert run_ok(program.format("0", ask), {"OPENREG_SANITIZER": "1"}) == "True\n"


def test_the_sanitizer_looks_after_all_handlers_of_the_exit(run_ok):
    out = run_ok(
        """
        import atexit, torch
        atexit.register(print, "the program's handler")
        torch.openreg.sanitizer._take_left = lambda: print("the sanitizer's") or []
        """
    )
    assert out == "the program's handler\nthe sanitizer's\n"


def test_another_torch_version_is_refused(run):
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
    tree = os.path.dirname(os.path.dirname(__file__))
    assert f"{command} --force-reinstall --no-deps -e {tree}\n" in done.err


def test_seeding_before_first_use_counts(run_ok):
    draw = "print(torch.randn(3, device='openreg:1').tolist())"
    first = run_ok("import torch; torch.manual_seed(11); " + draw)
    later = run_ok(
        "import torch; torch.ones(1, device='openreg:1'); torch.manual_seed(11); " + draw
    )
    other = run_ok("import torch; torch.manual_seed(12); " + draw)
    assert first == later != other


def test_a_lazy_call_that_fails_does_not_take_the_others_with_it(run_ok):
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
def test_the_first_call_makes_a_tensor(run, kind):
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


IN_CHILD = """
def in_child(function):
    import os
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = str(function())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    text = os.fdopen(read).read()
    assert os.waitpid(pid, 0)[1] == 0, f"the child died: {text}"
    return text
"""

ENTRY_POINTS = {
    "empty": "torch.empty(3, device='openreg')",
    "to": "torch.ones(3).to('openreg:1')",
    "compute": "kept + 1",
    "cpu": "kept.cpu()",
    "item": "kept[0].item()",
    "pin_memory": "torch.ones(3).pin_memory()",
    "synchronize": "torch.openreg.synchronize()",
    "accelerator_synchronize": "torch.accelerator.synchronize()",
    "stream": "torch.Stream(device='openreg')",
    "stream_query": "stream.query()",
    "stream_synchronize": "stream.synchronize()",
    "wait_stream": "stream.wait_stream(torch.openreg.default_stream())",
    "event_record": "event.record(stream)",
    "event_query": "event.query()",
    "event_synchronize": "event.synchronize()",
    "set_device": "torch.openreg.set_device(1)",
    "current_device": "torch.openreg.current_device()",
    "properties": "torch.openreg.get_device_properties(0)",
    "mem_get_info": "torch.openreg.mem_get_info()",
    "init": "torch.openreg.init()",
    "reset": "torch.openreg.reset(0)",
    "gate": "torch.openreg.testing.gate()",
    "sleep": "torch.openreg._sleep(1)",
    "empty_cache": "torch.openreg.empty_cache()",
    "empty_host_cache": "torch.accelerator.empty_host_cache()",
    "rng_state": "torch.openreg.get_rng_state()",
    "generator": "torch.Generator(device='openreg')",
}


def test_a_forked_child_is_refused_at_every_entry_point(run_ok):
    program = IN_CHILD + "import torch\n"
    program += "kept = torch.ones(3, device='openreg')\n"
    program += "stream = torch.openreg.Stream(); event = stream.record_event()\n"
    for name, call in ENTRY_POINTS.items():
        program += f"print({name!r}, in_child(lambda: {call}).replace(chr(10), ' '))\n"
    program += "print('bad_fork', in_child(torch.openreg._is_in_bad_fork))\n"
    program += "print('initialized', in_child(torch.openreg.is_initialized))\n"
    program += "print('parent', torch.openreg._is_in_bad_fork(), kept.sum().item())\n"
    lines = dict(line.split(" ", 1) for line in run_ok(program).splitlines())
    assert lines.pop("bad_fork") == "True"
    assert lines.pop("initialized") == "False"
    assert lines.pop("parent") == "False 3.0"
    assert set(lines) == set(ENTRY_POINTS)
    not_refused = {
        name: text for name, text in lines.items() if "fork" not in text or "spawn" not in text
    }
    assert not_refused == {}


# Stands in for libm's lgamma, which polygamma(n) calls with n + 1: with n = 9 the kernel says that
# it has begun, and goes on when it is told to; once, as its first run may be a dry one. So does a
# copy of complex numbers to real ones, which warns once: the lock of a function's first call is
# held meanwhile.
HELD_KERNEL = """
#include <unistd.h>
static void hold(void) {
  char bytes[2] = {0};  // one for each process that waits
  static int held;
  if (held++) return;
  if (write(BEGUN, bytes, 2) != 2 || read(OPEN, bytes, 1) != 1) _exit(3);
}
double lgamma(double x) {
  if (x == 10) hold();
  return 1;
}
void warn(const void *) __asm__("_ZN3c104warnERKNS_7WarningE");
void warn(const void *warning) { if (gettid() != getpid()) hold(); }
"""

# What the kernel does, where it may run on the thread that calls it; and the child.
HELD_CALLS = {
    "operator": ("torch.special.polygamma(9, x)", "torch.rand(100, 100).sort()[0].exp()"),
    "copy": ("y.copy_(z)", "torch.empty(1).copy_(torch.ones(1, dtype=torch.complex64))"),
}


def make_preloaded(library, source, *options):
    """Compiles C for LD_PRELOAD; returns the library's path."""
    command = [*shlex.split(os.environ.get("CC", "cc")), "-shared", "-fPIC", "-fno-builtin"]
    command += ["-D_GNU_SOURCE", "-x", "c", "-", "-o", str(library), *options]
    subprocess.run(command, input=source, text=True, check=True)
    return str(library)


@pytest.fixture(scope="module")
def held_kernel(tmp_path_factory):
    """The library, and the numbers of the pipes that say what it does and tell it to go on."""
    begun, gate = 100, 101
    library = tmp_path_factory.mktemp("held") / "held_kernel.so"
    options = f"-DBEGUN={begun}", f"-DOPEN={gate}"
    return make_preloaded(library, HELD_KERNEL, *options), begun, gate


@pytest.mark.parametrize("plugin", [None, "libvendor_nomap.so"])
@pytest.mark.parametrize("call", HELD_CALLS)
def test_a_fork_waits_for_the_kernel_that_runs(held_kernel, plugins, run_ok, plugin, call):
    # Its locks, such as that of a function's first call, would never be opened in the child.
    library, begun, gate = held_kernel
    kernel, child = HELD_CALLS[call]
    out = run_ok(
        f"""
        import os, signal, threading, time
        import torch

        (begun, say_begun), (gate, open_gate) = os.pipe(), os.pipe()
        os.dup2(say_begun, {begun}), os.dup2(gate, {gate})
        if os.fork() == 0:
            os.read(begun, 1)
            time.sleep(0.3)  # time for a fork that does not wait
            os.write(1, b"the kernel goes on, ")
            os.write(open_gate, b"x")
            os._exit(0)

        x = torch.tensor([1.0], dtype=torch.float64).to("openreg")
        y, z = torch.empty(1, device="openreg"), torch.tensor([1j]).to("openreg")
        if {call == "operator"}:  # a copy is the first kernel
            torch.special.polygamma(1, x)
        torch.openreg.synchronize()
        thread = threading.Thread(target=lambda: {kernel})
        thread.start()
        os.read(begun, 1)
        pid = os.fork()
        if pid == 0:
            os.write(1, b"the child lives")
            signal.alarm({LIMIT})
            {child}
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        thread.join()
        torch.openreg.synchronize()
        """,
        env={"LD_PRELOAD": library} | ({"OPENREG_PLUGIN": str(plugins / plugin)} if plugin else {}),
    )
    assert out == "the kernel goes on, the child lives"


# The lock of a function's first call is held on threads that do not fork, for as long as a fork
# and its child take: with its own time, some microseconds, 200 forks met none.
SLOW_FIRST_CALLS = """
#include <dlfcn.h>
#include <unistd.h>
int __cxa_guard_acquire(void *guard) {
  int (*acquire)(void *) = (int (*)(void *))dlsym(RTLD_NEXT, "__cxa_guard_acquire");
  int first = acquire(guard);
  if (first && gettid() != getpid()) usleep(20000);
  return first;
}
"""


@pytest.fixture(scope="module")
def slow_first_calls(tmp_path_factory):
    library = tmp_path_factory.mktemp("slow") / "slow_first_calls.so"
    return make_preloaded(library, SLOW_FIRST_CALLS, "-ldl", "-Wl,--no-as-needed", "-lstdc++")


FORK_STRESS = """
import faulthandler, os, random, signal, threading, warnings, torch

NAMES = '''
    abs acos acosh angle asin asinh atan atanh bitwise_not ceil conj_physical cos cosh
    cumprod cumsum deg2rad digamma erf erfc erfinv exp exp2 expm1 fix flip floor frac
    isfinite isinf isnan lgamma log log10 log1p log2 logcumsumexp logical_not logit
    logsumexp median mode nan_to_num neg nonzero norm positive rad2deg reciprocal relu round
    rsqrt sigmoid sign signbit sin sinc sinh softmax sort sqrt square std tan tanh tril triu
    trunc unique var
'''.split()
DIM = {"cumprod", "cumsum", "logcumsumexp", "logsumexp", "softmax"}

def run(name, x):
    dims = ([0],) if name == "flip" else (0,) if name in DIM else ()
    try:
        return getattr(torch, name)(x, *dims)
    except (RuntimeError, NotImplementedError):
        return None  # not of integers, not on meta

def work(seed):
    order = random.Random(seed)
    while not done.is_set():
        x = order.choice(HOST).to(f"openreg:{seed % 2}")
        for name in order.sample(NAMES, len(NAMES)):
            run(name, x)
            if done.is_set():
                return

# What a thread does for the first time outside of a kernel is no more protected than with PyTorch
# alone: a fork copies its locks, and the C library's for `atexit`. So whatever the way to a kernel
# does is done before, with nothing for the kernels themselves to do.
KINDS = torch.float32, torch.float64, torch.int64, torch.bfloat16
HOST = [torch.ones(3, 3, dtype=kind) for kind in KINDS]
with warnings.catch_warnings():  # of the deviation of nothing
    warnings.simplefilter("ignore")
    for device in "openreg:0", "openreg:1":
        for x in HOST:
            x.to(device)
            for name in NAMES:
                run(name, torch.empty(0, 3, dtype=x.dtype, device=device))
        torch.openreg.synchronize(device)
done = threading.Event()
threads = [threading.Thread(target=work, args=(seed,)) for seed in (SEED, SEED + 1)]
for thread in threads:
    thread.start()
states = []
for _ in range(FORKS):
    pid = os.fork()
    if pid == 0:
        faulthandler.enable()
        faulthandler.register(signal.SIGALRM, chain=True)
        signal.alarm(LIMIT)
        for kind in (torch.float32, torch.int64):
            for name in NAMES:
                run(name, torch.ones(3, 3, dtype=kind))
        os._exit(0)
    states.append(os.waitpid(pid, 0)[1])
done.set()
for thread in threads:
    thread.join()
print("children ended with", set(states))
"""


@pytest.mark.parametrize("plugin", [None, "libvendor_nomap.so"])
def test_forks_of_a_busy_process(plugins, run_ok, slow_first_calls, plugin):
    """OPENREG_FORKS=2000 is a soak; a process makes 50, as kernels are called first but once."""
    env = {"LD_PRELOAD": slow_first_calls}
    if plugin:
        env["OPENREG_PLUGIN"] = str(plugins / plugin)
    for first in range(0, FORKS, 50):
        count = min(50, FORKS - first)
        names = f"SEED, FORKS, LIMIT = {first}, {count}, {LIMIT}"
        assert run_ok(names + FORK_STRESS, env) == "children ended with {0}\n"


def test_a_fork_before_first_use_works(run_ok):
    out = run_ok(
        IN_CHILD
        + """
import torch
torch.manual_seed(1)
torch.openreg.get_rng_state()
x = torch.ones(2, requires_grad=True); x.sum().backward()
def work():
    y = torch.ones(3, device="openreg:1", requires_grad=True)
    (y * 2).sum().backward()
    return y.grad.tolist()
print(in_child(work))
print(work())
"""
    )
    assert out.splitlines() == ["[2.0, 2.0, 2.0]"] * 2


# Stands in for what PyTorch makes its pool of threads with, in a process and once more in its
# forked children, where other threads get time to come.
SLOW_POOL = """
#include <dlfcn.h>
#include <stddef.h>
#include <unistd.h>
void *pthreadpool_create(size_t threads) {
  static int made;
  void *torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  void *(*create)(size_t) = (void *(*)(size_t))dlsym(torch, "pthreadpool_create");
  if (made++ && write(1, "anew, ", 6) == 6) usleep(300000);
  return create(threads);
}
"""


def test_lanes_that_start_together_in_a_forked_child(tmp_path, run_ok):
    # PyTorch's pool is not there while the first one makes it.
    library = tmp_path / "slow_pool.so"
    command = [*shlex.split(os.environ.get("CC", "cc")), "-shared", "-fPIC", "-x", "c", "-"]
    subprocess.run([*command, "-o", str(library)], input=SLOW_POOL, text=True, check=True)
    out = run_ok(
        IN_CHILD
        + """
import torch
torch.set_num_threads(1)
torch.get_num_threads()  # of a thread that has not asked, the fork does so
def work():
    for stream in [torch.openreg.Stream() for _ in range(4)]:
        with stream:
            torch.openreg._sleep(1)
    torch.openreg.synchronize()
    return "done"
print(in_child(work))
""",
        {"LD_PRELOAD": str(library)},
    )
    assert out == "anew, done\n"


@pytest.mark.parametrize("poison", ["0", "1"])
def test_a_child_that_drops_a_tensor_changes_nothing(run_ok, poison):
    out = run_ok(
        IN_CHILD
        + """
import gc, torch
kept = [torch.arange(1000.0, device=f"openreg:{i}") for i in range(2)]
pinned = torch.arange(10.0).pin_memory()
streams = [torch.openreg.Stream(), torch.openreg.Stream(1)]
events = [s.record_event() for s in streams]
gate = torch.openreg.testing.gate()
def drop():
    global gate
    gate.open() if False else None
    gate = None
    kept.clear(); streams.clear(); events.clear()
    gc.collect()
    return "dropped"
print(in_child(drop))
print(in_child(lambda: pinned.sum().item()))
print([k.sum().item() for k in kept], pinned.sum().item(), all(e.query() for e in events))
print(torch.openreg.memory_allocated(0) > 0, gate.is_open)
""",
        {"OPENREG_POISON": poison},
    )
    assert out.splitlines() == [
        "dropped",
        "45.0",
        "[499500.0, 499500.0] 45.0 True",
        "True False",
    ]


@pytest.mark.parametrize("turn", range(10))
def test_exit_with_queued_work(run_ok, turn):
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


def test_exit_with_a_closed_gate(run_ok):
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


def test_exit_by_an_exception_in_a_thread_that_waits(run):
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


def test_no_thread_of_autograd_is_there_when_python_ends(run_ok):
    """One that let go of a graph at that time would ask for the GIL, and abort the process."""
    out = run_ok(
        fresh=True,
        code="""
        import atexit, glob
        def names():
            tasks = [open(path).read().strip() for path in glob.glob("/proc/self/task/*/comm")]
            return sorted(name for name in tasks if name.startswith("pt_autograd"))
        atexit.register(lambda: print("at exit", names()))  # before PyTorch: runs after its own
        import torch
        x = torch.ones(3, device="openreg", requires_grad=True)
        atexit.register(lambda: (x * 2).sum().backward())
        (x * 2).sum().backward()
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


def test_the_host_cannot_read_device_memory(run):
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
