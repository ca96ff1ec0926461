import html
import os
import re
import signal
import subprocess
import sys
import tempfile

import pytest
import torch

from torch_openreg import _run_streams

MODULE = ("-m", "torch_openreg")
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.mark.slow
def test_command_prints_devices_memory_lanes_versions_and_settings(run):
    done = run("", {"OPENREG_DEVICE_COUNT": "3"}, arguments=MODULE, fresh=True)
    assert (done.code, done.err) == (0, "")
    for text in (
        "Devices: 3",
        "openreg:2  /openreg:2, made by 'simulated'",
        "0 started, at most ",
        "torch_openreg  ",
        f"torch          {torch.__version__}",
        "OPENREG_DEVICE_COUNT = 3  (environment)",
        "OPENREG_POISON = 0  (default)",
        "openreg: simulated, priority 0, serves, makes /openreg:0, /openreg:1, /openreg:2",
    ):
        assert text in done.out, done.out
    assert "free of" in done.out


def test_command_marks_a_rejected_setting(run):
    done = run("", {"OPENREG_DEVICE_COUNT": "abc"}, arguments=MODULE)
    assert done.code == 0
    assert "Devices: 0" in done.out
    assert "(environment (rejected))" in done.out
    assert len(done.err.splitlines()) == 1


def test_command_names_a_plugin_that_does_not_load(run):
    done = run("", {"OPENREG_PLUGIN": "/nowhere/libnothing.so"}, arguments=MODULE)
    assert done.code == 0
    assert "Devices: none" in done.out
    assert "/nowhere/libnothing.so" in done.out
    assert "Settings" in done.out


def test_help_shows_the_usage(run):
    done = run("", arguments=(*MODULE, "--help"))
    assert done.code == 0 and "usage: python -m torch_openreg" in done.out
    assert sys.version_info >= (3, 10)


# ---- demo ----


@pytest.mark.slow
@pytest.mark.racy
def test_demo_finds_the_race_in_the_wrong_loop_only(run):
    done = run("", arguments=(*MODULE, "demo"))
    assert (done.code, done.err) == (0, "")
    wrong, right = done.out.split("With the wait (waits=True)")
    for text in (
        "error: data race on openreg:0 over x, 2048 bytes of float32",
        "stream copies, made at ",
        "compute.wait_stream(copies)",
        "wait_stream(",
        "A ..> B is missing: ",
        "21 schedules of ",
    ):
        assert text in wrong, done.out
    assert "site-packages" not in wrong
    assert "one result" not in wrong
    for text in ("nothing to report of 8 steps on openreg:0.", "tasks on 2 streams, one result"):
        assert text in right, done.out
    own = done.out.partition("):\n")[2]  # after the place of the demo's file
    assert max(map(len, own.replace(os.getcwd(), "").splitlines())) <= 100, own


# ---- run ----

RACY = """
import sys
import torch

a = torch.ones(1000, device="openreg")
side = torch.Stream(device="openreg")
if "right" in sys.argv:
    side.wait_stream(torch.accelerator.current_stream())
for _ in range(8):
    with side:
        a.mul_(2)
    if "right" in sys.argv:
        torch.accelerator.current_stream().wait_stream(side)
    a.add_(1)
    if "right" in sys.argv:
        side.wait_stream(torch.accelerator.current_stream())
torch.accelerator.current_stream().wait_stream(side)
print(__name__, sys.argv[1:], a.sum().item())
"""


