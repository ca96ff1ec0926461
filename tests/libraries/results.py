"""The results of a library's tests: compared with the declarations, and written to a page."""

import collections
import os
import re
from dataclasses import dataclass
from xml.etree import ElementTree

ORDER = ("passed", "skipped", "failed")  # the later one wins where a test has two results
CRASHED = re.compile(r"worker 'gw\d+' crashed while running")  # of pytest-xdist
COLUMNS = ("library", "version", "sanitizer", "run", "passed", "skipped", "declared")


@dataclass
class Row:
    outcome: str
    error: str = ""

    @property
    def crashed(self):
        return CRASHED.search(self.error.partition("\n")[0]) is not None


def _name(case, files):
    """The test as pytest's command line takes it, but for its parameters' order."""
    classname, name = case.get("classname") or "", case.get("name")
    for file in files:
        dotted = file.removesuffix(".py").replace(os.sep, ".")
        if classname == dotted or classname.startswith(dotted + "."):
            rest = classname[len(dotted) + 1 :].replace(".", "::")
            return "::".join(filter(None, (file, rest, name)))
        if not classname and name == dotted:  # the file could not be imported
            return file
    return "::".join(filter(None, (classname, name)))


def _row(case):
    parts = [part for part in case if part.tag in ("failure", "error", "skipped")]
    failed = [part for part in parts if part.tag != "skipped"]
    if failed:
        lines = [failed[0].get("message") or ""]
        for part in failed:
            lines += re.findall(r"^E  .*", part.text or "", re.MULTILINE)
        return Row("failed", "\n".join(lines))
    return Row("skipped" if parts else "passed")


def read(path, files):
    """{test: Row} of a report in JUnit's format."""
    rows = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name, row = _name(case, files), _row(case)
        if name not in rows or ORDER.index(row.outcome) > ORDER.index(rows[name].outcome):
            rows[name] = row
    return rows


def judge(rows, files, expected):
    """What is wrong with the rows, as sentences, and the names of the failures that are declared.
    A test that passes or is skipped fails nothing, but each file has to have one that passes."""
    wrong, declared, used = [], set(), set()
    for name, row in sorted(rows.items()):
        if row.outcome != "failed":
            continue
        entries = [e for e in expected if not row.crashed and e.covers(name, row.error)]
        used.update(entries)
        if entries:
            declared.add(name)
        else:
            wrong.append(f"{name}: {row.error.partition(chr(10))[0][:300]}")
    for entry in expected:
        if entry.always and entry not in used:
            wrong.append(f"stale declaration: {entry.tests}: none of them fails ({entry.reason})")
    passed = collections.Counter(
        name.partition("::")[0] for name, row in rows.items() if row.outcome == "passed"
    )
    wrong += [f"{file}: no test of it passed" for file in files if not passed[file]]
    return wrong, declared


def numbers(rows, declared):
    """Of the columns from `run` on."""
    kinds = collections.Counter(row.outcome for row in rows.values())
    return len(rows), kinds["passed"], kinds["skipped"], len(declared)


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
