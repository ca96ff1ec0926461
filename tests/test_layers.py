"""The check of the core's layers finds what it is there for, and the shim has layers too."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILER = shlex.split(os.environ.get("CC", "cc"))


def check(folder, files, left_out=()):
    """What the check prints of files with these texts, of which some have no object."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    sources = [path for path in folder.glob("*/*.c") if path.stem not in left_out]
    for source in sources:
        command = [*COMPILER, "-iquote", folder, "-c", source, "-o", source.with_suffix(".o")]
        subprocess.run(command, check=True)
    objects = [source.with_suffix(".o") for source in sources]
    command = [sys.executable, ROOT / ".ci/layers.py", folder, *objects]
    shown = subprocess.run(command, capture_output=True, text=True)
    assert bool(shown.stderr) == bool(shown.returncode)
    return shown.stderr.replace(f"{folder}: ", "")


LOW = "int low(void) { return 1; }"
HIGH = "int low(void); int high(void) { return low(); }"


def test_a_file_may_use_a_lower_layer(tmp_path):
    files = {"base/a.c": LOW, "base/a.h": "", "tools/b.c": f'#include "base/a.h"\n{HIGH}'}
    assert check(tmp_path, files) == ""


def test_a_symbol_of_a_higher_layer_is_refused(tmp_path):
    said = check(tmp_path, {"stream/a.c": LOW, "device/b.c": HIGH})
    assert said == "device/b.c uses low of stream/a.c, which is in a higher layer\n"


def test_an_include_of_a_higher_layer_is_refused(tmp_path):
    said = check(tmp_path, {"cache/a.h": "", "stream/b.c": f'#include "cache/a.h"\n{LOW}'})
    assert said == "stream/b.c includes cache/a.h, which is in a higher layer\n"


def test_each_source_needs_a_layer_and_an_object(tmp_path):
    said = check(tmp_path, {"base/a.c": LOW, "more/b.c": "int b;", "base/c.c": HIGH}, ["c"])
    assert said == "base/c.c has no object\nmore/b.c is in no layer\n"


def test_a_circle_of_files_is_refused_outside_the_engine(tmp_path):
    circle = {
        f"{name}.c": f"int {other}(void); int {name}(void) {{ return {other}(); }}"
        for name, other in ("ab", "bc", "ca")
    }
    for folder, said in (("stream", ""), ("tools", "files use each other: ")):
        files = {f"{folder}/{name}": text for name, text in circle.items()}
        place = tmp_path / folder
        place.mkdir()
        assert check(place, files).startswith(said)
        assert bool(check(place, files)) == bool(said)


def test_a_folder_of_the_shim_includes_only_what_is_below_it():
    below = {"torch": {"torch"}, "aten": {"torch", "aten"}}
    for folder, allowed in below.items():
        for file in (ROOT / "csrc" / folder).iterdir():
            included = re.findall(r'#include "(?:\.\./)?(\w+)/', file.read_text())
            assert set(included) <= allowed, file
