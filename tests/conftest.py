"""What the tests share: Python programs in processes of their own, and a wait with a limit."""

import ctypes
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
from forkserver import ForkServer
from host_ahead import compare, on_device

import pytest_openreg
import torch_openreg

HERE = os.path.dirname(os.path.abspath(__file__))
# `make test-drivers`: the driver that all programs run on but those that are given another. It may
# count fewer devices than the tests need.
PLUGIN = os.environ.get("OPENREG_PLUGIN")
DRIVER = {"OPENREG_PLUGIN": PLUGIN, "OPENREG_DEVICE_COUNT": "2"} if PLUGIN else {}
LIMIT = 150 if PLUGIN else 600  # seconds; for a program that hangs, far above what any takes


# With OPENREG_SANITIZER=1 pytest_openreg watches every test; here that goes on after a report, and
# the programs that a test runs are watched too.
SANITIZED = os.environ.get("OPENREG_SANITIZER", "0") != "0"
if SANITIZED:
    torch.openreg.sanitizer.enable("warn")
_node = None  # the test that runs


def _variables():
    """Of a program that is given none."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("OPENREG_")}
    variables = kept | DRIVER
    variables["KINETO_LOG_LEVEL"] = "99"  # or it says on stderr when a profile starts and stops
    path = [os.path.join(HERE, "support"), HERE]
    path += filter(None, [variables.get("PYTHONPATH")])
    variables["PYTHONPATH"] = os.pathsep.join(path)
    return variables


_server = ForkServer(
    os.path.join(tempfile.mkdtemp(prefix="openreg-tests-"), "socket"), _variables()
)


def pytest_runtest_setup(item):
    simulated = item.get_closest_marker("simulated_device")
    if PLUGIN and simulated:
        pytest.skip(f"about the simulated device: {simulated.args[0]}")
    torch.manual_seed(0)  # or a test's values depend on the tests that its process ran before


@pytest.fixture(scope="module", autouse=True)
def _quick_collections():
    """What imports have made is left out of them: each takes a fifth of a second otherwise, and a
    whole one where a file before has compiled something."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _server_ends():
    yield
    _server.close()
    shutil.rmtree(os.path.dirname(_server.path))


def _fork(code, arguments, environment, timeout):
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        status = _server.run(code, arguments, environment, out, err, timeout)
        for file in (out, err):
            file.seek(0)
        return _ended(status, out.read(), err.read())


def _ended(code, out, err):
    # A PyTorch that is built for CUDA says which compiler of CUDA it found, if there is one, when
    # it first needs one for C++.
    said = (line for line in err.splitlines(True) if "No CUDA runtime is found" not in line)
    return SimpleNamespace(code=code, out=out, err="".join(said))


def _run(code, env=None, timeout=LIMIT, arguments=(), fresh=False):
    """Runs a program; its settings are those in `env` alone. Returns code, out and err. Of
    `arguments`, which are the interpreter's, the first is a script's file or an option.

    With `fresh`, which is for programs about the import of PyTorch, in an interpreter of its own;
    with other variables than the device's too, as these may be read by that import."""
    if PLUGIN and "OPENREG_DEVICE_MEMORY" in (env or {}) and "OPENREG_PLUGIN" not in env:
        pytest.skip("about the simulated device: OPENREG_DEVICE_MEMORY is its capacity")
    arguments = [str(argument) for argument in arguments]
    option = bool(arguments) and arguments[0].startswith("-") and arguments[0] != "-m"
    forked = not (option or fresh or "LD_PRELOAD" in os.environ)
    forked = forked and all(name.startswith("OPENREG_") for name in env or ())
    code = textwrap.dedent(code)
    command = [sys.executable, *(arguments or ("-c", code))]

    def execute(**more):
        merged = {**_variables(), **more, **(env or {})}
        if forked:
            return _fork(code, arguments, merged, timeout)
        done = subprocess.run(
            command, env=merged, capture_output=True, text=True, timeout=timeout, check=False
        )
        return _ended(done.returncode, done.stdout, done.stderr)

    if not SANITIZED:
        return execute()
    if _node is None or not _node.get_closest_marker("racy"):
        return execute(OPENREG_SANITIZER="1")
    if "UserWarning: data race" in execute(OPENREG_SANITIZER="warn").err:
        _node.stash[pytest_openreg.RACED] = True
    return execute()  # what it says when nobody watches


