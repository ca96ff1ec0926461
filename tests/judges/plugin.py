"""The pytest plugin of a process that runs a suite's tests: records which begins and how it ends.

A record is a line of JSON in the file JUDGES_LOG. It is written at once, so that the records of a
process that dies end with the test that killed it.
"""

import collections
import faulthandler
import json
import os

from torch_openreg._check_plugin.torchcts import Recorder

# Open until the process ends, however it ends.
_log = open(os.environ["JUDGES_LOG"], "a")  # noqa: SIM115
# Each has ended, or ended the process before this one.
with open(os.environ["JUDGES_LOG"]) as records:
    _begun = {record.get("test") for record in map(json.loads, records)}
_limit = float(os.environ["JUDGES_LIMIT"])
_stderr = os.dup(2)


def _record(what, **fields):
    print(json.dumps({"what": what, **fields}), file=_log, flush=True)


class _Log(Recorder):
    def select(self, tests):
        _record("selected", tests=[item.nodeid for item in tests])
        return [item for item in tests if item.nodeid not in _begun]

    def begin(self, test):
        faulthandler.dump_traceback_later(_limit, exit=True, file=_stderr)
        _record("begin", test=test)

    def end(self, test, outcome, message):
        faulthandler.cancel_dump_traceback_later()
        _record("end", test=test, outcome=outcome, message=message)

    def pytest_sessionfinish(self):
        skips = self.torchcts._SESSION_SKIPS.values() if self.torchcts is not None else ()
        _record("finish", filtered=collections.Counter(skip["skip_reason"] for skip in skips))


def pytest_configure(config):
    config.pluginmanager.register(_Log())
