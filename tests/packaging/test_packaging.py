"""What is shipped: sdist, wheel, headers, library, metadata; and the refusal of another PyTorch.

The wheel is built from the source distribution, unpacked elsewhere, so that a file missing from it
shows. With it goes what `make build` has compiled: ninja compiles again what differs, and what was
made from a file that is not there.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import torch_openreg

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("wheels", ROOT / ".ci/wheels.py")
wheels = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(wheels)
run = wheels.run
MINOR = ".".join(torch.__version__.split(".")[:2])
PLAIN = torch_openreg.__version__
SHIM_HEADERS = ["check.h", "device.h", "event.h", "guard.h", "stream.h"]


def compiler(name, default):
    return shlex.split(os.environ.get(name, default))


@pytest.fixture(scope="session")
def sdist(tmp_path_factory):
    return wheels.build_sdist(tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="session")
def wheel(sdist, tmp_path_factory):
    """As `make wheels` builds it."""
    return wheels.build_wheel(sys.executable, sdist, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory):
    """The wheel's contents in a folder: first on the path, it hides any other install."""
    folder = tmp_path_factory.mktemp("installed")
    run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
         "--target", folder, wheel])  # fmt: skip
    return folder


def python(installed, program, **environment):
    return run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(installed), **environment},
        cwd=installed,
    )


def test_sdist_has_sources_and_no_results(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for path in ("csrc/openreg/include/openreg.h", "csrc/openreg/base/base.h", "setup.py",
                 "LICENSE", "Makefile", "tests/packaging/test_packaging.py",
                 "docs/examples/digits.py", "docs/streams.svg", "tests/cpp/expect.h",
                 "docs/examples/custom_op/relu2.cpp", "docs/examples/library/pyproject.toml",
                 "docs/examples/library/.github/workflows/accelerator.yml"):  # fmt: skip
        assert path in names
    made = [name for name in names if re.search(r"\.so(\.\d+)?$|\.o$|_build_info\.py$", name)]
    assert made == []


def test_sdist_requires_any_minor_that_it_builds_against(sdist):
    with tarfile.open(sdist) as archive:
        (info,) = (name for name in archive.getnames() if re.fullmatch(r"[^/]+/PKG-INFO", name))
        assert "Requires-Dist: torch<2.16,>=2.13\n" in archive.extractfile(info).read().decode()


def test_wheel_has_library_headers_and_license(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    libraries = {name for name in names if name.startswith("torch_openreg/lib/")}
    assert libraries == {"torch_openreg/lib/libopenreg.so", "torch_openreg/lib/libopenreg.so.0"}
    assert {"pytest_openreg.py", "torch_openreg/openreg/sanitizer/_page.html"} <= names
    core = {header.name for header in (ROOT / "csrc/openreg/include").glob("*.h")}
    public = core | {f"torch_openreg/{header}" for header in SHIM_HEADERS}
    prefix = "torch_openreg/include/"
    assert {name.removeprefix(prefix) for name in names if name.startswith(prefix)} == public
    assert any(re.fullmatch(r"torch_openreg/_C\..*\.so", name) for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "csrc/", "benchmarks/"))]


def test_build_leaves_no_header_of_an_older_one():
    include = Path(torch_openreg.get_include())
    assert sorted(header.name for header in include.glob("torch_openreg/*")) == SHIM_HEADERS


def test_wheel_is_small_and_for_platforms_with_its_symbols(wheel):
    """PyTorch's libraries are PyTorch's, or it would weigh a hundred times as much."""
    version = "{}{}".format(*sys.version_info[:2])
    tags = rf"cp{version}-cp{version}-manylinux_2_\d+_{os.uname().machine}\.whl"
    assert re.fullmatch(rf"torch_openreg-{PLAIN}\+pt{MINOR}-{tags}", wheel.name)
    assert wheel.stat().st_size < 3 * 2**20


@pytest.mark.slow
def test_only_the_wheel_for_an_index_names_the_pytorch_in_its_version(sdist, installed):
    assert sdist.name == f"torch_openreg-{PLAIN}.tar.gz"
    with tarfile.open(sdist) as archive:
        for name in ("PKG-INFO", "setup.cfg"):
            text = archive.extractfile(f"torch_openreg-{PLAIN}/{name}").read().decode()
            assert "+pt" not in text
    assert importlib.metadata.version("torch_openreg") == PLAIN  # of the editable install
    program = """
import importlib.metadata, torch_openreg
print(torch_openreg.__version__, importlib.metadata.version("torch_openreg"))
"""
    assert python(installed, program) == f"{PLAIN}+pt{MINOR} {PLAIN}+pt{MINOR}\n"


