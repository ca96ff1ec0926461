"""Worker processes, each with a share of one file's tests. One that dies or hangs costs the test
that it was at; another goes on behind it."""

import collections
import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import wait

from .worker import serve, shortened

LOADING = 300  # seconds for what is no test


@dataclass
class Share:
    kind: str  # list, run, check or twins: see worker.serve
    file: str
    tests: list = field(default_factory=list)  # what is left of it
    failed: list = field(default_factory=list)
    all: list = field(default_factory=list)  # the company in which those failed


class Worker:
    def __init__(self, tree, share):
        self.share, self.at = share, None
        self.log = tempfile.TemporaryFile("a+")  # noqa: SIM115
        context = multiprocessing.get_context("fork")
        self.connection, there = context.Pipe(duplex=False)
        rest = list(share.tests)
        arguments = (there, self.log.fileno(), tree, share.kind, share.file, rest)
        self.process = context.Process(target=serve, args=arguments)
        self.process.start()
        there.close()
        self.heard = time.monotonic()

    def messages(self):
        """What it said; the share loses what is done."""
        with contextlib.suppress(EOFError, OSError):
            while self.connection.poll():
                message = self.connection.recv()
                self.heard = time.monotonic()
                if message[0] == "begin":
                    self.at = message[1:]
                    if self.share.tests[:1] == [message[1]]:
                        del self.share.tests[0]
                    continue
                if message[0] == "end":
                    self.at = None
                if message[0] == "lost":
                    self.share.tests.clear()
                yield message

    def told(self):
        self.log.seek(0)
        return self.log.read().partition("\nExtension modules:")[0]

    def stop(self):
        """The process and those that its tests started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.connection.close()

    def hung(self):
        """Its stacks are in its log afterwards."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGUSR1)
        self.process.join(1)


def _death(code):
    return signal.Signals(-code).name if code < 0 else f"exit {code}"


class Pool:
    def __init__(self, tree, jobs, limit):
        self.tree, self.jobs, self.limit = tree, jobs, limit
        self.waiting, self.busy = collections.deque(), []

    def submit(self, share, first=False):
        (self.waiting.appendleft if first else self.waiting.append)(share)

    def events(self):
        """`(share, message)`: those of workers, and ("finished",)."""
        while self.waiting or self.busy:
            while self.waiting and len(self.busy) < self.jobs:
                self.busy.append(Worker(self.tree, self.waiting.popleft()))
            wait([worker.connection for worker in self.busy], 1)
            for worker in list(self.busy):
                ended = worker.process.exitcode is not None
                for message in worker.messages():
                    yield worker.share, message
                limit = self.limit if worker.at else max(self.limit, LOADING)
                if ended or time.monotonic() - worker.heard > limit:
                    self.busy.remove(worker)
                    yield from self._end(worker, ended)

    def _end(self, worker, ended):
        if not ended:
            worker.hung()
        code, share = worker.process.exitcode, worker.share
        worker.stop()
        outcome = "crashed" if ended else "hung"
        what = _death(code) if ended else f"nothing for {self.limit} s"
        if worker.at is not None:
            result = {
                "outcome": outcome,
                "message": shortened(f"{what}\n{worker.told()}"),
                "seconds": 0.0,
            }
            yield share, ("end", *worker.at, result)
        elif not ended or code:
            yield share, ("lost", shortened(f"{what}, outside of any test\n{worker.told()}"))
            share.tests.clear()
        if share.tests:
            self.submit(share, first=True)
        else:
            yield share, ("finished",)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for worker in self.busy:
            worker.stop()
