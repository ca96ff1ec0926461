"""Refuses what is not supported, in one sentence, at the call that requests it.

PyTorch refuses most of it by itself, and some of it needs a check from the first use of a device
on. A multiprocessing queue pickles in its own thread, which prints the error while the receiver
waits for ever: so Queue.put checks its argument. A DataLoader's worker that fails there disappears
without a message to its loader: so it sends the error instead. And byteswap swaps bytes in place,
which the host must not touch.
"""

import copyreg
import functools
import sys
from multiprocessing.reduction import ForkingPickler

import torch

from ..openreg._utils import is_ours, type_name
from . import wrap


def _sharing():
    return NotImplementedError(
        f"{type_name()} tensors cannot be shared between processes: send a CPU copy (tensor.cpu()) "
        "instead"
    )


def _is_ours(obj):
    if isinstance(obj, torch.storage.TypedStorage):
        obj = obj._untyped_storage  # asking a typed one warns
    device = getattr(obj, "device", None)
    return isinstance(device, torch.device) and is_ours(device)


def _refuse_ours(reduce):
    @functools.wraps(reduce)
    def reduce_or_refuse(obj):
        if _is_ours(obj):
            raise _sharing()
        return reduce(obj)

    return reduce_or_refuse


def _holds_ours(obj, depth=8):
    """Whether the object contains a tensor of ours, also in the usual containers."""
    if isinstance(obj, torch.Tensor | torch.UntypedStorage | torch.storage.TypedStorage):
        return _is_ours(obj)
    if depth == 0:
        return False
    if isinstance(obj, dict):
        return any(_holds_ours(value, depth - 1) for value in obj.values())
    if isinstance(obj, list | tuple | set | frozenset):
        return any(_holds_ours(value, depth - 1) for value in obj)
    return False


def install():
    """Refuses pickling for another process, in the place where torch.multiprocessing is called for
    it."""
    reducers = ForkingPickler._extra_reducers
    for kind in (
        *torch._tensor_classes,
        torch.Tensor,
        torch.nn.Parameter,
        *torch._storage_classes,
        torch.storage.TypedStorage,
    ):
        reduce = reducers.get(kind) or copyreg.dispatch_table.get(kind)
        if reduce is not None:
            ForkingPickler.register(kind, _refuse_ours(reduce))


def on_first_use():
    """Patches that matter only once there can be a tensor of ours."""
    _check_queues()
    wrap("torch.UntypedStorage.byteswap", _refuse_byteswap)


def _check_queues():
    import multiprocessing.queues

    from torch._utils import ExceptionWrapper
    from torch.utils.data._utils import worker

    put = multiprocessing.queues.Queue.put

    @functools.wraps(put)
    def put_or_refuse(self, obj, *args, **kwargs):
        if _holds_ours(obj):
            refusal = _sharing()
            if sys._getframe(1).f_code is not worker._worker_loop.__code__:
                raise refusal
            where = f"in DataLoader worker process {worker.get_worker_info().id}"
            obj = (obj[0], ExceptionWrapper((type(refusal), refusal, None), where))
        return put(self, obj, *args, **kwargs)

    multiprocessing.queues.Queue.put = put_or_refuse


def _refuse_byteswap(byteswap):
    def byteswap_or_refuse(self, dtype):
        if _is_ours(self):
            raise NotImplementedError(
                f"UntypedStorage.byteswap is not implemented for {type_name()} devices: swap a "
                "copy (storage.cpu())"
            )
        return byteswap(self, dtype)

    return byteswap_or_refuse
