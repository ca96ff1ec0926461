"""Which names a device can have: PyTorch names a module, methods and a backend after it."""

import keyword
import re

import torch

_MOST = 23  # of orNameDevices
# Names that torch.device() takes, whether this build of PyTorch has the device or not.
_DEVICES = {
    *("cpu", "cuda", "ipu", "xpu", "mkldnn", "opengl", "opencl", "ideep", "hip", "ve", "fpga"),
    *("maia", "xla", "lazy", "vulkan", "mps", "meta", "hpu", "mtia", "privateuseone"),
}
_BACKENDS = {"fake", "gloo", "mpi", "nccl", "ucc", "undefined", "xccl"}
# Where PyTorch puts a method of this name, and for most a property is_NAME.
_OWNERS = {
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.nn.Module": torch.nn.Module,
    "PackedSequence": torch.nn.utils.rnn.PackedSequence,
    "torch.UntypedStorage": torch.UntypedStorage,
    "torch.TypedStorage": torch.TypedStorage,
}


def refusal(name):
    """Why `name` cannot be a device's; None if it can."""
    # PyTorch's device strings take no digits before the colon, and pip no name that ends with "_".
    if not re.fullmatch(r"[a-z]([a-z_]*[a-z])?", name) or len(name) > _MOST:
        return (
            f"a device's name has lower-case letters, with underscores between them, and at most "
            f"{_MOST} characters; got {name!r}"
        )
    if keyword.iskeyword(name):
        return f"{name!r} is a word of Python"
    if name in _DEVICES:
        return f"{name!r} is a device of PyTorch"
    if name in _BACKENDS:
        return f"{name!r} is a backend of torch.distributed, and the device's has the device's name"
    for where, owner in _OWNERS.items():
        for attribute in (name, f"is_{name}"):
            if hasattr(owner, attribute):
                return (
                    f"{where}.{attribute} exists: the device's module, its methods and its "
                    "properties need names of their own"
                )
    return None
