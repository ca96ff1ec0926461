"""The C++ API of streams and the guard, used by an extension that is built here."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

import torch_openreg

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "streams.md"


def build(library, sources):
    """As docs/streams.md tells an extension's author."""
    root = Path(torch.__file__).parent
    command = [
        *os.environ.get("CXX", "c++").split(),
        *("-std=c++20", "-O0", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"),
        *(*sources, "-o", library, "-I", torch_openreg.get_include(), "-isystem", root / "include"),
        *(f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"),
        *(f"-L{torch_openreg.get_library_dir()}", "-lopenreg", torch_openreg._C.__file__),
    ]
    subprocess.run(command, check=True)
    return library


@pytest.fixture(scope="module")
def extension(tmp_path_factory):
    library = tmp_path_factory.mktemp("extension") / "api.so"
    return build(library, sorted((HERE / "cpp").glob("*.cpp")))


# Each in a process of its own, which loads this module and no other copy of it.
CALL = "import ctypes, torch; print(ctypes.CDLL({!r}).{}())"


@pytest.mark.parametrize("program", ["runStreams", "runGuard"])
def test_api(extension, run_ok, program):
    assert run_ok(CALL.format(str(extension), program)) == "0\n"


def test_a_core_that_cannot_start(extension, run_ok):
    program = CALL.format(str(extension), "runWithoutDevices")
    assert run_ok(program, {"OPENREG_PLUGIN": "/nowhere/libnothing.so"}) == "0\n"


def test_a_forked_child(extension, run_ok):
    program = f"""
        import ctypes, os, torch
        library = ctypes.CDLL({str(extension)!r})
        torch.ones(3, device="openreg")
        child = os.fork()
        if child == 0:
            os._exit(library.runInChild())
        print(os.waitpid(child, 0)[1])
    """
    assert run_ok(program) == "0\n"


def test_the_operator_of_the_page(tmp_path, run_ok, runs_ahead):
    (source,) = re.findall(r"^```cpp\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "add_one.cpp").write_text(source)
    torch.ops.load_library(build(tmp_path / "add_one.so", [tmp_path / "add_one.cpp"]))
    add_one = torch.ops.demo.add_one
    x = torch.zeros(1000, dtype=torch.int64, device="openreg:1")
    side = torch.openreg.Stream(1)
    side.wait_stream(torch.openreg.current_stream(1))
    with torch.openreg.stream(side):
        runs_ahead(lambda: [add_one(x) for _ in range(10)])  # on the current stream
    assert torch.openreg.current_device() == 0
    side.synchronize()
    assert x.tolist() == [10] * 1000
    with pytest.raises(RuntimeError, match="contiguous"):
        add_one(x[::2])
