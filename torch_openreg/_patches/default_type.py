"""torch.set_default_tensor_type, which accepts only PyTorch's own classes."""

import torch

from ..openreg._typed import _TensorType
from ..openreg._utils import OWN_NAME
from . import wrap

_chosen = False


def _taking_ours(set_type, kind):
    global _chosen
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
    if ours or _chosen:
        torch.set_default_device(OWN_NAME if ours else None)
    _chosen = ours


def install():
    wrap("torch._C._set_default_tensor_type", _taking_ours)
