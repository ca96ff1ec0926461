"""The sanitizer's tools and the processes that a program or a test starts."""

import os
import re
import subprocess
from multiprocessing import util

import pytest

import torch_openreg
from torch_openreg.openreg.sanitizer import _processes

pytest_plugins = ["pytester"]
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LIBRARY = os.path.join(torch_openreg.get_library_dir(), "libopenreg.so.0")
NOT_WATCHED = "not watched, as OPENREG_SANITIZER_REPORTS is not in their environment: "

RACING = """
import os
import signal
import sys

import torch


def race():
    a, side = torch.ones(1000, device="openreg"), torch.openreg.Stream()
    with side:
        a.mul_(5)
    torch.openreg.synchronize()


def race_and_die():
    race()
    os.kill(os.getpid(), signal.SIGKILL)


def is_watched():
    torch.ones(3, device="openreg")
    return torch.openreg.sanitizer.is_enabled()


def in_fork(function):
    pid = os.fork()
    if pid == 0:
        try:
            function()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "racing.py").write_text(RACING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([ROOT, str(tmp_path)]))
    return tmp_path


@pytest.fixture
def told(run, folder):
    """Runs a program under ``run --sanitize``: its exit status, output, and the summary."""

    def told(text, *arguments):
        path = folder / "program.py"
        path.write_text(text)
        done = run("", arguments=("-m", "torch_openreg", "run", "--sanitize", path, *arguments))
        lines = [line for line in done.err.splitlines() if line.startswith("torch_openreg: ")]
        return done.code, done.out, [line.removeprefix("torch_openreg: ") for line in lines]

    return told


# ---- run ----

KILLED = """
import multiprocessing
import os
import subprocess
import sys

from racing import in_fork, race, race_and_die

WITHOUT_PYTORCH = "handle = ctypes.c_uint64(); core.orStreamCreate(ctypes.byref(handle))"

if __name__ == "__main__":
    in_fork(race)
    killed = multiprocessing.get_context("spawn").Process(target=race_and_die, name="Killed")
    killed.start()
    subprocess.run(["true", "alone"], env={"PATH": os.environ["PATH"]})
    core = f"import ctypes; core = ctypes.CDLL({sys.argv[1]!r}); {WITHOUT_PYTORCH}"
    subprocess.run([sys.executable, "-c", core], check=True)
    subprocess.run(["true", "off"], env={"PATH": os.environ["PATH"], "OPENREG_SANITIZER": "0"})
    killed.join()
"""


def found(processes, mistakes="1 mistake", devices=" on openreg:0"):
    return f"sanitizer: {mistakes} found in the order of accesses of {processes}{devices}"


def places():
    return "racing.py:10 and racing.py:12"


@pytest.mark.racy
def test_run_reports_races_in_processes(told, folder):
    code, _, (first, race, gap, elsewhere) = told(KILLED, LIBRARY)
    assert (code, first) == (1, found("2 processes"))
    assert race.startswith(f"  1: {places()}")
    assert re.search(r"by mul_, fill_; in process \d+ \(program.py\) and 1 more\)$", race), race
    assert gap == f"  {NOT_WATCHED}true alone"
    assert re.fullmatch(
        r"  used a device without PyTorch, reported on stderr: process \d+ \(python.*\)",
        elsewhere,
    )


EVERY_WAY = """
import multiprocessing
import os
import subprocess
import sys

from racing import race

if __name__ == "__main__":
    served = multiprocessing.get_context("forkserver").Process(target=race, name="Served")
    served.start()
    watched = [sys.executable, "-c", "import racing; racing.race()"]
    off = [sys.executable, "-c", "import racing; print(racing.is_watched())"]
    inner = [sys.executable, "-m", "torch_openreg", "run", "--sanitize", "racing.py"]
    subprocess.run(watched)
    print(subprocess.run(inner, stderr=subprocess.PIPE, text=True).stderr, flush=True)
    subprocess.run(off, env={**os.environ, "OPENREG_SANITIZER": "0"})
    served.join()
"""


@pytest.mark.racy
@pytest.mark.slow
def test_run_reports_races_however_processes_are_started(told, folder):
    with open(folder / "racing.py", "a") as file:
        file.write("\n\nif __name__ == '__main__':\n    race()\n")
    code, out, (first, race) = told(EVERY_WAY)
    assert (code, first) == (1, found("2 processes"))
    assert places() in race and race.endswith(" and 1 more)")
    assert f"torch_openreg: {found('1 process')}\n" in out
    assert out.endswith("False\n")


@pytest.mark.racy
def test_run_waits_for_what_the_interpreter_waits_for(told):
    code, _, (first, _) = told(
        """
import threading, time
from racing import race

def later():
    time.sleep(0.1)
    race()

threading.Thread(target=later).start()
"""
    )
    assert (code, first) == (1, found("1 process"))
    code, out, (first, _) = told(
        """
import atexit
from racing import race

