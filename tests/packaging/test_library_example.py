"""docs/examples/library, as its CI runs it: as it is, mended, and without each line that orders."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "docs/examples/library"
WORKFLOW = (LIBRARY / ".github/workflows/accelerator.yml").read_text()
(COMMAND,) = re.findall(r"^ +- run: (pytest .*)$", WORKFLOW, re.MULTILINE)
MISSING = re.compile(r"# (.*)  # is missing$", re.MULTILINE)
ORDERS = re.compile(r"^ +\S.*\.(?:wait_stream|wait_event|record_stream|synchronize)\(.*\n", re.M)

pytestmark = pytest.mark.slow


def mended(path):
    return MISSING.sub(r"\1", path.read_text())


@pytest.fixture
def library(tmp_path):
    """Mended, in a folder of its own."""
    folder = shutil.copytree(LIBRARY, tmp_path / "library")
    for path in folder.glob("overlap/*.py"):
        path.write_text(mended(path))
    return folder


def run_in(folder, command):
    """Runs it with the workflow's settings."""
    drop = ("OPENREG_", "GITHUB_", "PYTEST_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    # In place of `pip install -e .`.
    env["PYTHONPATH"] = os.pathsep.join([str(folder), env.get("PYTHONPATH", "")])
    env.update(re.findall(r"^ +(OPENREG_\w+): (\S+)$", WORKFLOW, re.MULTILINE))
    return subprocess.run(
        command, shell=True, cwd=folder, env=env, capture_output=True, text=True, timeout=600
    )


def test_ci_finds_the_planted_bug(tmp_path):
    folder = shutil.copytree(LIBRARY, tmp_path / "library")
    done = run_in(folder, COMMAND)
    assert done.returncode == 1, done.stdout + done.stderr
    source = (folder / "overlap/prefetch.py").read_text()
    line = source[: MISSING.search(source).start()].count("\n") + 2
    places = re.findall(r"^::error file=(\S+?),line=(\d+)", done.stdout, re.MULTILINE)
    assert places == [("overlap/prefetch.py", str(line))], done.stdout
    assert "synchronize()" in done.stdout


def test_mended_library_is_quiet(library):
    done = run_in(library, COMMAND)
    assert done.returncode == 0 and "::" not in done.stdout, done.stdout + done.stderr
    for options in ("--sanitize", "--seeds 3"):
        command = f"python -m torch_openreg run {options} -m pytest -p no:terminal"
        done = run_in(library, command)
        assert done.returncode == 0, done.stdout + done.stderr


def ordering_lines():
    for path in sorted(LIBRARY.glob("overlap/*.py")):
        text = mended(path)
        for match in ORDERS.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield pytest.param(path.name, match, id=f"{path.name}:{line} {match[0].strip()}")


def test_library_has_many_ordering_lines():
    assert len(list(ordering_lines())) >= 10


@pytest.mark.parametrize("name, match", list(ordering_lines()))
def test_missing_line_is_reported(library, name, match):
    path = library / "overlap" / name
    text = path.read_text()
    path.write_text(text[: match.start()] + text[match.end() :])
    done = run_in(library, f"pytest --openreg-sanitizer --openreg-annotations -k {path.stem}")
    call = (
        "record_stream" if "record_stream" in match[0] else "(wait_stream|wait_event|synchronize)"
    )
    found = re.search(rf"^::error file=\S*{path.stem}\.py,.*{call}\(", done.stdout, re.MULTILINE)
    assert done.returncode == 1 and found, done.stdout + done.stderr