def test_wheel_metadata_has_license_and_entry_points(wheel):
    with zipfile.ZipFile(wheel) as archive:
        info = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = archive.read(info).decode()
        entry_points = archive.read(info.replace("METADATA", "entry_points.txt")).decode()
    assert "License-Expression: BSD-3-Clause" in metadata
    assert "Requires-Python: >=3.10" in metadata
    assert f"Requires-Dist: torch=={MINOR}.*\n" in metadata
    assert "\nProject-URL: Homepage, https://" in metadata
    assert re.search(r"\[torch\.backends\]\s+openreg = torch_openreg:_autoload", entry_points)
    assert re.search(r"\[pytest11\]\s+pytest_openreg = pytest_openreg", entry_points)


@pytest.mark.slow
def test_installed_wheel_is_loaded_by_import_torch(installed):
    program = """
import torch, sys
module = sys.modules["torch_openreg"]
print(module.__file__, module.get_include(), module.get_library_dir())
print((torch.ones(3, device="openreg:1") + 1).cpu().tolist())
"""
    places, result = python(installed, program).splitlines()
    for place in places.split():
        assert Path(place).exists()
        assert Path(place).is_relative_to(installed)
    assert result == "[2.0, 2.0, 2.0]"


C_PROGRAM = r"""
#include <openreg.h>
#include <stdio.h>
#include <string.h>

int main(void) {
  const char sent[] = "there and back";
  char received[sizeof(sent)] = {0};
  void *memory = NULL;
  int count = 0;
  if (orGetDeviceCount(&count) || count != 3) return 2;
  if (orSetDevice(2) || orMalloc(&memory, sizeof(sent))) return 3;
  if (orMemcpy(memory, sent, sizeof(sent), orMemcpyHostToDevice)) return 4;
  if (orMemcpy(received, memory, sizeof(sent), orMemcpyDeviceToHost)) return 5;
  if (orFree(memory)) return 6;
  puts(received);
  return strcmp(sent, received) != 0;
}
"""


@pytest.mark.slow
def test_installed_demo_counts_as_a_program_of_the_user(installed, tmp_path):
    shutil.copytree(installed, tmp_path / "site-packages")
    program = """
import torch
from torch_openreg import _demo
from torch_openreg.openreg.sanitizer._frames import Frame, user_frame
frames = (Frame(torch.nn.__file__, 1, "forward"), Frame(_demo.__file__, 39, "train"))
print("site-packages" in _demo.__file__, user_frame(frames).name)
"""
    assert python(tmp_path / "site-packages", program) == "True train\n"


@pytest.mark.slow
def test_c_program_uses_installed_header_and_library(installed, tmp_path):
    program = "import torch_openreg as o; print(o.get_include()); print(o.get_library_dir())"
    include, library = python(installed, program).splitlines()
    (tmp_path / "program.c").write_text(C_PROGRAM)
    run([*compiler("CC", "cc"), "-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic",
         "program.c", f"-I{include}", f"-L{library}", "-lopenreg", f"-Wl,-rpath,{library}",
         "-o", "program"], cwd=tmp_path)  # fmt: skip
    environment = {**os.environ, "OPENREG_DEVICE_COUNT": "3"}
    assert run([tmp_path / "program"], env=environment) == "there and back\n"
    needed = run(["readelf", "-d", tmp_path / "program"])
    assert "[libopenreg.so.0]" in needed and "[libopenreg.so]" not in needed


@pytest.mark.slow
def test_python_process_has_one_runtime(installed):
    """By the name alone ctypes gets the one that the shim has loaded."""
    program = """
import ctypes, torch
core = ctypes.CDLL("libopenreg.so.0")
count = ctypes.c_int()
assert core.orGetDeviceCount(ctypes.byref(count)) == 0 and count.value == 3
maps = open("/proc/self/maps").read().split()
print(*{path for path in maps if "libopenreg" in path})
"""
    loaded = python(installed, program, OPENREG_DEVICE_COUNT="3").split()
    assert loaded == [str(installed / "torch_openreg/lib/libopenreg.so.0")]