atexit.register(lambda: (race(), print("last")))
raise SystemExit(3)
"""
    )
    assert (code, out) == (3, "last\n")
    assert first == found("1 process")


def test_run_reports_that_there_was_nothing_to_watch(told):
    code, _, lines = told("import os\nos.fork()\nprint('done')\n")
    assert (code, lines) == (0, ["sanitizer: nothing was watched: no process used a device"])


GOES_ON = """
import os

import torch

read, write = os.pipe()
if os.fork() == 0:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # whoever reads this program's output waits for its end alone
    os.dup2(null, 2)
    torch.ones(3, device="openreg")
    os.write(write, b"x")
    os.read(os.open("end", os.O_RDONLY), 1)
    os._exit(0)
os.read(read, 1)
"""


def test_run_names_processes_that_go_on(told, folder):
    os.mkfifo(folder / "end")
    code, _, (first, gap) = told(GOES_ON)
    with open(folder / "end", "w"):
        assert (code, first) == (0, found("1 process", "no mistakes", ""))
        assert re.fullmatch(
            r"  still running, not watched from here on: process \d+ \(program.py\)", gap
        )


@pytest.fixture
def watch():
    before = os.environ.get(_processes.REPORTS)
    watch = _processes.Watch("warn")
    yield watch
    watch.close()
    assert os.environ.get(_processes.REPORTS) == before


def test_record_that_was_cut_off_is_counted(watch):
    with open(os.environ[_processes.REPORTS], "ab") as file:
        file.write(b"\nYWJj")
    pid = os.fork()
    if pid == 0:
        _processes.send("unwatched", "true")
        os._exit(0)
    os.waitpid(pid, 0)
    assert watch.take() == []
    gaps = [f"{NOT_WATCHED}true", "records of processes that could not be read: 1"]
    assert list(watch.watched().gaps()) == gaps


def test_process_started_without_the_environment_is_named(watch, monkeypatch):
    bare = {"PATH": os.environ["PATH"]}
    pids = [os.posix_spawn("/bin/true", ["true", "posix_spawn"], bare)]
    pids.append(os.spawnve(os.P_NOWAIT, "/bin/true", ["true", "spawnve"], bare))
    with monkeypatch.context() as patch:
        patch.delenv(_processes.REPORTS)
        os.system("true system")
        subprocess.run(["true", "run"], check=True)
        pids.append(util.spawnv_passfds(b"/bin/true", ["true", "multiprocessing"], ()))
    for pid in pids:
        os.waitpid(pid, 0)
    watch.take()
    ways = ("posix_spawn", "system", "run", "multiprocessing", "spawnve")
    assert sorted(watch.watched().unwatched) == sorted(f"true {way}" for way in ways)


# ---- pytest ----

TESTS = """
import os
import subprocess
import sys
import threading

import pytest
from racing import in_fork, is_watched, race


def test_quiet():
    in_fork(is_watched)


def test_races(monkeypatch):
    in_fork(race)
    monkeypatch.setattr("builtins.open", None)
    monkeypatch.setattr("os.listdir", None)


@pytest.mark.racy
def test_marked():
    in_fork(race)


@pytest.mark.racy
def test_marked_without_reason():
    in_fork(is_watched)


@pytest.mark.xfail(raises=RuntimeError)
def test_expected():
    in_fork(race)
    raise RuntimeError


def test_clears():
    import torch

    in_fork(race)
    torch.openreg.sanitizer.clear()


def test_starts_one_that_is_late():
    global pid, write
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(read, 1)
        try:
            race()
        finally:
            os._exit(0)


def test_follows():
    os.write(write, b"x")
    os.waitpid(pid, 0)


def test_subprocess():
    command = [sys.executable, "-c", "import racing; racing.race()"]
    bare = {"PATH": os.environ["PATH"]}
    subprocess.run(["true", "alone"], env=bare, check=True)
    assert subprocess.run(command, stderr=subprocess.PIPE).returncode == 1
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 1])
def test_process_belongs_to_the_test_that_has_started_it(pytester, folder, monkeypatch, processes):
    monkeypatch.delenv("OPENREG_SANITIZER", raising=False)
    monkeypatch.chdir(pytester.path)
    pytester.makepyfile(test_it=TESTS)
    plugin = ("-p", "pytest_openreg", "-p", "no:cacheprovider", "-n", str(processes))
    done = pytester.runpytest_subprocess(*plugin, "--openreg-sanitizer", "-rA")
    done.assert_outcomes(passed=5, failed=3, xfailed=1)
    for name in ("test_races", "test_marked_without_reason", "test_subprocess"):
        done.stdout.fnmatch_lines([f"FAILED *::{name}*"])
    done.stdout.fnmatch_lines(
        [
            "*= openreg sanitizer =*",
            "1: *racing.py:12: *; in process * and 2 more; in test_it.py::test_races and 2 more)",
            "watched: 9 tests; the order of accesses of 8 processes on openreg:0",
            f"{NOT_WATCHED}true alone",
            "*= openreg sanitizer: outside of tests, which fails the run =*",
            "in a process started by test_it.py::test_starts_one_that_is_late, which has ended: *",
        ]
    )
