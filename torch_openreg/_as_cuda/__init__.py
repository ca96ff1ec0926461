"""``torch_openreg.as_cuda()``: the device under CUDA's name, for the rest of the process.

csrc/torch/as_cuda.cpp changes the name in PyTorch's C++. From then on PyTorch's Python code, which
goes by names, treats the device as CUDA's and calls ``torch.cuda`` for it. This package defines
what that module and the few others with CUDA's name do then. docs/cuda.md lists what becomes of
each name.
"""

import os
import sys

import torch

from .. import _C, _registration, openreg
from . import _distributed, _library, _names, _places, _tensors

VARIABLE = "OPENREG_AS_CUDA"
_installed = False


def _refuse(force):
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "torch_openreg.as_cuda(): this process has used CUDA already\n"
            "  help: call it before anything does"
        )
    if "torch_openreg._compile.inductor" in sys.modules:
        raise RuntimeError(
            "torch_openreg.as_cuda(): this process has imported Inductor (torch._inductor),\n"
            "  which keeps the device's name\n"
            "  help: call it before anything is compiled, and before a library that imports it\n"
            "        (run --as-cuda and OPENREG_AS_CUDA=1 do)"
        )
    if _C._may_have_gpu() and not force:
        raise RuntimeError(
            "torch_openreg.as_cuda(): this machine seems to have a GPU,\n"
            "  which the process could then not use\n"
            "  help: as_cuda(force=True), run --as-cuda --force or OPENREG_AS_CUDA=force allow it"
        )


def _take_launch_blocking():
    """Applied at the first use of a device, as CUDA does."""
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        os.environ.setdefault("OPENREG_LAUNCH_BLOCKING", "1")


def _take_settings():
    """Applies the variables that CUDA's library reads."""
    openreg._lazy._lazy_call(_take_launch_blocking)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        wanted = [name for name in visible.split(",") if name.strip() not in ("", "-1")]
        limit = int(os.environ.get("OPENREG_DEVICE_COUNT", len(wanted)))
        os.environ["OPENREG_DEVICE_COUNT"] = str(min(len(wanted), limit))


def install(force):
    global _installed
    if _installed:
        return
    _refuse(force)
    if not _C._take_cudas_name():
        raise RuntimeError(
            f"torch_openreg.as_cuda(): PyTorch {torch.__version__} has no replaceable\n"
            "  function for the device's name; nothing was changed"
        )
    _installed = True
    os.environ[VARIABLE] = "force" if force else "1"  # for child processes
    _take_settings()
    _names.install()
    _tensors.install()
    _places.install()
    _library.install()
    # PyTorch has a backend for the name, which it would take.
    _registration.register_for_inductor()
    if torch.distributed.is_available():
        _distributed.install()


def install_if_set():
    """Applies the variable at the package's import."""
    value = os.environ.get(VARIABLE, "0")
    if value not in ("", "0", "1", "force"):
        raise ValueError(f"{VARIABLE} is 0, 1 or force, not {value!r}")
    if value in ("1", "force"):
        install(value == "force")