@pytest.fixture(scope="session")
def run():
    return _run


@pytest.fixture(scope="session")
def run_ok():
    """Runs a program that has to succeed and say nothing on stderr; returns its output."""

    def run_ok(code, env=None, **options):
        done = _run(code, env, **options)
        assert (done.code, done.err) == (0, ""), f"{done.out}\n{done.err}"
        return done.out

    return run_ok


@pytest.fixture(scope="session")
def eventually():
    """Waits for a condition that has to become true; fails after a long time."""

    def eventually(condition, seconds=60):
        limit = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < limit, "the condition did not become true"
            time.sleep(0.001)

    return eventually


@pytest.fixture(scope="session")
def plugins(tmp_path_factory):
    """The folder with docs/examples/vendor's plugins, built."""
    folder = tmp_path_factory.mktemp("vendor")
    source = os.path.join(os.path.dirname(HERE), "docs", "examples", "vendor")
    where = f"INCLUDE={torch_openreg.get_include()}", f"LIBRARY={torch_openreg.get_library_dir()}"
    command = ["make", "-s", "-C", folder, "-f", f"{source}/Makefile", f"VPATH={source}", *where]
    subprocess.run([*command, f"PYTHON={sys.executable}"], check=True)
    return folder


@pytest.fixture
def c_stream():
    """Makes streams as other code does, with the C API: a handle, and the library itself. The test
    destroys them."""
    core = ctypes.CDLL("libopenreg.so.0")

    def c_stream(device):
        handle = ctypes.c_uint64()
        with torch.openreg.device(device):
            assert core.orStreamCreate(ctypes.byref(handle)) == 0
        return handle.value, core

    return c_stream


AHEAD_LIMIT = 20  # seconds; only a call that waits for ever takes that long


def _runs_ahead(function, limit=AHEAD_LIMIT):
    stream = torch.accelerator.current_stream()
    outcome = {}

    def call():
        try:
            with stream:
                outcome["result"] = function()
        except BaseException as error:  # reported below, in the test's own thread
            outcome["error"] = error

    with torch.openreg.testing.gate() as gate:
        gate.wait(stream)
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(limit)
        waited, pending = thread.is_alive(), not stream.query()
    thread.join()
    assert not waited, "the call waited for its stream"
    if "error" in outcome:
        raise outcome["error"]
    assert pending, "nothing was held back: the test shows nothing"
    return outcome["result"]


@pytest.fixture(scope="session")
def runs_ahead():
    """Calls a function while the current stream is held by a gate, and returns its result with the
    gate open. A call that waits for the stream fails the test instead of hanging it."""
    return _runs_ahead


@pytest.fixture
def queued(runs_ahead):
    """The function runs ahead on the device, and gives what it gives on the CPU. `warm`: it is
    called once before, with the same shapes; `warm_inputs`: with these."""

    def queued(function, *inputs, warm=False, warm_inputs=None):
        there = on_device(inputs)
        if warm or warm_inputs:
            function(*on_device(warm_inputs or inputs))
        torch.openreg.synchronize()
        got = runs_ahead(lambda: function(*there))
        compare(got, function(*inputs))
        return got

    return queued


@pytest.fixture(autouse=True)
def clean_device(request):
    """Every test begins and ends on device 0, on default streams, with nothing queued."""
    global _node
    _node = request.node
    torch.openreg.set_device(0)
    yield
    torch.openreg.set_device(0)
    for index in range(torch.openreg.device_count()):
        torch.openreg.set_stream(torch.openreg.default_stream(index))
        torch.openreg.synchronize(index)
    torch.openreg.set_device(0)


@pytest.fixture
def nothing_left():
    """For tests that count memory: Python may otherwise collect what earlier tests have left in the
    midst of a count."""
    gc.collect()
    for index in range(torch.openreg.device_count()):
        torch.openreg.synchronize(index)


@pytest.fixture
def watching():
    """Reports are kept and said nothing of, unless the test enables another mode."""
    sanitizer = torch.openreg.sanitizer
    before = sanitizer.is_enabled()
    for index in range(torch.openreg.device_count()):
        torch.openreg.synchronize(index)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sanitizer.enable("warn")
        yield
        sanitizer.disable()
        sanitizer.clear()
        if before:
            sanitizer.enable("warn")