@pytest.fixture
def script(tmp_path):
    def write(text, name="script.py"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.slow
@pytest.mark.racy
def test_run_sums_up_a_race_and_schedules_that_differ(run, script):
    path = script(RACY)
    page = f"{path}.html"
    options = ("--sanitize", "--seeds", "2", "--report", page)
    done = run("", arguments=(*MODULE, "run", *options, path, "--fast", "x"))
    assert done.code == 1, done
    assert done.out.startswith("__main__ ['--fast', 'x'] ")
    assert "data race on openreg:0 over" in done.err  # when it is found
    assert "torch_openreg: sanitizer: " in done.err
    assert "runpy" not in done.err and "torch_openreg/_run.py" not in done.err
    assert re.search(r"  1: \S*script.py:5 and \S*script.py:11: ", done.err) and "  2: " in done.err
    assert " of 2 end and print as 'early' does on openreg:0\n" in done.err
    different = [line for line in done.err.splitlines() if "(line 1)" in line]
    assert different and all("instead of" in line for line in different), done.err
    replay, last = done.err.splitlines()[-2:]
    assert last == f"torch_openreg: report: {page}"
    with open(page) as file:
        text = html.unescape(file.read())
    for shown in ("data race", "Schedules", replay.partition("to replay: ")[2], different[0][20:]):
        assert shown in text, shown
    assert replay.startswith("torch_openreg: to replay: OPENREG_SCHEDULE_SEED=")
    seed = replay.split("SEED=")[1].split()[0]
    again = run(
        "", {"OPENREG_SCHEDULE_SEED": seed}, arguments=(*MODULE, "run", path, "--fast", "x")
    )
    assert repr(again.out.strip()) in done.err


@pytest.mark.racy
def test_run_shows_a_mistake_once_however_often_it_is_made(run, script):
    text = """
import torch
x = torch.zeros(1000, device="openreg")
for step in range(9):
    x.add_(1)
    side = torch.Stream(device="openreg")
    with side:
        y = x * 2
    torch.accelerator.current_stream().wait_stream(side)
torch.openreg.sanitizer.disable()
"""
    path = script(text)
    done = run("", arguments=(*MODULE, "run", "--sanitize", "--report", f"{path}-pages", path))
    assert (done.code, done.out) == (1, "")
    assert len(os.listdir(f"{path}-pages")) == 2
    assert done.err.count("Nothing orders the second") == 1
    first, mistake, gap, _ = done.err.splitlines()[-4:]
    assert first.startswith("torch_openreg: sanitizer: 1 mistake found in ")
    assert re.search(r"  1: \S*script.py:5 and \S*script.py:8: ", mistake)
    assert mistake.endswith(" (9 reports, by mul, add_)")
    assert gap.endswith("not watched: what came after the program had switched the sanitizer off")


@pytest.mark.slow
def test_run_of_a_right_program_is_quiet(run, script):
    path = script(RACY)
    done = run("", arguments=(*MODULE, "run", "--sanitize", "--seeds", "1", path, "right"))
    assert (done.code, done.out) == (0, "__main__ ['right'] 511000.0\n")
    assert done.err == (
        "torch_openreg: sanitizer: no mistakes found in the order of accesses of 1 process on "
        "openreg:0\n"
        "torch_openreg: schedules: 1 of 1 end and print as 'early' does on openreg:0\n"
    )


PROGRAM = """
import os, sys, torch
os.mkdir("running")  # fails beside another run
steps = int(input("steps? ")) + int(sys.stdin.readline())
os.rmdir("running")
if os.environ.get("OPENREG_SCHEDULE_SEED") == "1":
    raise ValueError(f"lost at {object()}")
print("steps", steps)
"""


def run_seeds(path, seeds, *options, flags=(), **how):
    command = [sys.executable, *flags, *MODULE, "run", "--seeds", str(seeds), *options, path]
    env = {name: value for name, value in os.environ.items() if not name.startswith("OPENREG_")}
    env |= how.pop("env", {})
    how = {"input": "", **how}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, **how)
    return done.returncode, done.stdout, done.stderr.splitlines()


@pytest.mark.slow
def test_seeds_read_the_programs_input_and_report_each_end(script, tmp_path):
    path = script(PROGRAM)
    code, out, told = run_seeds(path, 2, cwd=tmp_path, input="3\n4\n5\n")
    assert (code, out) == (1, "steps? steps 7\n")
    same = "schedules: 1 of 2 end and print as 'early' does; its process used no device"
    assert told[0] == f"torch_openreg: {same}"
    assert told[1].startswith("torch_openreg:   1: exit status 1 (ValueError: lost at <object")
    assert told[1].endswith(f" at {path}:7) instead of exit status 0")


@pytest.mark.slow
def test_seeds_of_a_program_that_cannot_run_twice_are_not_compared(script, tmp_path):
    path = script("import os\nos.mkdir('out')\n")
    code, _, (nothing, why, _) = run_seeds(path, 3, cwd=tmp_path)
    assert code == 1
    assert nothing.startswith("torch_openreg: schedules: none was compared: under 'early'")
    assert f"exit status 1 (FileExistsError: [Errno 17] File exists: 'out' at {path}:2)" in why


@pytest.mark.slow
def test_seeds_of_a_program_that_goes_on_where_it_was_are_not_compared(script, tmp_path):
    text = "with open('log', 'a+') as log:\n    log.write('x')\n    print(log.tell())\n"
    code, out, told = run_seeds(script(text), 1, cwd=tmp_path)
    assert (code, out) == (1, "1\n")
    assert told[:2] == [
        "torch_openreg: schedules: none was compared: 'early', run twice, does not do the same:",
        "torch_openreg:   prints '4' instead of '2' (line 1)",
    ]


