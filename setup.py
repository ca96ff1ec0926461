"""Builds the C core (libopenreg.so.N) and the shim (torch_openreg._C) with one ninja file.

The metadata is in pyproject.toml, the version in openreg.h. The core is C11 and is compiled by the
C compiler; the shim is C++20 and is linked with the core and with PyTorch. Objects are kept in
build/, one folder for each PyTorch they were compiled against, so that an editable build, a wheel
and a second run share them.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

from build_backend import TORCH, the_torch

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
PACKAGE = "torch_openreg"

# What the core is made of and with, which the Makefile reads too.
MAKE = dict(re.findall(r"^(\w+) := (.*)$", (CSRC / "core.mk").read_text(), re.MULTILINE))
CXX_FLAGS = ["-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-std=c++20"]
CXX_FLAGS += ["-fvisibility-inlines-hidden", "-pthread"]

VERSION = re.findall(
    r"#define OPENREG_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)",
    (ROOT / MAKE["CORE_HEADER"]).read_text(),
)
# Its name in a program: that of another major version is another library.
CORE = f"libopenreg.so.{VERSION[0]}"
# The C++ API, with what these include; the shim's other headers are its own.
SHIM_HEADERS = ("check.h", "device.h", "event.h", "guard.h", "stream.h")
# For -lopenreg. A wheel holds no symbolic link, and a second copy would be a second runtime.
LINKER_SCRIPT = f"INPUT({CORE})\n"


def core_sources():
    return sorted(ROOT.glob(MAKE["CORE_FILES"]))


def shim_sources():
    folders = ("torch", "task", "aten", "aten/ops", "distributed")
    return [source for folder in folders for source in sorted(CSRC.glob(f"{folder}/*.cpp"))]


def headers():
    """Installed header (relative to the package) -> where it is in the source tree."""
    found = {f"include/{h.name}": h for h in sorted(CSRC.glob("openreg/include/*.h"))}
    found |= {f"include/{PACKAGE}/{name}": CSRC / "torch" / name for name in SHIM_HEADERS}
    return found


def installed_files():
    """What goes into the package besides what is compiled, in the same form."""
    # `python -m torch_openreg new-device` writes it.
    return headers() | {"_new_device/driver.c": ROOT / "docs/examples/vendor/vendor.c"}


def escape(path):
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def ninja_file(out, extension_name):
    """The text of the ninja file that builds the core and the shim in `out`. What is in the tree is
    named from there: a copy of tree and objects has nothing to compile."""
    torch_dir = the_torch().folder
    csrc = os.path.relpath(CSRC, out)
    public = f"{csrc}/openreg/include"
    python_includes = {sysconfig.get_path("include"), sysconfig.get_path("platinclude")}
    # pybind11 is PyTorch's own copy: another version would not share its registered types.
    system = [torch_dir / "include", torch_dir / "include/torch/csrc/api/include"]
    system.append(torch_dir / "include/kineto")
    system += sorted(python_includes)
    c_flags = f"-O2 {MAKE['CORE_FLAGS']} {MAKE['CORE_INCLUDES'].replace('csrc', csrc)}"
    cxx_flags = [
        *CXX_FLAGS,
        "-DTORCH_EXTENSION_NAME=_C",
        "-D_GLIBCXX_USE_CXX11_ABI=1",
        f"-iquote {csrc}",
        f"-iquote {csrc}/torch",
        f"-I{public}",
        *(f"-isystem {path}" for path in system),
    ]
    torch_libraries = ["c10", "torch_cpu", "torch", "torch_python"]
    lines = [
        "ninja_required_version = 1.10",
        f"cc = {os.environ.get('CC', 'cc')}",
        f"cxx = {os.environ.get('CXX', 'c++')}",
        f"cflags = {c_flags} {os.environ.get('CFLAGS', '')}",
        f"cxxflags = {' '.join(cxx_flags)} {os.environ.get('CXXFLAGS', '')}",
        f"ldflags = {os.environ.get('LDFLAGS', '')}",
    ]
    rules = {
        "c": "$cc $cflags -MMD -MF $out.d -c $in -o $out",
        "cxx": "$cxx $cxxflags -MMD -MF $out.d -c $in -o $out",
        "core": "$cc -shared -Wl,-soname,$out -Wl,-z,defs $in -o $out"
        f" {MAKE['CORE_LINK']} $ldflags",
        "shim": f"$cxx -shared $in -o $out {CORE} -L{torch_dir / 'lib'} "
        + " ".join(f"-l{name}" for name in torch_libraries)
        + " -Wl,-rpath,'$$ORIGIN/lib' -pthread $ldflags",
    }
    for name, command in rules.items():
        lines += [f"rule {name}", f"  command = {command}", f"  description = {name} $out"]
        if name in ("c", "cxx"):
            lines += ["  depfile = $out.d", "  deps = gcc"]
    objects = {"c": [], "cxx": []}
    for rule, sources in (("c", core_sources()), ("cxx", shim_sources())):
        for source in sources:
            path = source.relative_to(CSRC)
            target = f"{path}.o"
            lines.append(f"build {escape(target)}: {rule} {escape(f'{csrc}/{path}')}")
            objects[rule].append(escape(target))
    lines.append(f"build {CORE}: core {' '.join(objects['c'])}")
    targets = [CORE]
    if objects["cxx"]:
        lines.append(f"build {extension_name}: shim {' '.join(objects['cxx'])} | {CORE}")
        targets.append(extension_name)
    lines += [f"default {' '.join(targets)}", ""]
    return "\n".join(lines), targets


def requirements():
    """Of the source distribution: any PyTorch that it builds against. Of what was built: the minor
    version that it was built for, whose C++ interface it uses."""
    if not {"bdist_wheel", "dist_info", "editable_wheel"} & set(sys.argv):
        return [TORCH]
    return [f"torch=={the_torch().minor}.*"]


def build_info(version):
    """The text of torch_openreg/_build_info.py: the package's version, and what the import compares
    with what it finds."""
    versions = {"VERSION": version, "TORCH_VERSION": the_torch().version}
    lines = [f'{name} = "{version}"\n' for name, version in versions.items()]
    return '"""Written by the build."""\n\n' + "".join(lines)


def object_folder():
    """One folder for each PyTorch and compiler: an isolated build does not spoil the others."""
    identity = [str(the_torch().folder / "__init__.py"), the_torch().version, sys.executable]
    identity += [os.environ.get(name, "") for name in ("CC", "CXX", "CFLAGS", "CXXFLAGS")]
    digest = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:12]
    return ROOT / "build" / f"native-{digest}"


def run_ninja(extension_name, *arguments, **options):
    """Writes the ninja file and runs ninja on it; returns the folder, the names of what the file
    makes in it, and the finished process."""
    out = object_folder()
    out.mkdir(parents=True, exist_ok=True)
    text, targets = ninja_file(out, extension_name)
    with open(out / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        replace_if_changed(out / "build.ninja", text.encode())
        if not importlib.util.find_spec("ninja"):
            pin = re.search(r'"(ninja==.*?)"', (ROOT / "pyproject.toml").read_text())[1]
            raise CompileError(f"ninja is not installed: {sys.executable} -m pip install {pin}")
        command = [sys.executable, "-m", "ninja", "-C", str(out), *arguments]
        return out, targets, subprocess.run(command, **options)


def compile_native(extension_name):
    """Builds what is out of date; returns the folder and the names of the results in it."""
    jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
    out, targets, done = run_ninja(extension_name, "-j", jobs, "-k", "0")
    if done.returncode != 0:
        raise CompileError("compiling the core or the shim failed; the reason is above")
    return out, targets


def replace_if_changed(path, data):
    """A running process may have the old file mapped, so it is replaced and never rewritten."""
    if path.exists() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    temporary.replace(path)


class BuildNative(build_ext):
    def run(self):
        package = self.package_folder()
        name = Path(self.get_ext_filename(f"{PACKAGE}._C")).name
        out, targets = compile_native(name)
        for target in targets:
            place = package / "lib" / target if target.startswith("lib") else package / target
            replace_if_changed(place, (out / target).read_bytes())
            shutil.copymode(out / target, place)
        for header in (package / "include").rglob("*.h"):  # from an older build
            if str(header.relative_to(package)) not in headers():
                header.unlink()
        for relative, source in installed_files().items():
            replace_if_changed(package / relative, source.read_bytes())
        replace_if_changed(package / "lib/libopenreg.so", LINKER_SCRIPT.encode())
        version = self.distribution.get_version()  # of a wheel for an index with its suffix
        replace_if_changed(package / "_build_info.py", build_info(version).encode())

    def package_folder(self):
        in_source = self.inplace or self.editable_mode
        return (ROOT if in_source else Path(self.build_lib)) / PACKAGE

    def get_outputs(self):
        package = self.package_folder()
        name = Path(self.get_ext_filename(f"{PACKAGE}._C")).name
        made = [name, f"lib/{CORE}", "lib/libopenreg.so", "_build_info.py", *installed_files()]
        return [str(package / relative) for relative in made]

    def get_output_mapping(self):
        return {}


class CompileCommands(Command):
    """compile_commands.json: what the Makefile says of the C files, an object in each line of
    stdin, and the shim's part. Compiles nothing."""

    user_options = [("output=", "o", "the file to write")]  # noqa: RUF012

    def initialize_options(self):
        self.output = "compile_commands.json"

    def finalize_options(self):
        pass

    def run(self):
        name = Path(self.get_finalized_command("build_ext").get_ext_filename(f"{PACKAGE}._C")).name
        # --quiet: ninja says nothing on stdout but the commands.
        options = {"check": True, "capture_output": True, "text": True}
        done = run_ninja(name, "--quiet", "-t", "compdb", "cxx", **options)[-1]
        entries = [json.loads(line) for line in sys.stdin] + json.loads(done.stdout)
        replace_if_changed(Path(self.output), (json.dumps(entries, indent=1) + "\n").encode())


setup(
    version=".".join(VERSION),
    install_requires=requirements(),
    ext_modules=[Extension(f"{PACKAGE}._C", sources=[])],
    cmdclass={"build_ext": BuildNative, "compile_commands": CompileCommands},
)
