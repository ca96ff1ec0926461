"""What is not built yet says so, in one sentence, where it is asked for.

PyTorch has a door of its own for most of it, and some things need a look from the first use of a
device on. A multiprocessing queue pickles in a thread of its own, where the error is printed and
the receiver waits for ever: Queue.put looks at what it is given. A DataLoader's worker that fails
there is gone without a word to its loader: it sends the error instead. And byteswap swaps where the
bytes are, which the host must not touch.
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
    """Whether a tensor of ours is in the object, through the containers people put in queues."""
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
    """Pickling for another process. Takes effect where torch.multiprocessing would be asked."""
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
    """What only matters once there can be a tensor of ours."""
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
