"""Every operator in every dtype, with a progress bar and a table: `make conformance`.

Ends with 1 if anything differs that is not declared, or a declared exception no longer occurs.
"""

import argparse
import collections
import json
import os
import random
import signal
import sys
from concurrent.futures import as_completed
from dataclasses import asdict

from declared import declared, job_for, judge
from jobs import ALL, DTYPES, ERRORS, Job, Pool, operators
from tqdm import tqdm


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", default="", help="names, separated by commas (default: all)")
    parser.add_argument("--dtypes", default=",".join((*DTYPES, ERRORS)))
    parser.add_argument("--samples", type=int, default=ALL, help="at most so many for each")
    parser.add_argument(
        "--compiled",
        type=int,
        help="so many operators and dtypes, always the same, a sample of each compiled by Inductor",
    )
    parser.add_argument("--workers", type=int, help="processes (default: one for each core)")
    parser.add_argument(
        "--out", help="file for the results, one JSON line each; what it has already is not run"
    )
    return parser.parse_args()


def jobs(options):
    names = set(options.ops.split(",")) - {""}
    dtypes = options.dtypes.split(",")
    known = operators()
    if unknown := names - set(known):
        sys.exit(f"no such operator: {', '.join(sorted(unknown))}")
    if unknown := set(dtypes) - {*DTYPES, ERRORS}:
        sys.exit(
            f"no such dtype: {', '.join(sorted(unknown))}; there are {', '.join(DTYPES)}, {ERRORS}"
        )
    # Bad inputs need workers of their own, so they come last.
    for dtype in dtypes:
        for name, has in known.items():
            there = has["errors"] if dtype == ERRORS else dtype in has["dtypes"]
            if there and (not names or name in names):
                yield job_for(name, dtype, options.samples)


def compiled(chosen, count):
    """A greater number contains the smaller; what is declared for eager is left out."""
    chosen = [job for job in chosen if job.dtype != ERRORS and not declared(job)]
    random.Random(0).shuffle(chosen)
    return [Job(job.op, job.dtype, 1, compiled=True) for job in chosen[:count]]


def status(job, result):
    if "crash" in result["failures"] or "hang" in result["failures"]:
        return "crashed"
    if judge(job, result):
        return "failed"
    return "declared" if declared(job) else "passed"


COLUMNS = ("operators", "calls", "passed", "declared", "failed", "crashed")


def table(results):
    counts = collections.defaultdict(collections.Counter)
    for job, result in results:
        for row in (job.dtype, "all"):
            counts[row]["operators"] += 1
            counts[row]["calls"] += result["count"]
            counts[row][status(job, result)] += 1
    yield "".join([f"{'':10}", *(f"{column:>11}" for column in COLUMNS)])
    for row in (*DTYPES, ERRORS, "all"):
        if row in counts:
            yield "".join([f"{row:10}", *(f"{counts[row][column]:11}" for column in COLUMNS)])


def earlier(path, chosen):
    """The results that a file has of a run that was stopped, perhaps in the middle of a line."""
    if not path or not os.path.exists(path):
        return {}
    with open(path) as lines:
        pairs = [json.loads(line) for line in lines if line.endswith("\n")]
    found = {Job(**job): result for job, result in pairs}
    return {job: found[job] for job in chosen if job in found}


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # and the workers with it
    options = arguments()
    chosen = list(jobs(options))
    if options.compiled is not None:
        chosen = compiled(chosen, options.compiled)
    known = earlier(options.out, chosen)
    results = []
    with Pool(options.workers) as pool, open(options.out or "/dev/null", "w") as out:
        futures = {pool.submit(job): job for job in chosen if job not in known}

        def take(job, result):
            results.append((job, result))
            print(json.dumps([asdict(job), result]), file=out, flush=True)
            if wrong := judge(job, result):
                bar.write(f"{job}: " + "\n    ".join(wrong))
            bar.update()

        with tqdm(total=len(chosen), unit="op", smoothing=0.05) as bar:
            for job, result in known.items():
                take(job, result)
            for future in as_completed(futures):
                take(futures[future], future.result())
    print("\n".join(table(results)))
    sys.exit(any(judge(job, result) for job, result in results))


if __name__ == "__main__":
    main()
