"""Automatic mixed precision: torch.amp with the device filled in."""

import functools

import torch

from .. import _C
from ._utils import OWN_NAME, type_name

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd", "get_amp_supported_dtype"]


def get_amp_supported_dtype():
    """A list of the dtypes that torch.autocast may use on the device."""
    _C._register_operators()  # casts fake tensors of a device that nothing has used, too
    return [torch.float16, torch.bfloat16]


class autocast(torch.autocast):
    """``torch.autocast("openreg")``.

    Args:
        enabled: whether operators are cast.
        dtype: what to; None is torch.get_autocast_dtype's, float16 until it is set.
        cache_enabled: whether a cast weight is kept until the outermost context ends; None is
            torch.is_autocast_cache_enabled's.
    """

    def __init__(self, enabled=True, dtype=None, cache_enabled=None):
        super().__init__(type_name(), dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler("openreg")``: `args` and `kwargs` are those of torch.amp.GradScaler
    that follow the device."""

    def __init__(self, *args, **kwargs):
        super().__init__(type_name(), *args, **kwargs)


custom_fwd = functools.partial(torch.amp.custom_fwd, device_type=OWN_NAME)
custom_fwd.__doc__ = """``torch.amp.custom_fwd`` for the device: a decorator of the ``forward`` of
an autograd function, whose `cast_inputs` is a dtype that floating-point arguments are cast to."""
custom_bwd = functools.partial(torch.amp.custom_bwd, device_type=OWN_NAME)
custom_bwd.__doc__ = """``torch.amp.custom_bwd`` for the device: a decorator of the ``backward``,
which then runs in the autocast mode of its ``forward``."""