READS = """
import os, subprocess, sys
assert "error::ResourceWarning" not in sys.warnoptions  # gone by -O
read = [os.read(0, 2).decode(), subprocess.check_output(["head", "-c", "2"], text=True)]
with open("/dev/fd/0", "rb", buffering=0) as stdin:
    read.append(stdin.read(2).decode())
with open(0, buffering=1, closefd=False) as stdin:
    read += [sys.__stdin__.readline(), stdin.readline()]
print(read[:4])
if os.environ.get("OPENREG_SCHEDULE_SEED") == "1":
    print("lost")
if "error::ResourceWarning" not in sys.warnoptions:
    print("no option -W")
"""


@pytest.mark.slow
def test_seeds_have_the_interpreters_options_and_all_input(script):
    flags = ("-O", "-W", "error::ResourceWarning")
    code, out, told = run_seeds(script(READS), 2, flags=flags, input="1\n2\n3\n4\n5\n")
    assert (code, out) == (1, "['1\\n', '2\\n', '3\\n', '4\\n']\n")
    assert told[0].startswith("torch_openreg: schedules: 1 of 2 end and print as 'early' does")
    assert told[1] == "torch_openreg:   1: prints 2 lines instead of 1"
    assert " python -O " in told[2] and " -Werror::ResourceWarning -m torch_openreg " in told[2]


@pytest.mark.slow
def test_seeds_read_what_was_read_from_a_terminal(script):
    keyboard, terminal = os.openpty()
    try:
        os.write(keyboard, b"1\n2\n3\n")
        text = "import sys\nprint(int(input()) + int(sys.__stdin__.readline()))"
        code, out, told = run_seeds(script(text), 1, input=None, stdin=terminal)
    finally:
        os.close(keyboard)
        os.close(terminal)
    assert (code, out) == (0, "3\n"), told  # int() of nothing raises


@pytest.mark.slow
def test_seeds_read_a_file_from_where_the_program_began(script, tmp_path):
    text = "import os, sys\nsys.exit(os.read(0, 2) + os.pread(0, 9, 0) != b'2\\n1\\n2\\n3\\n')"
    (tmp_path / "input").write_text("1\n2\n3\n")
    with open(tmp_path / "input") as stdin:
        os.lseek(stdin.fileno(), 2, os.SEEK_SET)
        code, _, told = run_seeds(script(text), 1, input=None, stdin=stdin)
        assert (code, os.read(stdin.fileno(), 9)) == (0, b"3\n"), told


@pytest.mark.slow
def test_seeds_compare_nothing_of_a_program_whose_end_is_not_known(script):
    read, write = os.pipe()  # nothing waits for what is not written
    try:
        code, out, told = run_seeds(
            script("import os\nos.write(1, b'done')\nos._exit(0)"), 3, input=None, stdin=read
        )
    finally:
        os.close(read)
        os.close(write)
    assert (code, out) == (1, "done")
    nothing = "schedules: none was compared: how the program ends by itself is not known:"
    assert told[0] == f"torch_openreg: {nothing}"
    assert told[1] == (
        "torch_openreg:   exit status 0 (left by os._exit() or exec(), so that more is not known)"
    )


@pytest.mark.parametrize(
    ("program", "read", "out"),
    [
        ("print(len(sys.stdin.read()))", 20000, b"20000\n"),
        ("print(len(os.read(0, 7)))", 7, b"7\n"),
        ("sys.stdout.write(str(len(os.read(0, 7))) * 300000); os.fork() or time.sleep(9)", 7, None),
        ("print(os.read(0, 7))\nos._exit(5)", 7, b"b'abababa'\n"),
    ],
)
def test_seeds_capture_what_a_program_has_read_and_printed(program, read, out):
    command = [sys.executable, "-S", "-c", f"import os, sys, time\n{program}"]
    with tempfile.TemporaryFile() as source:
        source.write(b"ab" * 10000)
        source.seek(0)
        done = _run_streams._Run(command, source.fileno(), captures=True)
    assert (bytes(done.read), bytes(done.err)) == ((b"ab" * 10000)[:read], b"")
    assert done.out == (out or b"7" * 300000)


LEAVES_A_PROCESS = """
import os, subprocess, sys
process = subprocess.Popen(["sleep", "600"])
with open("left", "a") as left:
    print(process.pid, file=left)
seed = os.environ.get("OPENREG_SCHEDULE_SEED")
print("warning", seed == "1", file=sys.stderr)
sys.stdout.buffer.write(b"\\xc0" if seed == "1" else b"\\xc1")
"""


