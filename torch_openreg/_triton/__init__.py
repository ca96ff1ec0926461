"""Triton's kernels on the device: its front end, its caches and its launches as they are, and C++
for the CPU in the place of a GPU's code. docs/triton.md describes it.

Nothing here imports Triton before a program does. Under ``--as-cuda`` the module `install` is
imported after ``triton.compiler``; ``torch_openreg.triton()`` imports it for other programs.
"""


def activate():
    """For a program that says "openreg"."""
    import torch.utils._triton  # noqa: F401
    import triton  # noqa: F401

    from . import availability, install  # noqa: F401

    if install.REFUSED is not None:
        raise RuntimeError(install.REFUSED)