def test_shim_headers_compile_where_they_are_installed(installed, tmp_path):
    """Each alone, so that none leans on what another included."""
    torch = Path(importlib.util.find_spec("torch").origin).parent
    include = installed / "torch_openreg/include"
    lines = [f"#include <torch_openreg/{header}>\n" for header in SHIM_HEADERS]
    (tmp_path / "all.cpp").write_text("".join(lines))
    run([*compiler("CXX", "c++"), "-std=c++20", "-fsyntax-only", "all.cpp", f"-I{include}",
         f"-isystem{torch / 'include'}"], cwd=tmp_path)  # fmt: skip


def test_library_exports_the_api_only(installed):
    """Whatever the core exports is public, and there is nothing of PyTorch or C++ in it."""
    library = installed / "torch_openreg/lib/libopenreg.so.0"
    names = run(["nm", "-D", "--defined-only", "--format=posix", library]).split("\n")
    kinds = {line.split()[0]: line.split()[1] for line in names if line}
    # Of data a program has a copy, whose size and place are then part of the ABI.
    assert set(kinds.values()) == {"T"}
    exported = set(kinds)
    headers = "".join(h.read_text() for h in (ROOT / "csrc/openreg/include").glob("*.h"))
    declared = set(re.findall(r"^OR_API [^;(]*?\*?\b(or\w+)[(;]", headers, re.MULTILINE))
    assert exported - declared == set()
    assert declared - exported == set()
    needed = run(["readelf", "-d", library])
    assert "stdc++" not in needed and "torch" not in needed and "gomp" not in needed
    assert "[libopenreg.so.0]" in needed