@pytest.mark.slow
def test_seeds_compare_bytes_and_leave_a_process_of_the_program_alone(script, tmp_path):
    path = script(LEAVES_A_PROCESS)
    try:
        with open(tmp_path / "out", "w") as out:
            command = [sys.executable, *MODULE, "run", "--seeds", "2", path]
            done = subprocess.run(
                command, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=out, stderr=out, timeout=300
            )
    finally:
        for pid in (tmp_path / "left").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
    told = (tmp_path / "out").read_bytes().decode(errors="replace").splitlines()
    assert done.returncode == 1
    assert told[-3:-1] == [
        "torch_openreg:   1: prints b'\\xc0' instead of b'\\xc1' (line 1)",
        "torch_openreg:   stderr, which does not count, differs from that of 'early': 1",
    ]


# Prints 5 where the side stream comes second, as under "early", and 0 under seed 1.
DIFFERS = """
import torch
x, side = torch.zeros(4, device="openreg"), torch.Stream(device="openreg")
torch.accelerator.synchronize()
x.add_(1)
with side:
    y = x * 5
side.synchronize()
print(int(y[0].item()))
"""


TESTS = """
import torch

def test_differs():
    x, side = torch.zeros(4, device="openreg"), torch.Stream(device="openreg")
    torch.accelerator.synchronize()
    x.add_(1)
    with side:
        y = x * 5
    side.synchronize()
    assert y[0].item() == 5

def test_ok():
    pass
"""


@pytest.mark.slow
def test_seeds_compare_tests_by_outcome_and_print_a_command_that_repeats(script, tmp_path):
    name = "test_it.py"
    script(TESTS, name)
    options = ("-m", "pytest", "-p", "no:cacheprovider")
    variables = {"OPENREG_POISON": "1", "PYTHONPATH": ROOT}
    env = {**os.environ, **variables}
    code, _, told = run_seeds(name, 2, *options, cwd=tmp_path, env=variables)
    assert code == 1
    assert [line.replace(" -B", "") for line in told] == [
        "torch_openreg: schedules: 1 of 2 end as 'early' does, by the outcomes of 2 tests "
        "(no output compared) on openreg:0",
        "torch_openreg:   1: test_it.py::test_differs failed instead of passed",
        "torch_openreg: to replay: OPENREG_SCHEDULE_SEED=1 OPENREG_POISON=1 "
        "python -m torch_openreg run -m pytest -p no:cacheprovider test_it.py",
    ]
    replay = told[-1].partition("to replay: ")[2].replace("python", sys.executable, 1)
    fresh = {key: value for key, value in env.items() if not key.startswith("OPENREG_")}
    again = subprocess.run(
        replay, shell=True, cwd=tmp_path, env=fresh, capture_output=True, text=True, check=False
    )
    assert again.returncode == 1 and "1 failed, 1 passed" in again.stdout


@pytest.mark.slow
def test_seeds_come_before_a_tape_of_the_environment(script):
    code, out, told = run_seeds(script(DIFFERS), 2, env={"OPENREG_SCHEDULE_TAPE": "0"})
    assert (code, out) == (1, "5\n")
    assert told[1] == "torch_openreg:   1: prints '0' instead of '5' (line 1)"
    assert " env -u OPENREG_SCHEDULE_TAPE OPENREG_SCHEDULE_SEED=1 python " in told[2]


@pytest.mark.parametrize(
    ("options", "variables", "first_line"),
    [
        pytest.param(["--as-cuda"], {"CUDA_LAUNCH_BLOCKING": "1"}, "", marks=pytest.mark.slow),
        ([], {}, "import os\nos.environ['OPENREG_LAUNCH_BLOCKING'] = '1'\n"),
    ],
    ids=["cuda", "program"],
)
def test_seeds_compare_nothing_where_launches_block(script, options, variables, first_line):
    code, _, told = run_seeds(script(first_line + DIFFERS), 2, *options, env=variables)
    assert code == 1
    assert told[0].startswith("torch_openreg: schedules: none was compared: each launch waits")
    assert "LAUNCH_BLOCKING" in told[1] and len(told) == 2


def test_run_passes_a_module_its_own_options(run, script, tmp_path, monkeypatch):
    script(RACY, "racy_module.py")
    monkeypatch.chdir(tmp_path)
    done = run("", arguments=(*MODULE, "run", "-m", "racy_module", "right"))
    assert (done.code, done.out, done.err) == (0, "__main__ ['right'] 511000.0\n", "")


