"""The checks of the core's layers and of the shim's includes find what they are there for."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
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


def test_symbol_of_a_lower_layer_is_accepted(tmp_path):
    files = {"base/a.c": LOW, "base/a.h": "", "tools/b.c": f'#include "base/a.h"\n{HIGH}'}
    assert check(tmp_path, files) == ""


def test_symbol_of_a_higher_layer_is_refused(tmp_path):
    said = check(tmp_path, {"stream/a.c": LOW, "device/b.c": HIGH})
    assert said == "device/b.c uses low of stream/a.c, which is in a higher layer\n"


def test_include_of_a_higher_layer_is_refused(tmp_path):
    said = check(tmp_path, {"cache/a.h": "", "stream/b.c": f'#include "cache/a.h"\n{LOW}'})
    assert said == "stream/b.c includes cache/a.h, which is in a higher layer\n"


def test_source_without_a_layer_or_an_object_is_refused(tmp_path):
    said = check(tmp_path, {"base/a.c": LOW, "more/b.c": "int b;", "base/c.c": HIGH}, ["c"])
    assert said == "base/c.c has no object\nmore/b.c is in no layer\n"


def circle_of(folder, names):
    others = [*names[1:], names[0]]
    return {
        f"{folder}/{name}.c": f"int {other}(void); int {name}(void) {{ return {other}(); }}"
        for name, other in zip(names, others, strict=True)
    }


def test_circle_of_files_is_refused(tmp_path):
    said = check(tmp_path, circle_of("tools", ["a", "b", "c"]))
    assert said == "files use each other: tools/a.c -> tools/b.c -> tools/c.c -> tools/a.c\n"


def test_engine_may_be_a_circle_without_other_files(tmp_path):
    assert check(tmp_path, circle_of("stream", ["stream", "task", "worker"])) == ""
    larger = circle_of("stream", ["stream", "task", "worker", "graph"])
    assert check(tmp_path, larger).startswith("files use each other: stream/")


# ---- The shim's includes -------------------------------------------------------------------------


def check_includes(folder, **files):
    """What the check prints of files with these texts; "__" in a name separates folders."""
    for part in ("torch", "task", "aten/ops", "distributed"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        *parts, base, suffix = name.split("__")
        (folder.joinpath(*parts) / f"{base}.{suffix}").write_text(text)
    command = [sys.executable, ROOT / ".ci/includes.py", folder]
    shown = subprocess.run(command, capture_output=True, text=True)
    assert bool(shown.stderr) == bool(shown.returncode)
    return shown.stderr.replace(f"{folder}/", "")


def test_shim_folders_include_only_lower_ones():
    command = [sys.executable, ROOT / ".ci/includes.py", ROOT / "csrc"]
    subprocess.run(command, check=True)


def test_include_of_a_higher_shim_folder_is_refused(tmp_path):
    files = {"aten__high__h": "", "task__low__cpp": '#include "../aten/high.h"\n'}
    said = check_includes(tmp_path, **files)
    assert said == "task/low.cpp includes aten/high.h, which is not below it\n"


def test_include_of_a_lower_shim_folder_is_accepted(tmp_path):
    files = {"task__low__h": "", "aten__ops__high__cpp": '#include "../../task/low.h"\n'}
    assert check_includes(tmp_path, **files) == ""


def test_sources_of_one_name_are_refused(tmp_path):
    said = check_includes(tmp_path, torch__same__cpp="", task__same__cpp="")
    assert said == "torch/same.cpp has the name of task/same.cpp\n"
