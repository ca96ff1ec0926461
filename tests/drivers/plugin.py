"""The pytest plugin of `make test-drivers`: a failure that declared.py has for the driver is an
expected one, with its reason. A declaration of which no test fails is an error."""

import os
import sys
import threading

import pytest
import torch
from support.declarations import Outcome, judge

from . import gates
from .declared import WAITS, declared

DECLARED = declared(os.environ["OPENREG_PLUGIN"])
GATE_LIMIT = 0.5 if WAITS in DECLARED else 10  # seconds
# For the programs of tests, whose processes share the cores with other tests'.
os.environ["PROGRAM_GATE_LIMIT"] = str(10 * GATE_LIMIT)
outcomes = {}  # of the process that reports
_failed = pytest.StashKey()  # of a test: the reason of its declared failure
_opened = threading.Event()  # a gate of the present test


def _open(opens):
    _opened.set()
    opens()


# After the first one of a test, the others are opened at once.
gates.limit(lambda: 0.01 if _opened.is_set() else GATE_LIMIT, _open)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)  # which keeps a failed test's memory


def _clear():
    """Or the next test gets the errors that a failed one has left."""
    for index in range(torch.openreg.device_count()):
        try:
            torch.openreg.synchronize(index)
        except torch.AcceleratorError:
            torch.openreg.reset(index)  # a lost device
        except RuntimeError:
            pass


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    _opened.clear()
    try:
        return (yield)
    except BaseException:
        _clear()
        raise
    finally:
        if _opened.is_set():
            raise AssertionError(gates.WAITED)


def _outcome(report):
    failed = None if report.skipped else report.failed
    return Outcome((report.nodeid.removeprefix("tests/"),), failed, report.longreprtext)


def _reason(item, report):
    """Why it is expected to fail, or None. An error of every test's is that of its own call: a
    capture that one has left open would be met by all the tests that follow."""
    outcome = _outcome(report)
    for entry in DECLARED:
        if (report.when == "call" or entry.tests != "*") and outcome.is_covered(entry):
            return entry.reason
    # A call that has failed keeps its memory, which a test's end may count.
    counts = report.when == "teardown" and "'allocation'" in report.longreprtext
    return item.stash.get(_failed, None) if counts else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    reason = _reason(item, report) if report.failed else None
    if reason is not None:
        report.outcome, report.wasxfail, report.declared = "skipped", reason, True
        item.stash[_failed] = reason
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
