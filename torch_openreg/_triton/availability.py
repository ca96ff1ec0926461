"""Answers whether Triton's kernels run. Imported after torch.utils._triton."""

import sys

from torch.utils._triton import has_triton_package

from .._patches import replace


def _runs():
    """Whether Triton's kernels run on the device in this process."""
    if not has_triton_package():
        return False
    installed = sys.modules.get(f"{__package__}.install")
    return installed is not None and installed.REFUSED is None


def _has_triton(**_):  # from PyTorch 2.15 on, whether the CPU counts too
    # Inductor asks whether its own kernels may be Triton's. They are C++ here.
    caller = sys._getframe(1).f_globals.get("__name__", "")
    return not caller.startswith("torch._inductor.") and _runs()


replace("torch.utils._triton.has_triton", _has_triton)
