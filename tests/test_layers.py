"""The check of the core's layers finds what it is there for, and the shim has layers too."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILER = shlex.split(os.environ.get("CC", "cc"))


def check(folder, layers, **files):
    """What the check prints of files with these texts."""
    (folder / "layers.txt").write_text(layers)
    for name, text in files.items():
        (folder / f"{name}.c").write_text(text)
        subprocess.run([*COMPILER, "-c", f"{name}.c"], cwd=folder, check=True)
    command = [sys.executable, ROOT / ".ci/layers.py", "layers.txt", *folder.glob("*.o")]
    shown = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert bool(shown.stderr) == bool(shown.returncode)
    return shown.stderr


LOW = "int low(void) { return 1; }"
HIGH = "int low(void); int high(void) { return low(); }"


def test_what_is_below_may_be_used(tmp_path):
    assert check(tmp_path, "# a comment\nbase: a\ntop: b\n", a=LOW, b=HIGH) == ""


def test_what_is_above_may_not(tmp_path):
    said = check(tmp_path, "base: b\ntop: a\n", a=LOW, b=HIGH)
    assert said == "layers.txt: b.c (base) uses low of a.c (top), which is in a higher layer\n"


def test_every_file_has_a_layer(tmp_path):
    said = check(tmp_path, "base: a c\n", a=LOW, b=HIGH)
    assert said == "layers.txt: b.c is in no layer\nlayers.txt: there is no c.c\n"


def test_a_folder_of_the_shim_includes_only_what_is_below_it():
    below = {"torch": {"torch"}, "aten": {"torch", "aten"}}
    for folder, allowed in below.items():
        for file in (ROOT / "csrc" / folder).iterdir():
            included = re.findall(r'#include "(?:\.\./)?(\w+)/', file.read_text())
            assert set(included) <= allowed, file
