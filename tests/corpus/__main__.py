"""Measures the catalogue, and writes its table: `python -m corpus --page ../docs/catalogue.md`."""

import argparse
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import BUGS, FAMILIES, measure

TABLE = re.compile(r"(?<=<!-- made by python -m corpus -->\n).*\Z", re.DOTALL)
HEAD = """| bug | the mistake | plainly | sanitizer | tape | seeds | initcheck |
| --- | --- | --- | --- | --- | --- | --- |"""


def cells(bug):
    """Of the table, from the third on."""
    plain = measure.plainly(bug)
    found = "luck" if bug.luck else "yes" if measure.reports(bug.wrong) else "no"
    fresh = [kind for kind, *_ in measure.reports(bug.wrong, True) if kind == "uninitialized"]
    if bug.outside:
        tape = seeds = "-"
    else:
        shown = measure.tape(bug.wrong)
        tape = f"{shown.preemptions}, run {shown.runs}" if shown else "no"
        seeds = str(measure.seeds(bug.wrong))
    return [f"{plain} of 3" if plain else "right", found, tape, seeds, "yes" if fresh else ""]


def measured(family):
    """In a process of its own, which begins with fresh memory."""
    command = [sys.executable, "-m", "corpus", "--family", family]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{family}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def table(rows):
    lines = []
    for family in FAMILIES:
        name = family.__name__.rpartition(".")[2]
        title = family.__doc__.splitlines()[0]
        lines += [f"## {title}", "", f"[{name}.py](../tests/corpus/{name}.py)", "", HEAD]
        for bug in BUGS.values():
            if bug.family == name:
                text = f"{bug.project}: {bug.mistake.rstrip('.')}"
                lines.append("| " + " | ".join([f"`{bug.name}`", text, *rows[bug.name]]) + " |")
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def totals(rows):
    def count(column, missing):
        return sum(row[column] not in missing for row in rows.values())

    lines = [f"{len(rows)} bugs:", "", "| found by | of these |", "| --- | --- |"]
    for name, column, missing in (
        ("running it plainly, in one of three runs", 0, ("right",)),
        ("the sanitizer", 1, ("no", "luck")),
        ("a tape", 2, ("no", "-")),
        ("one of 24 seeds", 3, ("0", "-")),
        ("`initcheck`", 4, ("",)),
    ):
        lines.append(f"| {name} | {count(column, missing)} |")
    both = sum(r[1] == "yes" and r[2] not in ("no", "-") for r in rows.values())
    return "\n".join([*lines, f"| the sanitizer and a tape | {both} |", "", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, help="where the table is written")
    parser.add_argument("--family", help="measures one, and prints it as JSON")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once")
    options = parser.parse_args()
    if options.family:
        mine = [bug for bug in BUGS.values() if bug.family == options.family]
        print(json.dumps({bug.name: cells(bug) for bug in mine}))
        return
    rows = {}
    names = [family.__name__.rpartition(".")[2] for family in FAMILIES]
    with ThreadPoolExecutor(options.jobs) as pool:
        for found in pool.map(measured, names):
            rows.update(found)
    text = totals(rows) + table(rows)
    if options.page:
        text = TABLE.sub(lambda _: "\n" + text, options.page.read_text())
        options.page.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
