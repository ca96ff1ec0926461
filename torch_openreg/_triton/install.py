"""Puts the device in the place of NVIDIA's in Triton. Imported after ``triton.compiler``."""

import triton.backends

from .refused import REFUSED


def _backend():
    if REFUSED is not None:
        from .refused import Compiler, Driver
    else:
        from .backend import Compiler
        from .driver import Driver
    return triton.backends.Backend(Compiler, Driver)


# Libraries compare the target's name with "cuda". So the backend of that name is replaced.
triton.backends.backends["nvidia"] = _backend()
