"""Shared libraries from C++ source, in Triton's cache on disk, which processes share."""

import ctypes
import functools
import hashlib
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from triton.runtime.cache import get_cache_manager

from . import cpp

_HERE = Path(__file__).parent
_LONG = 60_000  # characters of source from which optimizing takes longer than most kernels run
_FILE = "kernel.so"
_loaded = {}  # by the hash of the file; never unloaded: tasks may be queued that call them


def _compiler():
    # Not by Inductor's search, which takes two seconds to import.
    return shlex.split(os.environ.get("CXX", "g++"))


@functools.cache
def _compiler_version(compiler):
    try:
        done = subprocess.run([*compiler, "--version"], capture_output=True, text=True)
    except FileNotFoundError:
        raise RuntimeError(
            f"Triton's kernels are compiled by a C++ compiler, and there is no {compiler[0]!r}: "
            "install g++, or set CXX"
        ) from None
    return done.stdout


@functools.cache
def version():
    """Changes with everything beside a kernel's source that its machine code depends on."""
    sources = sorted([*_HERE.glob("*.py"), *_HERE.glob("*.h")])
    text = b"".join(path.read_bytes() for path in sources)
    with open("/proc/cpuinfo") as info:
        cpu = [line for line in info if line.startswith("flags")][:1]
    parts = _compiler_version(tuple(_compiler())), *cpp.FLAGS, *cpu
    return hashlib.sha256(text + "\0".join(parts).encode()).hexdigest()


def _run_compiler(name, source):
    with tempfile.TemporaryDirectory(prefix="openreg-triton-") as folder:
        path, out = Path(folder, f"{name[:100]}.cpp"), Path(folder, _FILE)
        path.write_text(source)
        optimized = ["-O1"] if len(source) > _LONG else []
        command = [*_compiler(), *cpp.FLAGS, *optimized, str(path), "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(
                f"{name}: {shlex.join(command)} failed, which is an error of torch_openreg; "
                f"TRITON_KERNEL_DUMP=1 keeps the source\n{done.stderr[:4000]}"
            )
        return out.read_bytes()


def _file(name, source):
    """The library's path. The same source is compiled once."""
    key = hashlib.sha256(f"{version()}\0{source}".encode()).hexdigest()
    cache = get_cache_manager(key)
    return cache.get_file(_FILE) or cache.put(_run_compiler(name, source), _FILE, binary=True)


def compiled(name, source):
    """The bytes of the library, which Triton keeps in its own cache."""
    return Path(_file(name, source)).read_bytes()


def load_source(name, source):
    """The library of a source, loaded."""
    return ctypes.CDLL(_file(name, source))


def load(library):
    """The library of those bytes, loaded."""
    key = hashlib.sha256(library).hexdigest()
    if key not in _loaded:
        cache = get_cache_manager(key)
        path = cache.get_file(_FILE) or cache.put(library, _FILE, binary=True)
        _loaded[key] = ctypes.CDLL(path)
    return _loaded[key]


def address(library, function):
    """The address of a function of a loaded library."""
    return ctypes.cast(getattr(library, function), ctypes.c_void_p).value
