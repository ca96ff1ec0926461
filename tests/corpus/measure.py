"""Which tool finds a bug: what the table and the tests ask."""

import warnings
from typing import NamedTuple

import torch

from torch_openreg.openreg.testing._exploration import Result

SEEDS, RUNS = 24, 200
openreg = torch.openreg


def settle():
    for device in range(openreg.device_count()):
        openreg.synchronize(device)


def found(function, initcheck=False):
    """The sanitizer's reports of one run."""
    sanitizer = openreg.sanitizer
    settle()
    openreg.empty_cache()
    with warnings.catch_warnings(), sanitizer.enable("warn", initcheck=initcheck):
        warnings.simplefilter("ignore")
        sanitizer.clear()
        try:
            function()
            settle()
        except RuntimeError:  # memory that it has given away may be gone
            if not sanitizer.reports():
                raise
        reports = sanitizer.reports()
        sanitizer.clear()
    return reports


def reports(function, initcheck=False):
    """Of one run under the sanitizer: (kind, later operator, earlier operator)."""
    return [(r.kind, r.later.operator, r.earlier.operator) for r in found(function, initcheck)]


def _explore(function, limit, **which):
    """What was found, and what the runs returned, the first under "early"."""
    values = []

    def keep():
        values.append(function())
        return values[-1]

    return openreg.testing.explore(keep, limit=limit, **which), [Result(value) for value in values]


class Tape(NamedTuple):
    preemptions: int
    runs: int  # until it showed
    tape: str


def tape(function):
    """The first schedule, of those with few preemptions, that shows another result; or None."""
    for preemptions in range(3):
        limit, complete = 2, False
        while limit < RUNS and not complete:
            limit *= 4
            found, values = _explore(function, limit, preemptions=preemptions)
            complete = found.complete
            if not found.ok:
                run = next(n for n, value in enumerate(values) if value != values[0])
                return Tape(preemptions, run, found.results[1].seeds[0])
    return None


def replays(function, tape):
    """Whether another exploration with this schedule alone shows the same other result, twice."""
    one, other = (openreg.testing.explore(function, [tape]) for _ in range(2))
    return one.different == other.different == [tape] and one.results[1] == other.results[1]


def seeds(function):
    """How many of the first seeds show another result."""
    return len(openreg.testing.explore(function, SEEDS).different)


def disagreement(function):
    """What a search with one preemption says of a program that should be right; "" if it agrees."""
    found = openreg.testing.explore(function, preemptions=1, limit=RUNS // 4)
    return "" if found.ok else str(found)


def plainly(bug, times=3):
    """How many of a few runs without any tool give another result than the right form."""
    settle()
    right = Result(bug.right())
    settle()
    wrong = 0
    for _ in range(times):
        result = Result(bug.wrong())
        settle()
        wrong += result != right
    return wrong
