"""The pytest plugin of `make test-drivers`: a failure that declared.py has for the driver is an
expected one, with its reason. A declaration of which no test fails is an error."""

import functools
import os
import threading
import weakref

import pytest
import torch
from support.declarations import Outcome, judge

from .declared import WAITS, declared

DECLARED = declared(os.environ["OPENREG_PLUGIN"])
GATE_LIMIT = 0.5 if WAITS in DECLARED else 10  # seconds
outcomes = {}  # of the process that reports
_opened = threading.Event()  # a gate of the present test
_wait = torch.openreg.testing.gate.wait


def _open(kept):
    gate = kept()
    if gate is not None and not gate.is_open:
        _opened.set()
        gate.open()


@functools.wraps(_wait)
def _wait_with_limit(gate, stream=None):
    # An operator that the driver has no kernel for waits for its stream, perhaps behind a gate
    # that the same thread opens. After the first one of a test, the others are opened at once.
    _wait(gate, stream)
    timer = threading.Timer(0.01 if _opened.is_set() else GATE_LIMIT, _open, [weakref.ref(gate)])
    timer.daemon = True
    timer.start()


torch.openreg.testing.gate.wait = _wait_with_limit


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    _opened.clear()
    try:
        return (yield)
    finally:
        if _opened.is_set():
            raise AssertionError("a call waited for its stream, behind a gate")


def _outcome(report):
    failed = None if report.skipped else report.failed
    return Outcome((report.nodeid.removeprefix("tests/"),), failed, report.longreprtext)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    for entry in DECLARED if report.failed else ():
        # An error of every test's is that of its own call: a capture that one has left open would
        # be met by all the tests that follow.
        if (call.when == "call" or entry.tests != "*") and _outcome(report).is_covered(entry):
            report.outcome, report.wasxfail, report.declared = "skipped", entry.reason, True
            break
    return report


def pytest_runtest_logreport(report):
    outcome = _outcome(report)
    outcome.failed = hasattr(report, "declared") or outcome.failed
    if report.when == "call" or outcome.failed is not False:
        outcomes.setdefault(report.nodeid, outcome)


def _stale(config):
    """Only a file of which all tests have run can show it; for `*`, all of them."""
    chosen = config.option.keyword or any("::" in argument for argument in config.args)
    if chosen or hasattr(config, "workerinput"):
        return []
    files = {outcome.names[0].partition("::")[0] for outcome in outcomes.values()}
    files |= {"*"} if config.args == ["tests"] else set()
    wrong, _ = judge(outcomes, DECLARED, lambda pattern: pattern.partition("::")[0] in files)
    return [line for line in wrong if line]  # pytest has shown what failed


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session, exitstatus):
    if exitstatus == pytest.ExitCode.OK and _stale(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    for line in _stale(config):
        terminalreporter.write_line(line, red=True)
