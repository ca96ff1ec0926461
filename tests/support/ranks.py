"""Processes that form a process group and run what a test tells them (`tests` is on their path)."""

import datetime
import json
import multiprocessing
import multiprocessing.forkserver
import os
import time
import traceback
from unittest import mock

import torch
import torch.distributed as dist

LIMIT = 60  # seconds; for a rank that hangs


class RankError(AssertionError):
    """What a rank raised, with its traceback."""


def _context():
    """Forks each rank from a process that has imported PyTorch but not the device, because the
    import takes two seconds. Under LD_PRELOAD each rank is a new process, as in conftest.py."""
    if "LD_PRELOAD" in os.environ:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    with mock.patch.dict(os.environ, TORCH_DEVICE_BACKEND_AUTOLOAD="0"):
        multiprocessing.forkserver.ensure_running()
    return context


def _serve(rank, size, path, seconds, environment, pipe):
    os.environ.clear()
    os.environ.update(environment)
    torch._import_device_backends()
    torch.set_num_threads(1)
    dist.init_process_group(
        init_method=f"file://{path}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=seconds),
    )
    pipe.send((True, os.getpid()))
    while (message := pipe.recv()) is not None:
        function, arguments = message
        try:
            pipe.send((True, function(rank, *arguments)))
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            pipe.send((False, f"on rank {rank} of {size}:\n{text}"))
    dist.destroy_process_group()


class Ranks:
    """`size` processes with a default group whose backend nobody named."""

    def __init__(self, size, folder, seconds=60):
        context = _context()
        self.processes, self.pipes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, str(folder / "store"), seconds, dict(os.environ), theirs)
            self.processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self.pipes.append(ours)
            self.processes[-1].start()
            theirs.close()
        self.pids = self.results()

    def start(self, function, *arguments, ranks=None):
        """Every rank begins function(rank, *arguments)."""
        for rank in range(len(self.pipes)) if ranks is None else ranks:
            self.pipes[rank].send((function, arguments))

    def results(self, ranks=None):
        """What the ranks return, in order. One that raised, or hangs, is an error."""
        limit = time.monotonic() + LIMIT
        found, errors = [], []
        for rank in range(len(self.pipes)) if ranks is None else ranks:
            if not self.pipes[rank].poll(max(0, limit - time.monotonic())):
                errors.append(f"rank {rank} does not answer")
                continue
            ok, result = self.pipes[rank].recv()
            (found if ok else errors).append(result)
        if errors:
            raise RankError("\n".join(errors))
        return found

    def run(self, function, *arguments):
        self.start(function, *arguments)
        return self.results()

    def close(self):
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send(None)
        for process in self.processes:
            process.join(LIMIT)
            if process.is_alive():
                process.kill()


def flight_recorder():
    """[(operator, state)]: what PyTorch 2.15's has of this device's collectives."""
    from torch._C import _distributed_c10d as c10d

    entries = json.loads(c10d._dump_fr_trace_json(True, False, "openreg")).get("entries", [])
    return [(entry["profiling_name"], entry["state"]) for entry in entries]
