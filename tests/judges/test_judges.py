"""The judge itself, as one that passes everything would never be noticed; and the fast part of
TorchCTS, where the package is installed."""

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from judges import __main__ as judges

MADE = {
    "errors/test_made.py": """
        import os, signal, time
        import pytest

        @pytest.fixture
        def fixture():
            yield
            raise RuntimeError("not given back")

        def test_passes(): pass
        def test_skipped(): pytest.skip("not here")
        def test_fails(): assert False, "wrong value"
        def test_dies(): os.write(2, b"last words"); os.kill(os.getpid(), signal.SIGSEGV)
        def test_exits(): os._exit(0)
        def test_hangs(): time.sleep(100)
        def test_fixture(fixture): pass
        @pytest.mark.parametrize("name", ["a b", "x*[y]"])
        def test_names(name): pass
        """,
    "empty/test_empty.py": "",
    "unread/test_unread.py": "import nowhere",
    "gone/test_gone.py": "import os; os._exit(0)",
}


@pytest.fixture
def suite(tmp_path, monkeypatch):
    monkeypatch.setattr(judges, "BUILD", str(tmp_path / "build"))
    for name, text in MADE.items():
        path = tmp_path / name
        path.parent.mkdir()
        path.write_text(textwrap.dedent(text))
    return str(tmp_path)


@pytest.mark.slow
def test_judge_reports_a_suite_that_fails_crashes_or_hangs(suite, capsys):
    files = " ".join(sorted(name.partition("/")[0] for name in MADE))
    options = SimpleNamespace(files=files, fast=False, jobs=2, limit=2, page="")
    wrong = judges.execute(options, suite, {"why": ("errors/test_made.py::test_fails",)})
    said = {line.partition("\n")[0]: line for line in wrong}
    path = "errors/test_made.py::test_"
    assert list(said) == [
        f"{path}dies crashed: SIGSEGV",
        f"{path}exits crashed: status 0",
        f"{path}fixture failed: RuntimeError: not given back",
        f"{path}hangs crashed: status 1",
        "empty: status 5, outside of any test",
        "gone: status 0, outside of any test",
        "unread: status 2, outside of any test",
    ]
    assert "last words" in said[f"{path}dies crashed: SIGSEGV"]
    assert "in test_hangs" in said[f"{path}hangs crashed: status 1"], "its stack"
    assert "nowhere" in said["unread: status 2, outside of any test"]
    assert re.search(r"^errors +9 +3 +1 +1 +4 +0$", capsys.readouterr().out, re.MULTILINE)


RESULTS = {
    "a/test_a.py::test_x[float-[1]]": ["failed", "wrong"],
    "a/test_a.py::test_x[int]": ["passed", ""],
    "a/test_b.py::test_y": ["crashed", "SIGSEGV"],
}
NAMES = ("a/test_a.py::test_x[float-*]", "a/test_b.py::test_y")


def test_judge_accepts_only_declared_failures():
    assert judges.judge(RESULTS, {"why": NAMES}, True)[0] == []
    (wrong,) = judges.judge(RESULTS, {"why": NAMES[:1]}, True)[0]
    assert wrong == "a/test_b.py::test_y crashed: SIGSEGV"
    wrong, covered = judges.judge(RESULTS, {"why": ("a/test_a.py::test_x[f*[1]]", "*_y")}, True)
    assert wrong == [] and list(covered.values()) == [["a/test_a.py::test_x[float-[1]]", NAMES[1]]]


def test_judge_reports_a_stale_declaration():
    for pattern in ("a/test_a.py::test_x[int]", "a/test_a.py::test_x[float-?1]"):
        (wrong,) = judges.judge(RESULTS, {"why": (*NAMES, pattern)}, False)[0]
        assert wrong.startswith(f"stale declaration: {pattern}: ")
    other = {"why": (*NAMES, "c/test_c.py::test_z")}
    assert judges.judge(RESULTS, other, False)[0] == [], "of a file that was not asked for"
    assert len(judges.judge(RESULTS, other, True)[0]) == 1


def test_judge_without_the_package_runs_nothing(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["judges"])
    assert judges.main() == 0
    assert "nothing was run" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("torchcts"), reason="`make judges` installs it")
def test_torchcts_fast_part_passes():
    path = os.pathsep.join([os.path.join(judges.ROOT, "tests"), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-m", "judges", "--fast"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^all +29\d ", done.stdout, re.MULTILINE), done.stdout
