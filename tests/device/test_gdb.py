"""csrc/openreg/gdb_openreg.py: what gdb says of a process that stands still, and of its core dump.

The process is the helper gdb_parked of the C tests (tests/c/test_gdb.c).
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(os.environ.get("OPENREG_C_TESTS") or ROOT / "build/ctest/debug/run-tests")
SCRIPT = ROOT / "csrc/openreg/gdb_openreg.py"
LIMIT = 60  # seconds
PARKED = ("set disable-randomization off", "break gdbStopsHere", "run gdb_parked")
QUEUE = "print *('host_wait.c'::hosts)->goal.stream"
pytestmark = pytest.mark.simulated_device("a program of the C tests has it")


def gdb(*commands, program=PROGRAM, core=None):
    """What gdb says of all of the commands, errors too; and of each."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OPENREG_", "DEBUGINFOD_"))}
    # The helper stands still for as long as gdb takes; little memory makes a small dump.
    kept |= {"OPENREG_TEST_TIMEOUT_SCALE": "0", "OPENREG_DEVICE_MEMORY": "1M"}
    # A command that is given again has a space more.
    line = ["gdb", "-nx", "-batch", "-ex", f"source {SCRIPT}"]
    for command in commands:
        line += ["-ex", "echo \\n<<<\\n", "-ex", command]
    done = subprocess.run(
        [*line, program, *filter(None, [core])],
        env=kept,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    parts = [part.strip() for part in done.stdout.split("\n<<<\n")]
    return done.stdout, dict(zip(commands, parts[1:], strict=False))


@pytest.fixture(scope="module", autouse=True)
def usable_gdb():
    if not shutil.which("gdb"):
        pytest.skip("gdb is not installed")
    said, _ = gdb("python print('has' + ' Python')", "run", program="/bin/true")
    if "has Python" not in said or "exited normally" not in said:
        pytest.skip(f"gdb has no Python, or may not run a program here:\n{said}")
    assert PROGRAM.exists(), f"there is no {PROGRAM}; `make ctest` builds it"


@pytest.fixture(scope="module")
def parked(tmp_path_factory):
    """What each command says where the helper stands still; and where its core dump is."""
    core = tmp_path_factory.mktemp("gdb") / "core"
    everything, said = gdb(
        *PARKED,
        "print/x *parked",
        "openreg streams",
        "openreg streams all",
        "openreg hosts",
        QUEUE,
        "print *('host_wait.c'::hosts)",
        "print *('host_wait.c'::hosts)->goal.stream->waits_for",
        "print orStreamTable.lock",
        f"generate-core-file {core}",
        "call (void)orMutexLock(&orStreamTable.lock)",
        "print  orStreamTable.lock",
        "call (void)orMutexUnlock(&orStreamTable.lock)",
        "openreg streams some",
        "openreg hosts some",
        "openreg",
        "continue",
        "openreg  streams",
        "openreg  hosts",
        # Not `continue`: gdb 13 may hang as a process with several threads exits.
        "kill",
        "openreg   streams",
    )
    assert "hit Breakpoint 1" in said[PARKED[-1]], everything
    said["core"] = core
    said |= dict(re.findall(r"(\w+) = (0x[0-9a-f]+)", said["print/x *parked"]))
    yield said
    core.unlink(missing_ok=True)


def names(said):
    gated = f"stream {said['gated']} of openreg:1"
    return {
        "gated": gated,
        "after": f"stream {said['after']} of openreg:0",
        "running": f"stream {said['running']} of openreg:0",
        "gate": f"external event {said['gate']} of openreg:0",
        "record": f"event {said['record']}, recorded as task 5 of {gated}",
    }


def expected_streams(said, worker):
    name = names(said)
    waits = "waiting, priority -2, 0 tasks completed, 1 to go; waits for"
    return f"""\
{name["gated"]}: waiting, priority 0, 1 tasks completed, 24 to go; waits for {name["gate"]}, pending
  task 2, orStreamWaitEvent: {name["gate"]}
  task 3, kernel second
  task 4, host function orLaunchHostFunc
  task 5, orEventRecord: event {said["record"]}
  task 6, kernel later
  task 7, kernel later
  task 8, kernel later
  task 9, kernel later
  task 10, kernel later
  task 11, kernel later
  ... and 14 more
{name["after"]}: {waits} {name["record"]}, pending
  task 1, orStreamWaitEvent: {name["record"]}
{name["running"]}: running, priority 0, 0 tasks completed, 1 to go; on worker {worker}
  task 1, kernel test
2 idle, which `openreg streams all` shows"""


WORKER = r"(?<=on worker )(\d), thread \d+ \(LWP \d+\)"


def test_variables_that_the_script_reads_exist_in_the_core():
    """Most are read in a state that the helper is not in."""
    read = re.findall(r'\b(?:shared|static)\("(\w+)"', SCRIPT.read_text())
    core = "\n".join(file.read_text() for file in SCRIPT.parent.rglob("*.c"))
    assert read and [name for name in read if not re.search(rf"\b{name}\b.*[;=]", core)] == []


def test_gdb_lists_streams_with_work(parked):
    shown = parked["openreg streams"]
    worker = re.search(WORKER, shown)
    assert worker, shown
    assert shown == expected_streams(parked, worker[0])


def test_gdb_lists_idle_streams_with_all(parked):
    shown = parked["openreg streams all"].splitlines()
    for device in (0, 1):
        idle = "idle, priority 0, 0 tasks completed, 0 to go"
        assert f"the default stream of openreg:{device}: {idle}" in shown
    assert [line for line in shown if line.startswith("  task 25,")] == ["  task 25, kernel later"]


def test_gdb_lists_waiting_host_threads(parked):
    waits = rf"thread \d+ \(LWP \d+\): waits for task 25 of {names(parked)['gated']}"
    assert re.fullmatch(rf"{waits}, for \d+\.\d s", parked["openreg hosts"])


def test_gdb_prints_queues_and_sleepers(parked):
    shown = parked[QUEUE]
    begins = f"$2 = {names(parked)['gated']}: waiting, priority 0, 1 tasks completed, 24 to go"
    assert shown.startswith(begins)
    assert "lock = OR_RANK_STREAM, free" in shown
    assert "task 3 = kernel second" in shown
    assert "waits for task 25 of" in parked["print *('host_wait.c'::hosts)"]
    cell = parked["print *('host_wait.c'::hosts)->goal.stream->waits_for"]
    # The event's and the queued wait's.
    assert cell.endswith(f"{names(parked)['gate']}: pending, 2 references")


def test_gdb_prints_mutex_rank_and_holder(parked):
    assert parked["print orStreamTable.lock"].endswith("= OR_RANK_HANDLES, free")
    held = parked["print  orStreamTable.lock"]
    assert re.search(r"= OR_RANK_HANDLES, held by thread 1 \(LWP \d+\)$", held)


def test_gdb_lets_the_process_go_on(parked):
    assert "hit Breakpoint 1" in parked["continue"]
    assert parked["openreg  streams"] == "no stream has work"
    assert parked["openreg  hosts"] == "no host thread sleeps for a device"


def test_gdb_says_that_there_is_no_process(parked):
    assert parked["openreg   streams"] == "openreg: there is no process and no core dump"


def test_gdb_commands_refuse_bad_arguments(parked):
    refused = parked["openreg streams some"]
    assert refused == "openreg: streams takes `all` or nothing, not `some`"
    assert parked["openreg hosts some"] == "openreg: hosts takes no argument, not `some`"
    assert parked["openreg"] == "openreg: say `openreg streams` or `openreg hosts`"


def test_gdb_reads_a_core_dump(parked):
    _, said = gdb("openreg streams", "openreg hosts", core=parked["core"])
    # A dump has no names of threads, and no clock.
    shown = re.sub(r"(?<=on worker )\d", "N", said["openreg streams"])
    assert shown == expected_streams(parked, "N")
    waits = rf"thread \d+ \(LWP \d+\): waits for task 25 of {names(parked)['gated']}"
    assert re.fullmatch(waits, said["openreg hosts"])


def test_gdb_names_missing_debug_information(tmp_path):
    strip = shutil.which("strip")
    if not strip:
        pytest.skip("strip is not installed")
    (library,) = PROGRAM.parent.glob("libopenreg.so.*[0-9]")
    program = shutil.copy(PROGRAM, tmp_path)
    subprocess.run([strip, "-o", tmp_path / library.name, library], check=True)
    _, said = gdb(*PARKED, "openreg streams", "openreg hosts", program=program)
    for command, what in (("streams", "orStreamTable"), ("hosts", "hosts of host_wait.c")):
        missing = f"{library.name} has no debug information about {what}: build it with `CFLAGS=-g"
        assert missing in said[f"openreg {command}"]


def test_gdb_names_a_missing_library():
    _, said = gdb("starti", "openreg streams", program="/bin/true")
    assert "openreg: no libopenreg.so is loaded" in said["openreg streams"]
