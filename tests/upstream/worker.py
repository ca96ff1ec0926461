"""What happens in a worker process: it imports one file of tests, and runs tests of it in turn."""

import ctypes
import faulthandler
import importlib
import importlib.util
import os
import signal
import sys
import time
import traceback
import unittest

import torch

DEVICE = "openreg"
TEXT = 1500  # characters kept of what went wrong
FAILED = 3  # a status of processes


def prepare():
    """In the process that forks the workers: what each of them would import for three seconds. No
    other process should, as PyTorch's test modules change its settings."""
    os.environ.setdefault("PYTORCH_PRINT_REPRO_ON_FAILURE", "0")
    importlib.import_module("torch.testing._internal.common_methods_invocations")
    importlib.import_module("torch.testing._internal.common_modules")


def load(tree, file):
    from . import inductor, shims

    path = os.path.join(tree, file)
    sys.argv = [path]  # common_utils reads it
    sys.path[:0] = [tree, os.path.dirname(path)]
    shims.install()
    if os.path.dirname(file) == "inductor":
        inductor.prepare()
    name = os.path.basename(path).removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    inductor.instantiate(module)
    return {
        value.__name__: value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, unittest.TestCase)
    }


def tests_of(classes):
    """`Class.test_name` of the device's tests, and the function that each is a variant of."""
    return {
        f"{cls.__name__}.{name}": getattr(cls, name).__name__
        for cls in classes.values()
        if getattr(cls, "device_type", None) == DEVICE
        for name in unittest.defaultTestLoader.getTestCaseNames(cls)
    }


def twin(test):
    """The same test for the CPU."""
    cls, name = test.split(".")
    head, _, dtype = name.rpartition(f"_{DEVICE}")
    return f"{cls.removesuffix(DEVICE.upper())}CPU.{head}_cpu{dtype}"


def shortened(text):
    return text if len(text) <= TEXT else f"{text[: TEXT // 2]} [...] {text[-TEXT // 2 :]}"


class Result(unittest.TestResult):
    outcome, message = "passed", ""

    def _is(self, outcome, message=""):
        if self.outcome != "failed":
            self.outcome, self.message = outcome, message

    def addError(self, test, error):
        kind, value, trace = error
        frames = traceback.extract_tb(trace)
        where = "".join(f"  {os.path.basename(f.filename)}:{f.lineno}" for f in frames[-6:])
        self._is("failed", f"{shortened(f'{kind.__name__}: {value}')}\n{where}")

    addFailure = addError

    def addSubTest(self, test, subtest, error):
        if error is not None:
            self.addError(test, error)

    def addSkip(self, test, reason):
        self._is("skipped", reason)

    def addExpectedFailure(self, test, error):
        self._is("xfailed")

    def addUnexpectedSuccess(self, test):
        self._is("failed", "unexpected success")


def settle():
    """What the device still does belongs to the test that queued it."""
    for index in range(torch.openreg.device_count()):
        torch.openreg.synchronize(index)
    torch.openreg.set_device(0)


def run(classes, test):
    cls, name = test.split(".")
    if not hasattr(classes.get(cls), name):
        return {"outcome": "absent", "message": "", "seconds": 0.0}
    start, result = time.monotonic(), Result()
    unittest.TestSuite([classes[cls](name)]).run(result)
    trusted = True
    try:
        settle()
    except Exception as error:
        result._is("failed", shortened(f"after the test: {type(error).__name__}: {error}"))
        trusted = False
    return {
        "outcome": result.outcome,
        "message": result.message,
        "seconds": round(time.monotonic() - start, 3),
        "trusted": trusted,
    }


def begin_process():
    """A test that hangs shows its stacks when it is asked, and does not outlive the runner."""
    faulthandler.register(signal.SIGUSR1, sys.__stderr__)
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def run_alone(classes, test, report):
    """In a process of its own, which nothing ran in before; if it dies, so does this one. Whether
    the test showed no fault."""
    child = os.fork()
    if child == 0:
        begin_process()
        result = run(classes, test)
        report(result)
        os._exit(0 if result["outcome"] in ("passed", "absent", "skipped") else FAILED)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    if code not in (0, FAILED):
        os._exit(code)
    return code == 0


def check(classes, test, send):
    """A test that failed: on the CPU and, if that shows nothing, on the device once more."""
    for stage, name in (("control", twin(test)), ("alone", test)):
        send(("begin", test, stage))
        if not run_alone(classes, name, lambda result, s=stage: send(("end", test, s, result))):
            return


def serve(connection, log, tree, kind, file, tests):
    """`list`: what there is. `run`: tests one after another. `check`: tests that failed, alone.
    `twins`: as `run`, on the CPU."""
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(sys.__stderr__)
    begin_process()
    if kind == "check":  # the stacks of interest are those of the process that this one waits for
        faulthandler.unregister(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    torch.set_num_threads(1)
    send = connection.send
    try:
        classes = load(tree, file)
    except BaseException as error:  # some call sys.exit
        send(("lost", shortened(f"{type(error).__name__}: {error}")))
        return
    if kind == "list":
        send(("list", tests_of(classes)))
    for test in tests:
        os.ftruncate(log, 0)
        if kind == "check":
            check(classes, test, send)
            continue
        stage = "device" if kind == "run" else "company"
        send(("begin", test, stage))
        result = run(classes, test if kind == "run" else twin(test))
        send(("end", test, stage, result))
        if not result["trusted"]:
            break  # the next test deserves a device without a past
    os._exit(0)  # nothing that a test left behind holds it up
