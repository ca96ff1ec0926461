"""docs/upstream.md: what was run, and what fails on this device alone."""

import os

import torch

from . import results

MARK = "## Results\n"  # what is before it is written by hand


def _numbers(tests, rows, lost):
    table = results.count(tests, rows)
    yield f"| file | {' | '.join(results.COLUMNS)} |"
    yield "| --- |" + " ---: |" * len(results.COLUMNS)
    for file, numbers in [*sorted(table.items()), ("all", results.total(table))]:
        yield f"| {file} | {' | '.join(f'{n:,}' for n in numbers)} |"
    for file, why in sorted(lost.items()):
        yield f"| {file} | cannot be imported: {why.splitlines()[0]} |" + " |" * 5


def _reasons(entries, tests, to_mend):
    """Of one kind, the one with most tests first."""
    found = [(entry, rows) for entry, rows in entries.items() if entry.to_mend == to_mend]
    for entry, rows in sorted(found, key=lambda pair: -len(pair[1])):
        names = "<br>".join(f"`{name}`" for name in entry.tests.split())
        count = results.functions(rows, tests)
        yield f"| {names} | {count} | {len(rows)} | {entry.reason} |"


def write(path, tree, tests, rows, lost, build, entries):
    there = {key: row for key, row in rows.items() if key[1] in tests.get(key[0], ())}
    older = sum(row.build != build for row in there.values())
    alone = [row for row in there.values() if row.kind == "alone"]
    lines = [
        MARK,
        f"Tests of `{os.path.basename(os.path.dirname(tree))}` on PyTorch {torch.__version__}. A",
        "skipped test is one that PyTorch skips on this device, mostly as it is another's.\n",
        *_numbers(tests, there, lost),
        "",
    ]
    if older:
        lines.append(f"{older:,} of these results are of an earlier build of the package.\n")
    lines.append("## What fails here alone\n")
    lines.append(f"{len(alone):,} tests of {results.functions(alone, tests)} functions.\n")
    for to_mend, title in (
        (False, "No backend outside of PyTorch's tree can meet them"),
        (True, "Faults of this device, to mend"),
    ):
        table = list(_reasons(entries, tests, to_mend))
        lines += [
            f"### {title}\n",
            "| tests | functions | tests | reason |",
            "| --- | ---: | ---: | --- |",
        ]
        lines += [*table, ""]
    head = ""
    if os.path.exists(path):
        with open(path) as file:
            head = file.read().partition(MARK)[0]
    with open(path, "w") as file:
        file.write(head + "\n".join(lines))
