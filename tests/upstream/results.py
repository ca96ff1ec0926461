"""What tests came to: kept in a file, judged by the declarations, and counted."""

import collections
import fcntl
import json
import sys
from dataclasses import asdict, dataclass, replace

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
    units = {(f, t): unit(f, t, fun) for f, names in tests.items() for t, fun in names.items()}
    alone = {key: row for key, row in rows.items() if key in units and row.kind == "alone"}
    wrong, covered = [], collections.defaultdict(list)
    for key, row in alone.items():
        entries = [entry for entry in declared if entry.covers(units[key])]
        for entry in entries:
            covered[entry].append(row)
        if not entries:
            first = row.message.partition("\n")[0][:200]
            wrong.append(f"{row.file} {row.test} {row.outcome} here alone: {first}")
    for one in (replace(entry, tests=name) for entry in declared for name in entry.tests.split()):
        if one.tests.partition("::")[0] not in tests or any(
            one.covers(units[key]) for key in alone
        ):
            continue
        keys = [key for key, name in units.items() if one.covers(name)]
        if not keys:
            wrong.append(f"stale declaration: {one.tests}: there is no such test")
        elif all(key in rows for key in keys):
            wrong.append(f"stale declaration: {one.tests}: none of them fails ({one.reason})")
    return wrong, covered


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
