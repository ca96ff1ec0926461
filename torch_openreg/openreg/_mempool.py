"""Private pools of device memory: MemPool, use_mem_pool, and the ids through which graphs share
one.

Part of ``torch.openreg.memory``, which has the names.
"""

import contextlib

from .. import _C
from ._lazy import _lazy_init
from ._memory_history import memory_snapshot
from ._utils import OWN_MODULE, OWN_NAME, device_index


def _refuse(name):
    raise NotImplementedError(
        f"{OWN_NAME}'s memory pools have no {name}: the device has one allocator"
    )


class MemPool(_C._MemPool):
    """Memory of the current device that serves only what use_mem_pool or a graph allocates from it.

    Freed memory stays in the pool until the pool has no holder. A pool that is destroyed returns
    its idle memory, and may wait for queued work that uses it. Tensors that are alive stay valid,
    and their memory becomes the device's own.

    Args:
        allocator: None. Anything else raises NotImplementedError, as with the next two.
        use_on_oom: False.
        no_split: False.
    """

    def __init__(self, allocator=None, use_on_oom=False, no_split=False):
        given = {"allocator": allocator, "use_on_oom": use_on_oom, "no_split": no_split}
        for name, value in given.items():
            if value:
                _refuse(name)
        _lazy_init()
        super().__init__()

    @property
    def id(self):
        """The pool's id, two integers: what a graph's ``pool`` and memory_snapshot accept."""
        return super().id

    def use_count(self):
        """The number of holders on the pool's device: this object, graphs, use_mem_pool scopes."""
        return super().use_count()

    def snapshot(self, include_traces=True):
        """memory_snapshot of this pool alone. `include_traces` is ignored, as there."""
        return memory_snapshot(self.id, include_traces=include_traces)


# torch.cuda.memory has these three names from PyTorch's C++.


def _cuda_beginAllocateCurrentThreadToPool(device, mempool_id):
    _lazy_init()
    _C._beginAllocateCurrentThreadToPool(device, mempool_id)


_cuda_endAllocateToPool = _C._endAllocateToPool
_cuda_releasePool = _C._releasePool


@contextlib.contextmanager
def use_mem_pool(pool, device=None):
    """Serves what the calling thread allocates on a device from a private pool.

    Other threads are not affected, including those of a backward pass, and memory that a kernel
    allocates while it runs is not either. Scopes nest, and the innermost counts. Several threads
    may use one pool.

    Args:
        pool: a MemPool. Anything else raises TypeError.
        device: the device, or None for the current one.
    """
    if not isinstance(pool, MemPool):
        raise TypeError(f"expected a {OWN_MODULE}.MemPool, got {pool!r}")
    index = device_index(device)
    _cuda_beginAllocateCurrentThreadToPool(index, pool.id)
    try:
        yield
    finally:
        _cuda_endAllocateToPool(index, pool.id)
        _cuda_releasePool(index, pool.id)


def graph_pool_handle():
    """An id under which graphs share one private pool: what ``pool`` of a graph accepts."""
    return _C._graph_pool_handle()