def test_other_torch_minor_is_refused(installed):
    program = """
import torch
torch.__version__ = torch.torch_version.TorchVersion("2.99.1")
try:
    import torch_openreg
except ImportError as error:
    print(error)
"""
    message = python(installed, program, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert "2.99" in message and f"built for PyTorch {MINOR}" in message
    assert f"  {sys.executable} -m pip install " in message
    assert message.endswith(f" --no-binary torch_openreg torch_openreg=={PLAIN}\n")


def test_other_torch_patch_is_accepted(installed):
    program = """
import torch
torch.__version__ = torch.torch_version.TorchVersion("MINOR.9+cpu")
import torch_openreg
print("imported")
""".replace("MINOR", MINOR)
    assert python(installed, program, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "imported\n"


def test_torch_openreg_may_be_imported_before_torch(installed):
    assert python(installed, "import torch_openreg, torch; print(torch.openreg.device_count())",
                  OPENREG_DEVICE_COUNT="4") == "4\n"  # fmt: skip


def test_source_folder_that_is_not_built_names_the_remedy(tmp_path):
    """Python takes it before the installed package, and `import torch` imports it."""
    package = tmp_path / "torch_openreg"
    package.mkdir()
    shutil.copy(ROOT / "torch_openreg/__init__.py", package)
    program = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in repr(finder)]
import torch
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    for text in (f"{tmp_path} is the source of", "run 'make build' in it", "in another folder"):
        assert text in done.stderr


def test_versions_of_header_and_package_agree():
    header = (ROOT / "csrc/openreg/include/openreg.h").read_text()
    parts = [
        re.search(rf"#define OPENREG_VERSION_{part} (\d+)$", header, re.MULTILINE)[1]
        for part in ("MAJOR", "MINOR", "PATCH")
    ]
    version = ".".join(parts)
    assert version == importlib.metadata.version("torch_openreg") == torch_openreg.__version__
    assert version == torch_openreg._C._core_version  # the runtime's
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
    assert 'dynamic = ["version", ' in (ROOT / "pyproject.toml").read_text()  # from the header
    assert ctypes.CDLL(f"libopenreg.so.{parts[0]}").orGetVersion() == int(
        "{}{:0>2}{:0>2}".format(*parts)
    )


def test_requirements_are_pinned():
    text = (ROOT / "pyproject.toml").read_text()
    build_requires = re.findall(r'"(.*?)"', text.partition("requires = [")[2].partition("]")[0])
    assert f"pip install {' '.join(build_requires)} " in (ROOT / "README.md").read_text()
    build, tools = (
        [line for line in (ROOT / ".ci" / name).read_text().splitlines() if line[0] != "#"]
        for name in ("build.txt", "requirements.txt")
    )
    required = importlib.metadata.requires("torch_openreg")
    required.remove(f"torch=={MINOR}.*")
    tritons = [requirement for requirement in required if requirement.startswith("triton")]
    assert len(tritons) == 2  # two extras; which one fits PyTorch decides
    assert all(re.match(r"triton<[\d.]+,>=[\d.]+;", requirement) for requirement in tritons)
    required = [requirement for requirement in required if requirement not in tritons]
    for requirement in [*build_requires, *build, *tools, *required]:
        assert re.match(r"[\w-]+==[\d.]+($|;| )", requirement), requirement
    assert set(build_requires) <= set(build)


def test_make_demo_shows_what_it_installs(tmp_path):
    command = ["make", "--dry-run", "demo", f"VENV={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    installs = re.findall(r"pip install (.*)", done.stdout)
    assert [line.split()[-1] for line in installs] == [f"{tmp_path}/build.txt", "'.[examples]'"]
    assert not any("--quiet" in line for line in installs)


# ---- What pip builds ----


def repack(name, folder):
    """A wheel of an installed distribution: the tests ask no index for one."""
    found = importlib.metadata.distribution(name)
    tag = re.search(r"^Tag: (.*)", found.read_text("WHEEL"), re.MULTILINE)[1]
    stem = f"{re.sub('[-.]+', '_', found.name)}-{found.version}"
    scripts = {entry.name for entry in found.entry_points}  # pip makes these itself
    left = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}
    info = Path(str(next(file for file in found.files if file.name == "METADATA"))).parent
    with zipfile.ZipFile(folder / f"{stem}-{tag}.whl", "w") as archive:
        for file in found.files:
            place = str(file)
            if file.parts[0] == "..":
                place = f"{stem}.data/scripts/{file.name}"
            if file.suffix == ".pyc" or (file.parts[0] == ".." and file.name in scripts):
                continue
            if file.parent != info or file.name not in left:
                archive.write(found.locate_file(file), place)
        rows = [f'"{place}",,' for place in [*archive.namelist(), f"{info}/RECORD"]]
        archive.writestr(f"{info}/RECORD", "\n".join(rows))


def with_requirements(*names):
    """Of what is installed: these, and what they require."""
    found = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # of another platform
            continue
        found.add(name)
        waiting += [re.match(r"[\w.-]+", line)[0] for line in required if "extra ==" not in line]
    return found


@pytest.fixture(scope="module")
def folder_of_wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    for name in ("setuptools", "ninja"):
        repack(name, folder)
    return folder


def pip(python, *arguments):
    """With what the command says alone: no index, no folder, no file of settings."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON"))}
    environment["PIP_CONFIG_FILE"] = os.devnull
    options = ["--disable-pip-version-check", "--no-cache-dir"]
    command = [python, "-m", "pip", *options, *arguments]
    return run(command, env=environment, cwd=ROOT.parent)


@pytest.mark.slow
@pytest.mark.parametrize("isolation", [[], ["--no-build-isolation"]], ids=["isolated", "not"])
def test_pip_builds_with_the_installed_pytorch(sdist, folder_of_wheels, isolation, tmp_path):
    """It can fetch no other one."""
    (tmp_path / "tree").mkdir()
    tree = wheels.unpack(sdist, tmp_path / "tree")
    pip(sys.executable, "wheel", "--no-deps", "--no-index", "--find-links", folder_of_wheels,
        "--wheel-dir", tmp_path, *isolation, tree)  # fmt: skip
    (built,) = tmp_path.glob("*.whl")
    assert built.name.startswith(f"torch_openreg-{PLAIN}-cp")
    with zipfile.ZipFile(built) as archive:
        metadata = archive.read(f"torch_openreg-{PLAIN}.dist-info/METADATA").decode()
    assert f"Requires-Dist: torch=={MINOR}.*\n" in metadata


@pytest.fixture
def bare(sdist, tmp_path):
    """Runs a program in the source tree, with a Python that has setuptools alone and, if a version
    is given, a PyTorch that is nothing but that."""
    run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"])
    (tmp_path / "path").mkdir()
    installed = Path(importlib.util.find_spec("setuptools").origin).parent.parent
    for place in [*installed.glob("setuptools*"), installed / "_distutils_hack"]:
        (tmp_path / "path" / place.name).symlink_to(place)
    (tmp_path / "tree").mkdir()
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "tree")
    (tree,) = (tmp_path / "tree").iterdir()

    def execute(*arguments, torch_version=None):
        if torch_version:
            (packages,) = tmp_path.glob("venv/lib/python*/site-packages")
            (packages / "torch").mkdir()
            (packages / "torch/__init__.py").touch()
            (packages / "torch/version.py").write_text(f"__version__ = {torch_version!r}\n")
        return subprocess.run(
            [tmp_path / "venv/bin/python", *arguments],
            env={**os.environ, "PYTHONPATH": str(tmp_path / "path")},
            cwd=tree,
            capture_output=True,
            text=True,
            check=False,
        )

    return execute


ASK = "import build_backend as b; print('asks for', b.get_requires_for_build_wheel())"
NEEDED = "torch>=2.13,<2.16"


def test_isolated_build_asks_for_pytorch_where_there_is_none(bare):
    done = bare("-c", ASK)
    assert f"asks for ['{NEEDED}']" in done.stdout, done.stderr


def test_isolated_build_does_not_replace_another_pytorch(bare):
    done = bare("-c", ASK, torch_version="2.12.1+cpu")
    assert done.returncode == 1 and "asks for" not in done.stdout
    assert "PyTorch 2.12.1+cpu is installed" in done.stderr and "2.13, 2.14, 2.15" in done.stderr
    assert "pip install --no-build-isolation" in done.stderr and "Traceback" not in done.stderr


def test_build_without_pytorch_names_the_remedy(bare):
    done = bare("setup.py", "--quiet", "bdist_wheel")
    assert done.returncode == 1
    assert f"pip install '{NEEDED}'" in done.stderr and "Traceback" not in done.stderr
    assert "pip install --no-build-isolation" in done.stderr


def test_build_without_ninja_names_the_remedy(bare):
    done = bare("setup.py", "--quiet", "build_ext", torch_version=f"{MINOR}.0")
    assert done.returncode == 1
    assert re.search(
        r"ninja is not installed: \S+ -m pip install ninja==[\d.]+$", done.stderr, re.M
    )


@pytest.fixture
def compiled(wheel, tmp_path, monkeypatch):
    """A compiler that takes minutes less: it gives the objects that `make build` has of the same
    sources, and compiles one of them, with PyTorch's headers wherever they are. The session's wheel
    comes before it."""
    include = f"-isystem {Path(torch.__file__).parent / 'include'} "
    folders = [file.parent for file in ROOT.glob("build/native-*/build.ninja")
               if include in file.read_text()]  # fmt: skip
    objects = max(folders, key=lambda folder: (folder / ".ninja_log").stat().st_mtime)
    script = tmp_path / "c++"
    script.write_text(f"""#!/bin/sh
for last; do :; done
case $last in
torch/guard.cpp.o) ;;
*.cpp.o) echo "$last:" > "$last.d"; cp {objects}/"$last" "$last"; exit ;;
esac
exec {os.environ.get("CXX", "c++")} "$@"
""")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_package_installs_offline_in_an_empty_environment(
    kind, request, folder_of_wheels, tmp_path
):
    """A folder has PyTorch, what it and a build require, and pytest; the file is all else."""
    file = request.getfixturevalue(kind)
    for name in with_requirements("torch", "pytest"):
        repack(name, folder_of_wheels)
    run([sys.executable, "-m", "venv", tmp_path / "venv"])
    interpreter = tmp_path / "venv/bin/python"
    pip(interpreter, "install", "--quiet", "--no-index", "--find-links", folder_of_wheels,
        file, "pytest")  # fmt: skip

    def execute(*arguments, **variables):
        variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **variables}
        return run([interpreter, *arguments], env=variables, cwd=tmp_path)

    (lines,) = re.findall(
        r"## Ten lines.*?```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S
    )
    assert execute("-c", lines).startswith("tensor(")
    assert "B: the default stream reads x (" in execute("-m", "torch_openreg", "demo")
    (tmp_path / "test_it.py").write_text(
        "import torch\n\ndef test_it():\n    assert torch.ones(3, device='openreg').sum() == 3\n"
    )
    options = ("--openreg-sanitizer", "--openreg-schedules=2")
    assert "1 passed" in execute("-m", "pytest", *options, "test_it.py")
