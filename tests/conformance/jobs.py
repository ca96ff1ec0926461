"""Jobs, and the processes that do them. A worker that crashes or hangs costs its own job only."""

import fcntl
import hashlib
import importlib.metadata
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

HERE = os.path.dirname(os.path.abspath(__file__))
BUILD = os.path.join(os.path.dirname(os.path.dirname(HERE)), "build", "conformance")
DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "bool", "complex64")
ERRORS = "errors"  # in the place of a dtype: the operator's bad inputs
ALL = 1 << 30
LIMIT = 600  # seconds for a job, far above what any takes


@dataclass(frozen=True)
class Job:
    op: str
    dtype: str
    limit: int = ALL  # of samples
    compiled: bool = False  # by Inductor, on both; one sample

    def __str__(self):
        return f"{self.op}-{self.dtype}{'-compiled' * self.compiled}"


def _environment(blocking):
    """On the driver that runs this, with the settings of a process of its own."""
    driver = ("OPENREG_PLUGIN", "OPENREG_DEVICE_COUNT")
    variables = {k: v for k, v in os.environ.items() if k in driver or not k.startswith("OPENREG_")}
    variables["OPENREG_LAUNCH_BLOCKING"] = "1" if blocking else "0"
    return variables


def _command(*arguments):
    return [sys.executable, os.path.join(HERE, "worker.py"), *arguments]


def _list_operators():
    """In a process of its own, because PyTorch's test modules change settings of the one that
    imports them."""
    done = subprocess.run(
        _command("--list"), env=_environment(False), check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def _stamp():
    """What the list depends on."""
    installed = {found.name: found.version for found in importlib.metadata.distributions()}
    versions = [installed.get(name, "none") for name in ("torch", "numpy", "scipy")]
    with open(os.path.join(HERE, "worker.py"), "rb") as file:
        return "-".join([*versions, hashlib.sha1(file.read()).hexdigest()[:12]])


def operators(folder=BUILD):
    """By name: dtypes, and whether there are bad inputs. The list takes five seconds, so a file in
    `folder` keeps it, and of several processes that need it at once one makes it."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "operators.json"), "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        stamp, _, known = file.read().partition("\n")
        if stamp != _stamp() or not known.endswith("}"):
            known = _list_operators()
            file.truncate(0)
            file.write(f"{_stamp()}\n{known}")
    return json.loads(known)


class Worker:
    def __init__(self, blocking):
        self.blocking = blocking
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            _command(),
            env=_environment(blocking),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )

    def _died(self):
        code = self.process.wait()
        name = signal.Signals(-code).name if code < 0 else f"exit {code}"
        self.log.seek(0)
        return {"crash": " ".join([name, *self.log.read().split()])[-400:]}

    def run(self, job):
        start = time.monotonic()
        try:
            print(json.dumps(asdict(job)), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            return self._result(self._died(), start)
        if not select.select([self.process.stdout], [], [], LIMIT)[0]:
            self.close()
            return self._result({"hang": f"no result after {LIMIT} seconds"}, start)
        line = self.process.stdout.readline()
        return json.loads(line) if line else self._result(self._died(), start)

    @staticmethod
    def _result(failures, start):
        return {"count": 1, "failures": failures, "seconds": time.monotonic() - start}

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self.log.close()


class Pool:
    """Worker processes, one for each thread of an executor; `submit` gives a future of a result."""

    def __init__(self, workers=None):
        self._threads = ThreadPoolExecutor(workers or os.cpu_count())
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._workers = set()

    def submit(self, job):
        return self._threads.submit(self._run, job)

    def _run(self, job):
        blocking = job.dtype == ERRORS
        worker = getattr(self._mine, "worker", None)
        if worker is None or worker.blocking != blocking or worker.process.poll() is not None:
            worker = self._mine.worker = self._replace(worker, blocking)
        return worker.run(job)

    def _replace(self, old, blocking):
        if old is not None:
            old.close()
        worker = Worker(blocking)
        with self._lock:
            self._workers.discard(old)
            self._workers.add(worker)
        return worker

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """At once: what is being done or waits is given up."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for worker in self._workers:
                worker.process.kill()
        self._threads.shutdown()
        for worker in self._workers:
            worker.close()
