"""`make test-drivers`: what is declared is expected, and everything else fails."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ENTRIES = """
from drivers import declared
from support.declarations import Declared

declared.DECLARED["mine"] = (
    Declared("test_it.py::test_fails", "lacks it", error="cannot"),
    Declared("test_it.py::test_other*", "lacks it", error="cannot"),
    Declared("test_it.py::test_passes", "lacked it once"),
    Declared("test_absent.py::*", "did not run"),
    declared.WAITS,
)
"""
PROGRAM = """
import torch

def test_fails():
    raise RuntimeError("it cannot")

def test_other():
    raise RuntimeError("another one")

def test_passes():
    pass

def test_waits():
    with torch.openreg.testing.gate() as gate:
        gate.wait()
        torch.openreg.synchronize()
"""


def test_undeclared_failures_and_stale_declarations_fail(tmp_path, plugins):
    (tmp_path / "entries.py").write_text(ENTRIES)
    (tmp_path / "test_it.py").write_text(PROGRAM)
    driver = shutil.copy(plugins / "libvendor_nomap.so", tmp_path / "libmine.so")
    path = os.pathsep.join([str(tmp_path), str(TESTS), *sys.path[1:]])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "entries", "-p", "drivers.plugin", "-rA", "."],
        env={**os.environ, "PYTHONPATH": path, "OPENREG_PLUGIN": driver},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    outcomes = re.findall(r"^(PASSED|FAILED|XFAIL) test_it.py::test_(\w+)", done.stdout, re.M)
    assert sorted(outcomes) == [
        ("FAILED", "other"),
        ("PASSED", "passes"),
        ("XFAIL", "fails"),
        ("XFAIL", "waits"),
    ], done.stdout + done.stderr
    assert re.findall(r"^stale.*", done.stdout, re.M) == [
        "stale declaration: test_it.py::test_other*: none of them fails (lacks it)",
        "stale declaration: test_it.py::test_passes: none of them fails (lacked it once)",
    ]
    assert done.returncode == 1
