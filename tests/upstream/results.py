"""What tests came to: kept in a file, judged by the declarations, and counted."""

import collections
import fcntl
import json
import sys
from dataclasses import asdict, dataclass

from support import declarations
from support.declarations import Outcome

from .worker import DEVICE


@dataclass
class Row:
    file: str
    test: str
    outcome: str  # passed, xfailed, skipped, failed, crashed, hung
    message: str = ""
    seconds: float = 0.0
    control: str = ""  # the CPU's outcome, of those that failed
    first: str = ""  # what went wrong among others, of those that passed alone
    build: str = ""

    @property
    def kind(self):
        """Its column of the table."""
        if self.outcome in ("passed", "xfailed"):
            return "passed"
        if self.outcome == "skipped":
            return "skipped"
        return "both" if self.control not in ("passed", "skipped", "absent") else "alone"


class Results:
    """The last row of each test. A line is appended for each, so that a run that is stopped at any
    time goes on where it was."""

    def __init__(self, path):
        self.rows = {}
        self.file = open(path, "a+")  # noqa: SIM115
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # workers do not inherit it
        except OSError:
            sys.exit(f"{path} is being written by another run")
        self.file.seek(0)
        whole, _, cut = self.file.read().rpartition("\n")
        for line in whole.splitlines():
            self._keep(Row(**json.loads(line)))
        if cut:  # it was being written
            self.file.truncate(len(whole.encode()) + 1 if whole else 0)

    def _keep(self, row):
        self.rows[row.file, row.test] = row

    def add(self, row):
        self._keep(row)
        print(json.dumps(asdict(row)), file=self.file, flush=True)


def unit(file, test, function):
    """`file::Class::function(variant)`, without device and dtype."""
    cls, name = test.split(".")
    cls = cls.removesuffix(DEVICE.upper())
    head = name.rpartition(f"_{DEVICE}")[0]
    if not head.startswith(function):
        return f"{file}::{cls}::{head}"
    variant = head[len(function) :].removeprefix("_")
    return f"{file}::{cls}::{function}" + (f"({variant})" if variant else "")


def judge(tests, rows, declared):
    """`tests`: {file: {test: function}} of all files. What is wrong with the rows, as sentences,
    and {entry: rows that it covers}."""
    outcomes = {}
    for file, names in tests.items():
        for test, function in names.items():
            name, row = unit(file, test, function), rows.get((file, test))
            one = outcomes[file, test] = Outcome((name, name.partition("(")[0]), failed=None)
            if row is not None:
                first = row.message.partition("\n")[0][:200]
                one.failed = row.kind == "alone"
                one.said = f"{file} {test} {row.outcome} here alone: {first}"
    wrong, covered = declarations.judge(outcomes, declared, lambda p: p.partition("::")[0] in tests)
    return wrong, {entry: [rows[key] for key in keys] for entry, keys in covered.items() if keys}


COLUMNS = ("run", "passed", "skipped", "fails on both", "fails here alone", "left")


def count(tests, rows):
    """{file: numbers of COLUMNS}"""
    table = {}
    for file, names in tests.items():
        kinds = collections.Counter(rows[file, t].kind for t in names if (file, t) in rows)
        run = sum(kinds.values())
        table[file] = (
            *(run, kinds["passed"], kinds["skipped"], kinds["both"], kinds["alone"]),
            len(names) - run,
        )
    return table


def total(table):
    return tuple(map(sum, zip(*table.values(), strict=True))) if table else (0,) * len(COLUMNS)


def functions(rows, tests):
    """Each function counts once, whatever its operators and dtypes."""
    return len({(r.file, r.test.split(".")[0], tests[r.file][r.test]) for r in rows})
