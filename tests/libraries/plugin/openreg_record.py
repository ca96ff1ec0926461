"""The plugin of a library's pytest: keeps the result of each test as soon as there is one.

A result is a line of JSON in the file LIBRARIES_RESULTS, so a run that is stopped can go on. Tests
of the file LIBRARIES_DONE are not run again. The folder is in PYTHONPATH, and holds nothing else.
"""

import collections
import gc
import json
import os
import re
import signal
import sys

import pytest

CPU_SECONDS = "libraries_cpu_seconds"


def _error(report):
    """The message, and what pytest marks as the error in the traceback."""
    text = str(report.longrepr)
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = [crash.message] if crash else []
    lines += re.findall(r"^E +(.*)", text, re.MULTILINE)
    return "\n".join(lines or text.splitlines()[:1])


class Recorder:
    def __init__(self):
        self.file = open(os.environ["LIBRARIES_RESULTS"], "a", buffering=1)  # noqa: SIM115

    def _add(self, report):
        row = {"test": report.nodeid, "outcome": report.outcome}
        row["seconds"] = dict(getattr(report, "user_properties", ())).get(CPU_SECONDS, 0.0)
        if report.failed:
            row["error"] = _error(report)
        elif report.skipped:
            known = getattr(report, "wasxfail", None)
            expected = f"fails as the library expects: {known}"
            row["reason"] = report.longrepr[2] if known is None else expected
        print(json.dumps(row), file=self.file)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or not report.passed:
            self._add(report)

    def pytest_collectreport(self, report):
        if report.failed:
            self._add(report)


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # pytest-xdist's main process has all reports
        config.pluginmanager.register(Recorder())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """The traceback of a failed test holds the test's tensors, in a cycle: the next test would have
    less memory."""
    if hasattr(sys, "last_value"):
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            vars(sys).pop(name, None)
        gc.collect()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """CPU time does not depend on what else the machine does. That of compilers does not count for
    the limit."""
    start = sum(os.times()[:4])
    limit = float(os.environ["LIBRARIES_CPU_LIMIT"])

    def stop(*_):
        pytest.fail(f"took longer than {limit:g} s of CPU time")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, limit)  # 0: none
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        item.user_properties.append((CPU_SECONDS, round(sum(os.times()[:4]) - start, 2)))


def _by_turns(items):
    """The first parametrization of each function, then the second of each: a run that is stopped
    has run every function."""
    turns = collections.Counter()

    def turn(item):
        function = item.nodeid.partition("[")[0]
        turns[function] += 1
        return turns[function]

    return sorted(items, key=turn)


def pytest_collection_modifyitems(config, items):
    # Nothing writes the file while processes run: each collects the same tests.
    with open(os.environ["LIBRARIES_DONE"]) as file:
        done = {json.loads(line)["test"] for line in file}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
    items[:] = [item for item in _by_turns(items) if item.nodeid not in done]
