"""PyTorch's own tests of devices, run on this one: `make upstream`. See docs/upstream.md."""

import argparse
import os
import signal
import sys

import torch
from tqdm import tqdm

from . import declared, page, results, sources, worker
from .pool import Pool, Share
from .results import Results, Row

SHARE = 300  # tests of one process
FINE = ("passed", "xfailed", "skipped")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", default="", help="a source tree of PyTorch's")
    parser.add_argument("--files", default="", help="patterns, separated by spaces")
    parser.add_argument("--sample", type=int, help="so many tests, spread evenly over the files")
    parser.add_argument("--seed", default="0", help="of the sample")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=float, default=300, help="seconds for a test")
    parser.add_argument("--failed", action="store_true", help="only those that failed last time")
    parser.add_argument("--page", default="", help="where the table is written")
    return parser.parse_args()


def select(options, tests, rows):
    chosen = tests
    if options.failed:
        chosen = {
            file: {t: f for t, f in names.items() if (file, t) in rows and fails(rows[file, t])}
            for file, names in tests.items()
        }
    return (
        chosen if options.sample is None else sources.sample(chosen, options.sample, options.seed)
    )


def fails(row):
    return row.kind == "alone" or bool(row.first)


def shares(chosen, done):
    """The rest of each file, in parts that processes take in turn."""
    for file, names in chosen.items():
        left = [test for test in names if not done(file, test)]
        for start in range(0, len(left), SHARE):
            part = left[start : start + SHARE]
            yield Share("run", file, part, all=list(part))


class Run:
    """What fails on the device is run alone, on the CPU and on the device. What passes alone is run
    on the CPU in the company in which it failed: that may be to blame, there too."""

    def __init__(self, pool, kept, build):
        self.pool, self.kept, self.build, self.lost = pool, kept, build, {}
        self.open = {}  # rows that are not done

    def events(self):
        for share, (what, *rest) in self.pool.events():
            if what == "lost":
                self.lost[share.file] = rest[0]
            elif what == "finished":
                self._next(share)
            elif what == "end":
                row = self._stage(share, *rest)
                if row is not None:
                    self.kept.add(row)
                    yield row

    def _next(self, share):
        """The next stage, for those that need it."""
        if share.failed and share.kind == "run":
            more = Share("check", share.file, share.failed, all=share.all)
            self.pool.submit(more, first=True)
        elif share.failed and share.kind == "check":
            self.pool.submit(Share("twins", share.file, share.all), first=True)

    def _stage(self, share, test, stage, result):
        """A row that is done."""
        key, fine = (share.file, test), result["outcome"] in FINE
        if stage == "device":
            said = {name: result[name] for name in ("outcome", "message", "seconds")}
            row = self.open[key] = Row(share.file, test, **said, build=self.build)
            if fine:
                return self.open.pop(key)
            share.failed.append(test)
            return None
        row = self.open.get(key)
        if stage == "control":
            row.control = result["outcome"]
            return None if row.kind == "alone" else self.open.pop(key)
        if stage == "alone" and fine:
            row.first = row.message
            share.failed.append(test)
            return None
        if stage == "alone":
            row.outcome, row.message = result["outcome"], result["message"]
            return self.open.pop(key)
        if row is not None and not fine and result["outcome"] != "absent":
            row.outcome, row.message = "passed", ""
        return row and self.open.pop(key)


def execute(options, pool, kept, chosen, build):
    """Runs what is left; returns the files that could not be run."""

    def done(file, test):
        row = kept.rows.get((file, test))
        return row is not None and row.build == build and not (options.failed and fails(row))

    parts = list(shares(chosen, done))
    for part in parts:
        pool.submit(part)
    run, failed = Run(pool, kept, build), 0
    tqdm.monitor_interval = 0  # a thread, and workers are forked
    every = 0.5 if sys.stderr.isatty() else 30
    total = sum(len(part.tests) for part in parts)
    with tqdm(total=total, unit="test", smoothing=0.05, mininterval=every) as bar:
        for row in run.events():
            failed += row.kind == "alone"
            bar.set_postfix_str(f"{failed} fail here alone", refresh=False)
            bar.update()
    return run.lost


def summary(chosen, rows):
    table = results.count(chosen, rows)
    width = max(map(len, [*table, "all"]))
    print(" " * width, *(f"{c:>16}" for c in results.COLUMNS), sep="  ")
    for file, numbers in [*table.items(), ("all", results.total(table))]:
        print(f"{file:{width}}", *(f"{n:16}" for n in numbers), sep="  ")


def main():
    options = arguments()
    tree = sources.find_tree(options.source)
    if tree is None:
        print(sources.HOW)
        return 0
    os.makedirs(sources.BUILD, exist_ok=True)
    worker.prepare()
    key = sources.key(tree, torch.__version__)
    place = os.path.join(sources.BUILD, key)
    files = sources.files_of(tree, options.files.split())
    build, kept = sources.build_of_package(), Results(place + ".jsonl")
    with Pool(tree, options.jobs, options.limit) as pool:
        print(f"{len(files)} files of {tree}", flush=True)
        known, lost = sources.catalogue(tree, files, pool, place + ".json")
        tests = {file: known[file] for file in files if file in known}
        chosen = select(options, tests, kept.rows)
        lost.update(execute(options, pool, kept, chosen, build))
    summary(chosen, kept.rows)
    picked = {k: row for k, row in kept.rows.items() if k[1] in chosen.get(k[0], ())}
    wrong, _ = results.judge(tests, picked, declared.DECLARED)
    wrong += [f"{file} cannot be run: {why}" for file, why in lost.items()]
    if options.page:
        _, covered = results.judge(known, kept.rows, declared.DECLARED)
        page.write(options.page, tree, known, kept.rows, lost, build, covered)
    for line in wrong:
        print(line)
    if wrong:
        print(f"{len(wrong)} errors; results are in {place}.jsonl")
    return int(bool(wrong))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # and the workers with it
    sys.exit(main())
