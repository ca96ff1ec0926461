"""Refuses what is not supported, in one sentence, at the call that requests it.

PyTorch refuses most of it by itself. byteswap swaps bytes in place, which the host must not touch.
"""

from ..openreg._utils import is_ours, type_name
from . import wrap


def on_first_use():
    """Patches that matter only once there can be a tensor of ours."""
    wrap("torch.UntypedStorage.byteswap", _refuse_byteswap)


def _refuse_byteswap(byteswap, storage, dtype):
    if is_ours(storage.device):
        raise NotImplementedError(
            f"UntypedStorage.byteswap is not implemented for {type_name()} devices\n"
            "  help: swap a copy (storage.cpu())"
        )
    return byteswap(storage, dtype)
