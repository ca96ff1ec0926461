"""The C++ API of streams and the guard, used by an extension that is built here."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

import torch_openreg

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def extension(tmp_path_factory):
    library = tmp_path_factory.mktemp("extension") / "api.so"
    root = Path(torch.__file__).parent
    command = [
        *os.environ.get("CXX", "c++").split(),
        *("-std=c++20", "-O0", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"),
        *(*sorted((HERE / "cpp").glob("*.cpp")), "-o", library),
        *("-I", torch_openreg.get_include(), "-isystem", root / "include"),
        *(f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"),
        *(f"-L{torch_openreg.get_library_dir()}", "-lopenreg", torch_openreg._C.__file__),
    ]
    subprocess.run(command, check=True)
    return library


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


def test_a_vendors_metadata_is_saved_and_loaded(extension, run_ok):
    program = f"""
        import ctypes, io, torch
        from torch._utils import get_tensor_metadata, set_tensor_metadata
        ctypes.CDLL({str(extension)!r}).registerBackendMeta()
        x = torch.arange(3.0, device="openreg:1")
        print(get_tensor_metadata(x))
        set_tensor_metadata(x, {{"vendor_layout": True}})
        file = io.BytesIO()
        torch.save(x, file)
        file.seek(0)
        again = torch.load(file, map_location="openreg:0")
        print(get_tensor_metadata(again), again.tolist(), (again + x.to(again.device)).tolist())
    """
    assert run_ok(program).splitlines() == [
        "{}",
        "{'vendor_layout': True} [0.0, 1.0, 2.0] [0.0, 2.0, 4.0]",
    ]
