"""`make compile_commands`: what clangd and other tools are told of each source."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def place(entry):
    return (Path(entry["directory"]) / entry["file"]).resolve()


def sources(*patterns):
    return {path for pattern in patterns for path in ROOT.glob(pattern)}


@pytest.fixture(scope="module")
def c_lines():
    command = ["make", "-s", "c-commands"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def test_compile_commands_of_c_have_every_source(c_lines):
    entries = {place(entry): entry for entry in map(json.loads, c_lines.splitlines())}
    assert len(entries) == len(c_lines.splitlines())
    assert entries.keys() >= sources("csrc/openreg/*/*.c", "tests/c/*.c")
    for source in ("csrc/openreg/base/mutex.c", "tests/c/test_gdb.c"):
        entry = entries[ROOT / source]
        command = [*shlex.split(entry["command"]), "-fsyntax-only"]
        subprocess.run(command, cwd=entry["directory"], check=True)
        assert "-DOR_DEBUG" in command


def test_compile_commands_have_every_source(c_lines, tmp_path):
    written = tmp_path / "compile_commands.json"
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "setup.py", "--quiet", "compile_commands", "--output", written]
    subprocess.run(command, cwd=ROOT, env=environment, input=c_lines, text=True, check=True)
    entries = {place(entry): entry for entry in json.loads(written.read_text())}
    assert entries.keys() >= sources("csrc/[adt]*/**/*.cpp", "csrc/openreg/*/*.c", "tests/c/*.c")
    assert all(path.exists() for path in entries)
    assert "-std=c++20" in entries[ROOT / "csrc/torch/module.cpp"]["command"].split()
