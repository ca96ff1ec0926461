"""TorchCTS, a public conformance suite for backends, on this device: `make judges`.

See docs/upstream.md.
"""

import argparse
import collections
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from support import declarations
from support.declarations import Declared, Outcome

from torch_openreg._check_plugin import torchcts

from .declared import DECLARED

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
BUILD = os.path.join(ROOT, "build", "judges")
# Folders whose files take minutes each.
LARGE = ("opinfo", "generated")
TABLE = re.compile(r"(?<=<!-- make judges -->\n).*?(?=<!-- end -->)", re.DOTALL)
FRAMES = ("/_pytest/", "/pluggy/", "<frozen runpy>", "/pytest/__main__.py")  # in every stack
COLUMNS = ("run", "passed", "skipped", "declared", "undeclared", "left out")


@dataclass
class Part:
    """Tests that one process runs, or several if it dies."""

    paths: list
    selected: list = field(default_factory=list)
    results: dict = field(default_factory=dict)  # {test: [outcome, message]}
    filtered: collections.Counter = field(default_factory=collections.Counter)  # by reason
    wrong: list = field(default_factory=list)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", default="", help="folders and files, separated by spaces")
    parser.add_argument("--fast", action="store_true", help=f"these folders: {torchcts.FAST}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=float, default=300, help="seconds for a test")
    parser.add_argument("--page", default="", help="where the table is written")
    return parser.parse_args()


def parts(suite, files, fast):
    if fast:
        return [Part(torchcts.FAST.split())]
    if files:
        return [Part([path]) for path in files.split()]
    from torchcts.cli import DEFAULT_TEST_SUITES

    paths = []
    for folder in sorted(DEFAULT_TEST_SUITES, key=lambda name: name not in LARGE):
        names = os.listdir(os.path.join(suite, folder)) if folder in LARGE else []
        tests = sorted(f"{folder}/{name}" for name in names if name.startswith("test_"))
        paths += tests or [folder]
    return [Part([path]) for path in paths]


def launch(suite, paths, limit, log):
    """One process, until it ends; returns its status and the end of what it printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider"]
    command += ["-p", "no:pytest_openreg", "-p", "judges.plugin", "--rootdir", suite]
    command += ["-c", os.path.join(BUILD, "pytest.ini"), "--tb=short", "--show-capture=no"]
    command += [os.path.join(suite, path) for path in paths]
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("OPENREG_", "PYTEST_"))},
        "PYTHONPATH": os.pathsep.join([os.path.dirname(HERE), *sys.path[1:]]),
        "OMP_NUM_THREADS": "1",  # small kernels, as many processes as there are cores
        "OPENREG_POISON": "1",  # what is not written equals nothing, rather than by chance
        "JUDGES_LOG": log,
        "JUDGES_LIMIT": str(limit),
    }
    if any("test_opinfo_errors" in path for path in paths):
        # It expects each error at its call, where a kernel's would come at a later one.
        environment["OPENREG_LAUNCH_BLOCKING"] = "1"
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        done = subprocess.run(command, cwd=BUILD, env=environment, stdout=out, stderr=out)
        out.seek(0)
        lines = out.read().partition("\nExtension modules:")[0].splitlines()
    said = [line for line in lines if not any(name in line for name in FRAMES)]
    return done.returncode, "\n".join(said)[-3000:]


def run(suite, part, limit):
    """All of its tests, in as many processes as it takes."""
    finished = False
    path = os.path.join(BUILD, f"{'-'.join(part.paths).replace('/', '-')}.jsonl")
    open(path, "w").close()
    while not finished:
        size = os.path.getsize(path)
        status, said = launch(suite, part.paths, limit, path)
        at = None
        with open(path) as log:
            log.seek(size)
            records = [json.loads(line) for line in log]
        for record in records:
            if record["what"] == "selected":
                part.selected = record["tests"]
            elif record["what"] == "begin":
                at = record["test"]
            elif record["what"] == "end":
                part.results[record["test"]] = [record["outcome"], record["message"]]
                at = None
            else:
                part.filtered.update(record["filtered"])
                finished = True
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        if at is not None:
            part.results[at] = ["crashed", f"{how}\n{said}"]
            finished = False
        elif not finished or status not in (0, 1):
            part.wrong.append(f"{' '.join(part.paths)}: {how}, outside of any test\n{said}")
            return
    left = set(part.selected) - set(part.results)
    part.wrong += [f"{test} did not run" for test in sorted(left)]
    if not part.selected:
        part.wrong.append(f"{' '.join(part.paths)}: no test was selected")


def fails(result):
    return result[0] in ("failed", "crashed")


def judge(results, declared, everything):
    """What is wrong, as sentences, and {entry: the tests that it covers}. With `everything`,
    `results` has all tests, and each declaration must have failed."""
    files = {test.partition("::")[0] for test in results}
    outcomes = {
        test: Outcome((test,), fails(results[test]), said="{} {}: {}".format(test, *results[test]))
        for test in sorted(results)
    }
    entries = [Declared(" ".join(patterns), reason) for reason, patterns in declared.items()]
    asked = (lambda pattern: True) if everything else lambda p: p.partition("::")[0] in files
    return declarations.judge(outcomes, entries, asked)


def table(done, covered):
    """{folder: numbers of COLUMNS}; of what TorchCTS leaves out it does not say which folder."""
    declared = {test for tests in covered.values() for test in tests}
    rows = {}
    for part in done:
        row = rows.setdefault(part.paths[0].partition("/")[0], [0] * len(COLUMNS))
        outcomes = collections.Counter()
        for test, result in part.results.items():
            outcomes[result[0] if not fails(result) else test in declared] += 1
        new = (sum(outcomes.values()), outcomes["passed"], outcomes["skipped"])
        new += (outcomes[True], outcomes[False], part.filtered.total())
        rows[part.paths[0].partition("/")[0]] = [a + b for a, b in zip(row, new, strict=True)]
    rows["all"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    return rows


def page(path, rows, covered, filtered):
    versions = [importlib.metadata.version(name) for name in ("torchcts", "torch")]
    lines = ["TorchCTS {} on PyTorch {}.\n".format(*versions)]
    lines += [f"| folder | {' | '.join(COLUMNS)} |", "| --- |" + " ---: |" * len(COLUMNS)]
    lines += [f"| {name} | {' | '.join(f'{n:,}' for n in row)} |" for name, row in rows.items()]
    lines += ["", "| left out by TorchCTS | tests |", "| --- | ---: |"]
    lines += [f"| `{reason}` | {count:,} |" for reason, count in filtered.most_common()]
    lines += ["", "| declared | tests | reason |", "| --- | ---: | --- |"]
    for entry, tests in sorted(covered.items(), key=lambda pair: -len(pair[1])):
        names = "<br>".join(f"`{pattern}`" for pattern in entry.tests.split())
        lines.append(f"| {names} | {len(tests):,} | {entry.reason} |")
    with open(path) as file:
        text = file.read()
    with open(path, "w") as file:
        file.write(TABLE.sub(lambda _: "\n".join([*lines, ""]), text))


def execute(options, suite, declared):
    """The errors, having run what was asked for."""
    os.makedirs(BUILD, exist_ok=True)
    torchcts.prepare(BUILD)
    todo = parts(suite, options.files, options.fast)
    with ThreadPoolExecutor(options.jobs) as pool:
        for part in pool.map(lambda part: run(suite, part, options.limit) or part, todo):
            count = sum(map(fails, part.results.values()))
            print(f"{' '.join(part.paths)}: {len(part.results)} tests, {count} fail", flush=True)
    results = {test: result for part in todo for test, result in part.results.items()}
    with open(os.path.join(BUILD, "results.json"), "w") as file:
        json.dump(results, file, indent=0)
    wrong, covered = judge(results, declared, not (options.files or options.fast))
    rows = table(todo, covered)
    width = max(map(len, rows))
    print(" " * width, *(f"{name:>10}" for name in COLUMNS), sep="  ")
    for name, row in rows.items():
        print(f"{name:{width}}", *(f"{n:10}" for n in row), sep="  ")
    wrong += [line for part in todo for line in part.wrong]
    if options.page and not wrong:
        page(options.page, rows, covered, sum((p.filtered for p in todo), collections.Counter()))
    return wrong


def main():
    options = arguments()
    suite = torchcts.suite()
    if suite is None:
        print("TorchCTS is not installed, which `make judges` does: nothing was run")
        return 0
    started = time.monotonic()
    wrong = execute(options, suite, DECLARED)
    print(*wrong, sep="\n")
    print(f"{len(wrong)} errors in {time.monotonic() - started:.0f} s")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
