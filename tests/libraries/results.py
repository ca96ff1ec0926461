"""The results of a library's tests: compared with the declarations, and written to a page."""

import collections
import json
import re
from dataclasses import dataclass

from support import declarations
from support.declarations import Outcome

ORDER = ("passed", "skipped", "failed")  # the later one wins where a test has two results
CRASHED = re.compile(r"worker 'gw\d+' crashed while running")  # of pytest-xdist
COLUMNS = ("library", "version", "sanitizer", "run", "passed", "skipped", "declared")


@dataclass
class Row:
    outcome: str
    error: str = ""
    reason: str = ""  # of a skipped one
    seconds: float = 0.0  # of CPU time, compilers' as well

    @property
    def crashed(self):
        return CRASHED.search(self.error.partition("\n")[0]) is not None


def read(path):
    """{test: Row} of the results that plugin/openreg_record.py keeps."""
    rows = {}
    with open(path, encoding="utf-8") as file:
        for kept in map(json.loads, file):
            name, row = kept.pop("test"), Row(**kept)
            if name not in rows or ORDER.index(row.outcome) > ORDER.index(rows[name].outcome):
                rows[name] = row
    return rows


def judge(rows, files, expected):
    """What is wrong with the rows, as sentences, and the names of the failures that are declared.
    A test that passes or is skipped fails nothing, but each file has to have one that passes."""
    outcomes = {}
    for name, row in sorted(rows.items()):
        said = f"{name}: {row.error.partition(chr(10))[0][:300]}"
        error = None if row.crashed else row.error
        outcomes[name] = Outcome((name,), row.outcome == "failed", error, said)
    wrong, covered = declarations.judge(outcomes, expected)
    passed = {name.partition("::")[0] for name, row in rows.items() if row.outcome == "passed"}
    wrong += [f"{file}: no test of it passed" for file in files if file not in passed]
    return wrong, set().union(*covered.values())


def numbers(rows, declared):
    """Of the columns from `run` on."""
    kinds = collections.Counter(row.outcome for row in rows.values())
    return len(rows), kinds["passed"], kinds["skipped"], len(declared)


def summary(rows):
    """How long the tests took, and why tests were skipped; lines."""
    yield f"{len(rows)} tests took {sum(row.seconds for row in rows.values()):,.0f} s of CPU time"
    reasons = collections.Counter(row.reason for row in rows.values() if row.outcome == "skipped")
    for reason, count in reasons.most_common():
        yield f"{count} skipped: {reason}"


def write(path, library, sanitizer, counts):
    """Puts the row of the library into the table of the page."""
    mode = "on" if sanitizer else "off"
    row = [library.name, library.version, mode, *(f"{n:,}" for n in counts)]
    with open(path, encoding="utf-8") as file:
        lines = file.read().splitlines()
    start = lines.index(f"| {' | '.join(COLUMNS)} |") + 2
    end = start
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    table = [line.strip("| ").split(" | ") for line in lines[start:end]]
    table = [other for other in table if (other[0], other[2]) != (row[0], row[2])]
    table = sorted([*table, row], key=lambda cells: (cells[0], cells[2]))
    lines[start:end] = [f"| {' | '.join(cells)} |" for cells in table]
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
