"""docs/vendor: each step of the guide builds and runs, and its C is that of vendor.c."""

import re
import subprocess
from pathlib import Path

import pytest

import torch_openreg

ROOT = Path(__file__).resolve().parents[2]
VENDOR = (ROOT / "docs/examples/vendor/vendor.c").read_text()
STEPS = re.split(r"^## ", (ROOT / "docs/vendor/index.md").read_text(), flags=re.MULTILINE)[2:-1]
OPERATORS = (ROOT / "docs/vendor/operators.md").read_text()
BLOCK = re.compile(r"^```(c|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FACTORY = "/* ---- The factory ---- */"


def blocks(text, language):
    return [code for kind, code in BLOCK.findall(text) if kind == language]


BEGINNING, END, LATER = blocks(STEPS[0], "c")
MIDDLE = [block for step in STEPS[1:] for block in blocks(step, "c")]


@pytest.fixture
def works(run_ok, tmp_path):
    """Whether a program runs on the driver of this source."""

    def works(source, program, *flags):
        (tmp_path / "driver.c").write_text(source)
        where = "-I" + torch_openreg.get_include(), "-L" + torch_openreg.get_library_dir()
        flags = ["-std=c11", "-D_GNU_SOURCE", "-pthread", "-Wall", *flags, *where]
        library = tmp_path / "libdriver.so"
        command = ["cc", "-shared", "-fPIC", tmp_path / "driver.c", "-o", library, *flags]
        subprocess.run([*command, "-lopenreg"], check=True)
        run_ok(program, {"OPENREG_PLUGIN": str(library)})

    return works


def test_guide_has_the_whole_driver():
    assert "\n".join([BEGINNING, *MIDDLE, END]) == VENDOR


@pytest.mark.parametrize("step", range(len(STEPS)))
@pytest.mark.slow
def test_step_of_the_guide_runs(works, step):
    written = "\n".join(MIDDLE[:step])
    macro, *stubs = re.split(r"(?=^LATER)", LATER, flags=re.MULTILINE)
    stubs = [
        stub for stub in stubs if f"{re.findall('vendor[A-Z][a-z]+', stub)[0]}(" not in written
    ]
    source = "\n".join([BEGINNING, macro, *stubs, written, END])
    (program,) = blocks(STEPS[step], "python")
    works(source, program, *["-DVENDOR_NO_MAP"] * (step < len(STEPS) - 1))


@pytest.mark.slow
def test_kernels_of_the_guide_run(works):
    kernels, contiguous = blocks(OPERATORS, "c")
    end = END.replace(".compute =", ".operators = operators, .operator_count = 2, .compute =")
    source = VENDOR.replace(END, "\n".join([contiguous, kernels, end]))
    for program in blocks(OPERATORS, "python"):
        works(source, program, "-DVENDOR_NO_MAP")
