"""Memory beside the operators, and threads"""

import ctypes
import io
import threading

import torch
from torch.openreg import Stream

from ._base import bug, full, here, pinned


@bug
def numpy_reads_pinned_memory(right):
    """Loggers and checkpoints: NumPy reads the pinned memory that a copy is still queued for."""
    host = pinned(0)
    array = host.numpy()
    host.copy_(full(2) * 3, non_blocking=True)
    if right:
        here().synchronize()
    return float(array.sum())


@bug
def numpy_writes_pinned_memory(right):
    """Loaders: a decoder writes through NumPy into the pinned memory that a queued copy reads."""
    host, batches = pinned(0), []
    array = host.numpy()
    for i in range(2):
        array[:] = i
        batches.append(host.to("openreg", non_blocking=True))
        if right:
            here().synchronize()
    return batches


@bug
def c_library_reads_pinned_memory(right):
    """Writers in C (asynchronous I/O of DeepSpeed's kind): they are given an address, and read what
    is still being copied."""
    host = pinned(0)
    host.copy_(full(2) * 3, non_blocking=True)
    if right:
        here().synchronize()
    return ctypes.c_float.from_address(host.data_ptr()).value


@bug
def saved_before_the_copy(right):
    """Checkpoints: `torch.save` writes pinned memory to a file before the copy to it is over."""
    host, file = pinned(0), io.BytesIO()
    host.copy_(full(2) * 3, non_blocking=True)
    if right:
        here().synchronize()
    torch.save(host, file)
    file.seek(0)
    return torch.load(file)


@bug
def storage_serialised(right):
    """Checkpoints: bytes of the storage are written to a file before the copy to it is over."""
    host = pinned(0)
    host.copy_(full(2) * 3, non_blocking=True)
    if right:
        here().synchronize()
    return bytes(host.untyped_storage())[:4]


@bug(luck="a thread", outside="a thread")
def another_thread_synchronised(right):
    """Servers with worker threads: a thread reads what another has queued, after that one has
    synchronised by luck and without any order of the two."""
    host, handed = pinned(0), threading.Event()

    def work():
        with Stream():
            host.copy_(full(2), non_blocking=True)
            here().synchronize()
        handed.set()

    worker = threading.Thread(target=work)
    worker.start()
    if right:
        handed.wait()
        result = host + 0
    else:
        torch.openreg._sleep(1)
        result = host + 0
    worker.join()
    return result
