"""Methods and attributes of tensors that PyTorch's C++ has only for CUDA's kind of device."""

import torch

from .. import _C, openreg
from .._patches import replace, wrap
from ..openreg._utils import OWN_MODULE, OWN_NAME
from ._names import refusal

_PREFIXES = ("torch.cuda.", f"{OWN_MODULE}.")


def _dtype_of(kind):
    """The (dtype, layout) that a type of the device names, or None:
    "torch.cuda.sparse.FloatTensor"."""
    if isinstance(kind, type):
        kind = f"{kind.__module__}.{kind.__name__}"
    if not isinstance(kind, str) or not kind.startswith(_PREFIXES):
        return None
    *place, name = kind.split(".")
    layout = torch.sparse_coo if place[-1] == "sparse" else torch.strided
    dtype = getattr(getattr(torch, name, None), "dtype", None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"invalid type: {kind!r}")
    return dtype, layout


def _by_either_name(original, tensor, dtype=None, non_blocking=False, **kwargs):
    named = None if dtype is None else _dtype_of(dtype)
    if named is None:
        return original(tensor, dtype, non_blocking, **kwargs)
    dtype, layout = named
    if layout != tensor.layout:
        raise RuntimeError(f"a tensor of layout {tensor.layout} has no type of layout {layout}")
    where = tensor.device if tensor.is_cuda else torch.device("cuda", openreg.current_device())
    return tensor.to(where, dtype, non_blocking=non_blocking)


def _interface(self):
    # An AttributeError, so that hasattr() is False, as it is for a tensor on the CPU.
    raise AttributeError(str(refusal("torch.Tensor.__cuda_array_interface__")))


def install():
    replace("torch.Tensor.cuda", _C._cuda_descriptor())
    replace("torch.Tensor.is_cuda", _C._is_cuda_descriptor())
    # PyTorch has generated these two for the device.
    setattr(torch.Tensor, OWN_NAME, _C._cuda_descriptor())
    setattr(torch.Tensor, f"is_{OWN_NAME}", _C._is_cuda_descriptor())
    replace("torch.Tensor.__cuda_array_interface__", property(_interface))
    wrap("torch.Tensor.type", _by_either_name)