@pytest.mark.parametrize(
    ("text", "code", "err"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("import sys; sys.exit('all is lost')", 1, "all is lost\n"),
        ("pass", 0, ""),
    ],
)
def test_run_has_the_status_of_the_program(run, script, text, code, err):
    done = run("", arguments=(*MODULE, "run", script(text)))
    assert (done.code, done.out, done.err) == (code, "", err)


@pytest.mark.parametrize("options", [[], ["--sanitize"]])
def test_run_lets_a_forked_child_end_as_otherwise(run, script, options):
    text = "import os, torch\ntorch.ones(3, device='openreg')\nprint(os.fork() and os.wait()[1])\n"
    done = run("", arguments=(*MODULE, "run", *options, script(text)))
    assert (done.code, sorted(done.out.split())) == (0, ["0", "0"]), done.err
    assert len(done.err.splitlines()) == len(options)


def test_run_shows_a_traceback_that_begins_in_the_program(run, script):
    path = script("import torch\n1 / 0\n")
    done = run("", arguments=(*MODULE, "run", path))
    assert done.code == 1
    assert done.err.splitlines()[:2] == [
        "Traceback (most recent call last):",
        f'  File "{path}", line 2, in <module>',
    ]


HOOK = """
import sys
import neighbour
def hook(kind, error, trace):
    print("hook", kind.__name__, error, trace.tb_lineno, neighbour.name, file=sys.stderr)
    raise neighbour.error
sys.excepthook = hook
1 / 0
"""


@pytest.mark.parametrize(
    ("error", "code", "last"),
    [("SystemExit(7)", 7, "hook "), ("ValueError()", 1, "ZeroDivisionError: ")],
)
def test_run_of_a_link_finds_its_neighbours_and_excepthook(
    run, script, tmp_path, error, code, last
):
    script(f"name = 'near'\nerror = {error}\n", "neighbour.py")
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "linked.py"
    link.symlink_to(script(HOOK))
    done = run("", arguments=(*MODULE, "run", str(link)))
    assert done.code == code
    lines = done.err.splitlines()
    assert lines[0] == "hook ZeroDivisionError division by zero 8 near"
    assert lines[-1].startswith(last) and ("Error in sys.excepthook:" in lines) == (code == 1)


@pytest.mark.racy
def test_run_has_settings_as_options(run, script):
    text = "import torch\nx = torch.empty(9, device='openreg') + 1\n"
    text += "print(torch.openreg.device_count(), x.isnan().all().item())\n"
    options = ("--sanitize", "--initcheck", "--poison", "--device-count", "3")
    done = run("", arguments=(*MODULE, "run", *options, script(text)))
    assert (done.code, done.out) == (1, "3 True\n") and "nothing has written" in done.err


@pytest.mark.slow
def test_run_waits_at_the_end_in_spite_of_a_sync_debug_mode(run, script):
    text = "import torch\ntorch.cuda.set_sync_debug_mode('error')\n"
    text += "x = torch.ones(4, device='cuda')\nprint('done')\n"
    done = run("", arguments=(*MODULE, "run", "--as-cuda", script(text)), fresh=True)
    assert (done.code, done.out, done.err) == (0, "done\n", "")


def test_run_reports_a_kernels_error_without_a_wait(run, script):
    text = (
        "import torch\n"
        "x = torch.zeros(3, device='openreg')\n"
        "x[torch.full((1,), 9, device='openreg')]\n"
    )
    done = run("", arguments=(*MODULE, "run", script(text)))
    assert done.code == 1
    assert "IndexError: index 9 is out of bounds" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which program?"),
        (["/nowhere/at/all.py"], "there is no file '/nowhere/at/all.py'"),
        (["--seeds", "-1", "x.py"], "--seeds: a number of schedules, at least 1, not -1"),
        (["--seeds", "0", "x.py"], "--seeds: a number of schedules, at least 1, not 0"),
        (
            ["--seeds", "2", "--jobs", "0", "x.py"],
            "--jobs: a number of schedules at once",
        ),
        (["--jobs", "2", "x.py"], "--jobs belongs to --seeds"),
        (["--seeds", "many", "x.py"], "invalid int value: 'many'"),
        (["--report", "x.html", __file__], "--report belongs to --sanitize or --seeds"),
        (["--initcheck", __file__], "--initcheck belongs to --sanitize"),
        (["--device-count", "x", __file__], "OPENREG_DEVICE_COUNT='x' is refused"),
    ],
)
def test_run_refuses_bad_arguments(run, arguments, message):
    done = run("", arguments=(*MODULE, "run", *arguments))
    assert done.code == 2 and message in done.err
