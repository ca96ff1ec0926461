"""torch.set_default_tensor_type, which accepts only PyTorch's own classes."""

import torch

from ..openreg._typed import _TensorType
from . import wrap


def _taking_ours(set_type):
    chosen = False

    def set_default_tensor_type(kind):
        nonlocal chosen
        ours = isinstance(kind, _TensorType)
        if not ours:
            set_type(kind)
        elif kind.is_sparse or not kind.dtype.is_floating_point:
            raise TypeError(
                "only floating-point types are supported as the default type, "
                f"and {kind.__module__}.{kind.__name__} is not one"
            )
        else:
            set_type(getattr(torch, kind.__name__))
        if ours or chosen:
            torch.set_default_device("openreg" if ours else None)
        chosen = ours

    return set_default_tensor_type


def install():
    wrap("torch._C._set_default_tensor_type", _taking_ours)
