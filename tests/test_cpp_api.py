"""The C++ API of streams and the guard, used as an extension's author does."""

import os
import subprocess
from pathlib import Path

import torch

import torch_openreg
from torch_openreg import _C

SOURCE = Path(__file__).parent / "cpp" / "stream_api.cpp"


def test_streams_and_guard(tmp_path, run_ok):
    module, root = Path(_C.__file__), Path(torch.__file__).parent
    library = tmp_path / "stream_api.so"
    command = [
        os.environ.get("CXX", "c++"),
        *("-std=c++20", "-O0", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"),
        *("-I", torch_openreg.get_include(), "-isystem", root / "include", SOURCE, "-o", library),
        *(f"-L{module.parent}", f"-l:{module.name}", f"-L{torch_openreg.get_library_dir()}"),
        *("-lopenreg", f"-L{root / 'lib'}", "-lc10", f"-Wl,-rpath,{module.parent}"),
    ]
    subprocess.run(command, check=True)
    # In a process of its own, which loads this module and no other copy of it.
    program = f"import ctypes, torch; print(ctypes.CDLL({str(library)!r}).run())"
    assert run_ok(program) == "0\n"
