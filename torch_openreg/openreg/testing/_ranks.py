"""The ranks of a group as threads of one process: ``torch.openreg.testing.run_ranks``."""

import contextlib
import datetime
import importlib
import os
import sys
import threading

import torch
from torch.distributed import distributed_c10d as c10d

from ... import _C
from ..._patches import replace, wrapped
from .. import distributed
from .._utils import OWN_NAME, type_name
from ..device import _exchange_device, device_count, synchronize

_LAZY = "TORCH_GLOO_LAZY_INIT"
_RPC = "torch.distributed.rpc.init_rpc"


def run_ranks(function, size, *arguments, timeout=60):
    """Runs ``function(rank, *arguments)`` for each rank of a group, in a thread and on a device of
    its own, and returns a list of the results.

    ::

        def train(rank, width):
            model = torch.nn.Linear(width, 1).to("openreg")  # openreg:<rank>
            model = torch.nn.parallel.DistributedDataParallel(model)
            ...

        torch.openreg.testing.run_ranks(train, 32, 16)

    When `function` begins, the thread has a default group of torch.distributed, and the device with
    the rank's number is current. Groups and collectives are those of processes, and so are the
    errors of ranks that do not agree. The sanitizer watches all ranks. docs/distributed.md lists
    what the threads share.

    Waits for the ranks and their devices. The exception of the first rank that fails is raised, and
    whatever waits for that rank fails. Compiling and RPC, which need a process for each rank, raise
    NotImplementedError in a rank.

    Args:
        function: what a rank runs.
        size: the number of ranks, at most that of the devices. A wrong number raises ValueError, an
            argument of the wrong type TypeError, and a call by a rank RuntimeError.
        arguments: further arguments of `function`.
        timeout: of the groups' collectives, in seconds. The limit of new_group's as well.
    """
    _check(function, size, timeout)
    return _World(function, size, arguments, timeout).run()


def _check(function, size, timeout):
    if not callable(function):
        raise TypeError(f"function must be callable, got {function!r}")
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"size must be a whole number, got {size!r}")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds, got {timeout!r}")
    if not 0 < timeout <= 1e9:  # in C++ the clock of a longer one overflows
        raise ValueError(f"timeout must be more than 0 seconds and at most 1e9, got {timeout}")
    if getattr(distributed.thread, "is_rank", False):
        raise RuntimeError("run_ranks was called by a rank of run_ranks")
    count = device_count()
    if not 0 < size <= count:
        raise ValueError(
            f"size must be from 1 to {count}, the number of devices, got {size}\n"
            "  help: OPENREG_DEVICE_COUNT or torch.openreg.configure makes up to 64"
        )


class _World:
    def __init__(self, function, size, arguments, timeout):
        self.function, self.size, self.arguments = function, size, arguments
        self.timeout = datetime.timedelta(seconds=timeout)
        self.store = torch.distributed.HashStore()
        self.store.set_timeout(self.timeout)
        self.results = [None] * size
        self.lock = threading.Lock()
        self.failed = []  # (rank, exception), in the order in which they failed
        self.worlds = {}  # PyTorch's state of each rank that has a group

    def run(self):
        threads = [
            threading.Thread(target=self._rank, args=(rank,), name=f"openreg-rank-{rank}")
            for rank in range(self.size)
        ]
        with _a_world_for_each_thread(), _gloo_connects_when_used(), _refusals(), _no_active_ddp():
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    thread.join()
            except BaseException:  # KeyboardInterrupt
                for rank in range(self.size):
                    self._abort(rank)
                for thread in threads:
                    thread.join()
                raise
        if self.failed:
            raise self._first()
        return self.results

    def _rank(self, rank):
        distributed.thread.is_rank, distributed.thread.timeout = True, self.timeout
        _C._set_rank_thread(rank, self.size)
        try:
            _exchange_device(rank)
            # Backward passes run on this thread too: no other has its groups.
            with torch.autograd.set_multithreading_enabled(False):
                self._join(rank)
                self.results[rank] = self.function(rank, *self.arguments)
                synchronize()
        except BaseException as error:
            with self.lock:
                self.failed.append((rank, error))
            self._abort(rank)
            with contextlib.suppress(Exception):  # else the next run reports what fails with it
                synchronize()
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()

    def _join(self, rank):
        torch.distributed.init_process_group(
            "nccl" if type_name() == "cuda" else OWN_NAME,
            store=self.store,
            rank=rank,
            world_size=self.size,
            timeout=self.timeout,
        )
        self.worlds[rank] = c10d._world._get_world()

    def _abort(self, rank):
        """Ends what others wait for from this rank."""
        if rank in self.worlds:
            for group in list(self.worlds[rank].pg_map):
                group.abort()

    def _first(self):
        (rank, error), *others = self.failed
        note = f"on rank {rank} of {self.size}"
        if others:
            note += ", and afterwards on " + _counted([rank for rank, _ in others])
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(note)
        return error


def _counted(ranks):
    """ "ranks 1, 2 and 5 more" """
    named = ", ".join(map(str, ranks[:4]))
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"


@contextlib.contextmanager
def _a_world_for_each_thread():
    """As PyTorch's own tests of threaded ranks do it."""
    from torch.testing._internal.distributed import multi_threaded_pg

    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    hook = sys.excepthook  # each group adds its own
    isolate(True)
    multi_threaded_pg._install_threaded_pg()
    try:
        yield
    finally:
        multi_threaded_pg._uninstall_threaded_pg()
        isolate(False)
        sys.excepthook = hook


@contextlib.contextmanager
def _gloo_connects_when_used():
    """The group's Gloo for CPU tensors: a connection for each pair of ranks is a lot."""
    before = os.environ.get(_LAZY)
    os.environ.setdefault(_LAZY, "1")
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LAZY]


@contextlib.contextmanager
def _no_active_ddp():
    """The module whose forward runs is kept for all threads together, so that forwards of several
    threads leave one behind; a later torch.compile would split its graph for it."""
    ddp = torch.nn.parallel.DistributedDataParallel
    before = ddp._active_ddp_module
    try:
        yield
    finally:
        ddp._active_ddp_module = before


@contextlib.contextmanager
def _refusals():
    if "torch._dynamo" in sys.modules:
        importlib.import_module("torch_openreg._compile.dynamo").refuse_on_rank_threads()
    if not torch.distributed.rpc.is_available():
        yield
        return
    init = torch.distributed.rpc.init_rpc

    def refuse(original, *args, **kwargs):
        distributed.refuse_on_rank_thread("torch.distributed.rpc")
        return original(*args, **kwargs)

    replace(_RPC, wrapped(init, refuse))
    try:
        yield
    finally:
        replace(_RPC, init)
