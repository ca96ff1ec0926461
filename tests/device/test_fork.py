"""Forks: of a process that has used a device, or not; each in a process of its own."""

import os
import shlex
import subprocess

import pytest

LIMIT = 60  # seconds, for a child that hangs
FORKS = int(os.environ.get("OPENREG_FORKS", "10"))

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
    "fill_": "kept.fill_(2)",
    "abs": "kept.abs()",
    "out": "torch.add(kept, kept, out=kept)",
    "sort": "kept.sort()",
    "repr": "repr(kept)",
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


def test_forked_child_is_refused_at_every_entry_point(run_ok):
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


@pytest.mark.parametrize(
    "plugin", [None, pytest.param("libvendor_nomap.so", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("call", HELD_CALLS)
def test_fork_waits_for_the_kernel_that_runs(held_kernel, plugins, run_ok, plugin, call):
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


def test_forked_children_of_a_process_that_calls_operators_are_refused(run_ok):
    """Whose locks a thread of the parent may hold when it forks: of 100 forks 10 met one."""
    out = run_ok(
        f"""
        import os, random, signal, threading, torch
        x = torch.ones(4, device="openreg")
        calls = (
            lambda: x + 1, lambda: x.abs(), lambda: x.fill_(2), lambda: x.sort(), lambda: x.cpu(),
            lambda: torch.cat([x, x]), lambda: torch.randn(3, device="openreg"), lambda: repr(x),
            lambda: torch._foreach_add_([x], [x]), lambda: torch.linalg.norm(x),
        )
        def call_with_size(size):
            y = torch.ones(size, device="openreg")
            y.abs(), y.cumsum(0), y + 1, torch.cat([y, y]), y.bernoulli_()
        # First calls are none of a fork's (below); neither is the first error.
        call_with_size(1)
        for call in *calls, lambda: torch.ones(1, device="openreg:99"):
            try:
                call()
            except RuntimeError:
                pass
        done = threading.Event()
        def work(seed):
            sizes = random.Random(seed)
            while not done.is_set():  # new sizes: each call is written down
                call_with_size(sizes.randrange(5000))
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        def refused(call):
            try:
                call()
            except RuntimeError as error:
                return "forked subprocess" in str(error)
        states = []
        for _ in range({6 * FORKS}):
            pid = os.fork()
            if pid == 0:
                signal.alarm({LIMIT})
                os._exit(0 if all(map(refused, calls)) else 1)
            states.append(os.waitpid(pid, 0)[1])
        done.set()
        for thread in threads:
            thread.join()
        print(set(states))
        """
    )
    assert out == "{0}\n"


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


@pytest.mark.parametrize(
    "plugin", [None, pytest.param("libvendor_nomap.so", marks=pytest.mark.slow)]
)
def test_forks_of_a_busy_process_do_not_hang(plugins, run_ok, slow_first_calls, plugin):
    """OPENREG_FORKS=2000 is a soak; a process makes 50, as kernels are called first but once."""
    env = {"LD_PRELOAD": slow_first_calls}
    if plugin:
        env["OPENREG_PLUGIN"] = str(plugins / plugin)
    for first in range(0, FORKS, 50):
        count = min(50, FORKS - first)
        names = f"SEED, FORKS, LIMIT = {first}, {count}, {LIMIT}"
        assert run_ok(names + FORK_STRESS, env) == "children ended with {0}\n"


def test_fork_before_first_use_works(run_ok):
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


def test_lanes_start_together_in_a_forked_child(tmp_path, run_ok):
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
def test_forked_child_that_drops_a_tensor_changes_nothing(run_ok, poison):
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
