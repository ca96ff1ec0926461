"""Tells of a device that a process has used before it selected its own: of rank 1, say, that has
made a tensor on device 0 before set_device(1). OPENREG_CHECK_STRAY_CONTEXT is "warn" or "error", as
TORCH_CUDA_CHECK_STRAY_CONTEXT of PyTorch 2.15, which counts under the name cuda."""

import os
import sys
import warnings

from .. import _C
from ._utils import OWN_NAME, type_name

_first_use = ""


def _mode():
    names = ["OPENREG_CHECK_STRAY_CONTEXT"]
    if type_name() != OWN_NAME:
        names.append("TORCH_CUDA_CHECK_STRAY_CONTEXT")
    return next((os.environ[name].lower() for name in names if name in os.environ), "")


def note_first_use():
    """Remembers the program's line that uses a device before all others."""
    global _first_use
    if not _mode():
        return
    from .sanitizer._frames import walk_own

    frame = next(walk_own(sys._getframe()), None)
    if frame is not None:
        _first_use = f" (the first use of a device: {frame.f_code.co_filename}:{frame.f_lineno})"


def check(selected, stacklevel):
    """Called where the program, `stacklevel` frames up, has selected the device of that index."""
    mode = _mode()
    if mode not in ("warn", "error"):
        return
    stray = [i for i in range(_C._device_count()) if i != selected and _C._is_active(i)]
    if not stray:
        return
    text = (
        f"set_device({selected}) found that the process uses {type_name()} device(s) {stray} "
        f"already{_first_use}\n"
        "  help: select the rank's device before the first tensor, or pinned memory, is made"
    )
    if mode == "error":
        raise RuntimeError(text)
    warnings.warn(text, stacklevel=stacklevel)
