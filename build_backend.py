"""The build backend: setuptools', which asks for a PyTorch only where there is none.

The package is compiled with the headers of the PyTorch that it runs with. pip builds in an
environment of its own, which hides the one that the package is for; a requirement in pyproject.toml
would fetch a second PyTorch there, whichever is the newest.
"""

import functools
import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from setuptools import build_meta

# The hooks that pip calls; those that differ here are defined below.
from setuptools.build_meta import *  # noqa: F403

# The minor versions that the tree builds against.
MINORS = ("2.13", "2.14", "2.15")
TORCH = "torch>=2.13,<2.16"


class Torch(NamedTuple):
    folder: Path
    version: str
    minor: str


def _hidden():
    """Where PyTorch is for an interpreter without pip's variables, which are what hides it."""
    program = "import importlib.util as u; s = u.find_spec('torch'); print(s.origin if s else '')"
    shown = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=shown, cwd="/", stdout=subprocess.PIPE, text=True).stdout


def find_torch():
    """The PyTorch to build against, or None. It is not imported: what it needs may be hidden."""
    spec = importlib.util.find_spec("torch")
    origin = (spec.origin or "" if spec else _hidden()).strip()
    if not origin:
        return None
    folder = Path(origin).parent
    version = runpy.run_path(str(folder / "version.py"))["__version__"]
    return Torch(folder, version, re.match(r"\d+\.\d+", version)[0])


def fail(reason, advice):
    sys.exit(
        f"\n{reason}; torch_openreg builds against {', '.join(MINORS)}. {advice}, then build "
        "without isolation, with setuptools and ninja installed:\n"
        f"  {sys.executable} -m pip install --no-build-isolation FOLDER_OR_FILE\n"
    )


@functools.cache
def the_torch():
    """The PyTorch to build against; that there is none is an error."""
    return find_torch() or fail(
        f"{sys.executable} has no PyTorch", f"Install it (pip install '{TORCH}')"
    )


def get_requires_for_build_wheel(config_settings=None):
    """What an isolated build fetches."""
    torch = find_torch()
    if torch and torch.minor not in MINORS:
        # pip would fetch another one, and replace with it the one that is installed.
        fail(f"PyTorch {torch.version} is installed", "Install one of these, or keep it")
    return build_meta.get_requires_for_build_wheel(config_settings) + ([] if torch else [TORCH])


get_requires_for_build_editable = get_requires_for_build_wheel
