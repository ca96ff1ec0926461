"""Answers what runs of Triton. Imported after torch.utils._triton."""

import sys

from torch.utils._triton import has_triton_package

from .._patches import replace, wrap


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


def _takes_descriptors(takes):
    # A launch in a compiled function takes tensor descriptors, as each launch does. Libraries ask
    # whether to use kernels for a card of capability 9.0.
    caller = sys._getframe(2).f_globals.get("__name__", "")
    is_compiler = caller.startswith(("torch._dynamo.", "torch._higher_order_ops."))
    return (is_compiler and _runs()) or takes()


replace("torch.utils._triton.has_triton", _has_triton)
wrap("torch.utils._triton.has_triton_tensor_descriptor_host_tma", _takes_descriptors)
