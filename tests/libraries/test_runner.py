"""The runner of libraries' tests: what it reports, and that it cannot pass without running any."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.declarations import Declared

from libraries import __main__, declared, results, sources
from libraries.results import Row, judge
from libraries.sources import Library

# The name is an installed distribution's, whose version the runner asks for.
MADE = Library(
    "pytest",
    "version.txt",
    "tests/test_*.py",
    "https://host/made",
    cpu_limit=0.5,
    memory=1 << 30,
)

PLAIN = """
import os, unittest
import pytest, torch

class TestMade(unittest.TestCase):
    def test_passes(self):
        assert os.environ["OPENREG_AS_CUDA"] == "1" and "nowhere" not in os.environ["PYTHONPATH"]

        assert torch.cuda.mem_get_info()[1] == 2**30

    def test_skipped(self):
        raise unittest.SkipTest("no")

@pytest.mark.parametrize("x", [1, 2])
def test_fails(x):
    raise OSError(f"offline {x}")

def test_teardown(closing):
    pass

@pytest.fixture
def closing():
    yield
    raise ValueError("late")

def test_crash():
    os.abort()

def test_hang():
    import time
    time.sleep(600)
"""

RACES = """
import pytest
import torch

@pytest.mark.parametrize("value", [1, 2])
def test_race(value):
    x = torch.zeros(1000, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        x.add_(value)

def test_fine():
    pass
"""

# Holds the lock until its input ends.
HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""

PAGE = f"""# Page

| {" | ".join(results.COLUMNS)} |
| --- | --- | --- | ---: | ---: | ---: | ---: |
| another | 1.0 | off | 5 | 5 | 0 | 0 |
| pytest | 1.0 | off | 5 | 5 | 0 | 0 |
| pytest | 1.0 | on | 6 | 6 | 0 | 0 |

The end.
"""


@pytest.fixture
def made(monkeypatch, tmp_path):
    """Runs the runner over a library of the given files; returns its status and output."""
    tree, page = tmp_path / "tree", tmp_path / "page.md"
    (tree / "tests").mkdir(parents=True)
    (tree / "version.txt").write_text(f"version = '{MADE.version}'")
    page.write_text(PAGE)
    monkeypatch.setattr(sources, "BUILD", str(tmp_path / "build"))
    monkeypatch.setattr(sources, "LIBRARIES", (MADE,))
    monkeypatch.setenv("PYTHONPATH", "/nowhere")

    def run(capfd, *arguments, entries=(), races=(), **files):
        monkeypatch.setattr(declared, "DECLARED", {"pytest": entries})
        monkeypatch.setattr(declared, "RACES", {"pytest": races})
        for name, text in files.items():
            (tree / "tests" / f"{name}.py").write_text(text)
        command = ("--library", "pytest", "--source", str(tree), "--jobs", "1", "--page", str(page))
        monkeypatch.setattr(sys, "argv", ["libraries", *command, *arguments])
        code = __main__.main()
        return code, capfd.readouterr().out

    run.tree, run.page = tree, page
    return run


@pytest.mark.slow
def test_library_run_reports_failures_crashes_and_stale_declarations(made, capfd):
    entries = (
        Declared("tests/test_plain.py::test_fails*", "needs a hub", error="offline"),
        Declared("*crash*", "a crash is never declared", error="worker"),
        Declared("tests/test_plain.py::test_gone", "gone"),
    )
    code, out = made(
        capfd,
        *("--limit", "1"),
        entries=entries,
        test_plain=PLAIN,
        test_lost="import nowhere_at_all",
        test_skips="import pytest\ndef test_it():\n    pytest.skip()",
    )
    assert code == 1
    lines = [line for line in out.splitlines() if line.startswith("pytest: ")]
    assert len(lines) == 8, out
    lines = "\n".join(lines)
    assert "tests/test_plain.py::test_teardown: ValueError: late" in lines
    assert "tests/test_plain.py::test_crash: worker 'gw" in lines
    assert "tests/test_plain.py::test_hang: worker 'gw" in lines
    assert "tests/test_lost.py: ModuleNotFoundError: No module named 'nowhere" in lines
    assert "stale declaration: *crash*" in lines
    assert "stale declaration: tests/test_plain.py::test_gone" in lines
    assert "tests/test_lost.py: no test of it passed" in lines
    assert "tests/test_skips.py: no test of it passed" in lines
    version = MADE.version
    row = f"| pytest | {version} | off | 9 | 1 | 2 | 2 |"
    assert made.page.read_text() == PAGE.replace("| pytest | 1.0 | off | 5 | 5 | 0 | 0 |", row)


COUNTED = """
import gc
import time
import weakref
import pytest

@pytest.mark.parametrize("x", [1, 2])
def test_counted(x):
    with open(__file__ + ".runs", "a") as file:
        file.write("x")

def test_counted_too():
    pass

def test_skipped():
    pytest.skip("no card")

held = []

@pytest.mark.xfail(reason="a known fault")
def test_known():
    big = set()
    held.append(weakref.ref(big))
    gc.disable()
    error = OSError()
    raise error

def test_spins():
    assert [ref() for ref in held] == [None]
    while True:
        time.process_time()
"""


@pytest.mark.slow
def test_library_run_goes_on_with_what_has_no_result(made, capfd):
    """Every function has run once before a second parametrization of one does. A test whose name
    begins like that of a finished one is left, too. Nothing keeps what a failed test held."""
    entries = (Declared("*::test_spins", "a card's", error="longer than 0.5 s of CPU time"),)
    assert made(capfd, entries=entries, test_one=COUNTED)[0] == 0
    (kept,) = Path(sources.BUILD).glob("*.jsonl")
    rows = [json.loads(line) for line in kept.open()]
    names = [row["test"].partition("::")[2] for row in rows]
    functions = ["test_counted_too", "test_skipped", "test_known", "test_spins"]
    assert names == ["test_counted[1]", *functions, "test_counted[2]"]
    assert 0.1 < rows[4]["seconds"] < 100
    lines = kept.read_text().splitlines(keepends=True)
    left = ("test_counted_too", "test_counted[2]")
    kept.write_text("".join(line for line in lines if not any(name in line for name in left)))
    for _ in range(2):  # the second has nothing left
        code, out = made(capfd, "--continue", entries=entries)
        assert code == 0, out
        assert re.search(r"6 tests took \d+ s of CPU time\n1 skipped: Skipped: no card\n", out)
        assert "1 skipped: fails as the library expects: a known fault\n" in out
        names = [json.loads(line)["test"].partition("::")[2] for line in kept.open()]
        assert len(names) == 6 and names[4:] == list(left)
    assert (made.tree / "tests" / "test_one.py.runs").read_text() == "xxx"
    assert made(capfd, entries=entries)[0] == 0
    assert (made.tree / "tests" / "test_one.py.runs").read_text() == "xxxxx"


@pytest.mark.slow
def test_library_run_without_any_test_is_an_error(made, capfd):
    code, out = made(capfd, test_empty="x = 1")
    assert code == 1
    assert "pytest ended with status 5" in out and "tests/test_empty.py: no test" in out


@pytest.mark.slow
def test_library_race_fails_under_the_sanitizer_alone(made, capfd):
    races = (Declared("*::test_race*1*", "a race of the library's", error="DataRaceError"),)
    assert made(capfd, races=races, test_races=RACES)[0] == 0
    code, out = made(capfd, "--sanitizer", races=races)
    (line,) = [line for line in out.splitlines() if line.startswith("pytest: ")]
    assert code == 1 and "tests/test_races.py::test_race[2]: " in line and "DataRaceError" in line


def test_declaration_covers_the_error_that_it_names():
    rows = {
        "test_a.py::test_x[1-y]": Row("failed", "OSError: offline"),
        "test_a.py::test_y": Row("passed"),
    }
    one = Declared("*_x[1-y] test_a.py::test_x*", "a hub", error="offl.ne")
    assert judge(rows, ["test_a.py"], (one,)) == ([], {"test_a.py::test_x[1-y]"})
    by_chance = Declared("test_a.py::test_y", "a race", always=False)
    assert judge(rows, ["test_a.py"], (one, by_chance))[0] == []
    other = Declared("test_a.py::test_x*", "why", error="ValueError")
    wrong, covered = judge(rows, ["test_a.py"], (other,))
    assert covered == set() and wrong == [
        "test_a.py::test_x[1-y]: OSError: offline",
        "stale declaration: test_a.py::test_x*: none of them fails (why)",
    ]


def test_library_tree_is_found_or_the_setting_refused(made, monkeypatch, tmp_path):
    assert sources.find_tree(MADE, str(made.tree)) == str(made.tree)
    assert sources.find_tree(MADE, "") is None
    with pytest.raises(SystemExit, match="SOURCE=/nowhere: there is no such folder"):
        sources.find_tree(MADE, "/nowhere")
    how = sources.how_to_get(MADE)
    assert f"--branch v{MADE.version} https://host/made " in how and "SOURCE=folder" in how
    with pytest.raises(SystemExit, match=r"there is no tests/test_\*.py"):
        list(MADE.paths(made.tree))
    for stated in (f"1{MADE.version}", f"{MADE.version}.1", f"{MADE.version}rc1"):
        (made.tree / "version.txt").write_text(stated)
        with pytest.raises(SystemExit, match="which is installed"):
            sources.find_tree(MADE, str(made.tree))
    (made.tree / "version.txt").unlink()
    with pytest.raises(SystemExit, match="is no source tree of pytest"):
        sources.find_tree(MADE, str(made.tree))


def test_library_run_without_a_tree_names_the_remedy(made, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["libraries"])
    assert __main__.main() == 0
    assert "git clone --depth 1" in capfd.readouterr().out
    monkeypatch.setattr(sys, "argv", ["libraries", "--library", "pytest"])
    assert __main__.main() == 1, "it was asked for"


def test_source_distribution_is_unpacked_once(made, monkeypatch, tmp_path):
    by_pip = Library("pytest", "version.txt", "tests/test_*.py")

    def download(command, check):
        folder = command[command.index("--dest") + 1]
        shutil.copytree(made.tree, tmp_path / f"pytest-{MADE.version}")
        shutil.make_archive(
            f"{folder}/pytest-{MADE.version}", "gztar", tmp_path, f"pytest-{MADE.version}"
        )
        monkeypatch.setattr(subprocess, "run", None)

    monkeypatch.setattr(subprocess, "run", download)
    for _ in range(2):
        tree = sources.find_tree(by_pip, "")
        assert tree == f"{sources.BUILD}/pytest-{MADE.version}"


def test_library_runs_at_once_are_refused(made, capfd):
    os.makedirs(sources.BUILD)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, os.path.join(sources.BUILD, "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        holder.stdout.readline()
        with pytest.raises(SystemExit, match="in use by another run"):
            made(capfd)
        holder.stdin.close()
