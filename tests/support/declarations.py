"""Tests of other projects that fail on this device, and why: what `make judges`, `make libraries`
and `make upstream` hold against the results."""

import re
from dataclasses import dataclass


def matches(pattern, name):
    """`*` stands for anything; everything else, brackets as well, for itself."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name) is not None


@dataclass(frozen=True)
class Declared:
    tests: str  # patterns, separated by spaces
    reason: str
    to_mend: bool = False  # a fault of this device; others no backend of its kind can meet
    error: str = ""  # searched for in the error's text
    always: bool = True  # False: a race decides whether they fail; such an entry is never stale


@dataclass
class Outcome:
    names: tuple  # a pattern matches one of them
    failed: bool | None = False  # None: it has not run
    error: str | None = ""  # None: no entry covers it
    said: str = ""  # if none does

    def is_named(self, pattern):
        return any(matches(pattern, name) for name in self.names)

    def is_covered(self, entry):
        named = any(map(self.is_named, entry.tests.split()))
        return named and self.error is not None and re.search(entry.error, self.error) is not None


def judge(outcomes, declared, asked=lambda pattern: True):
    """What is wrong, as sentences, and {entry: the tests that it covers}. `outcomes`: {test:
    Outcome}. Each pattern that was `asked` for has to name one that its entry covers."""
    wrong, covered = [], {entry: [] for entry in declared}
    for test, outcome in outcomes.items():
        entries = [entry for entry in declared if outcome.failed and outcome.is_covered(entry)]
        for entry in entries:
            covered[entry].append(test)
        if outcome.failed and not entries:
            wrong.append(outcome.said)
    for entry in declared:
        for pattern in filter(asked, entry.tests.split() if entry.always else ()):
            if any(outcomes[test].is_named(pattern) for test in covered[entry]):
                continue
            named = [outcome for outcome in outcomes.values() if outcome.is_named(pattern)]
            if any(outcome.failed is None for outcome in named):
                continue
            why = f"none of them fails ({entry.reason})" if named else "there is no such test"
            wrong.append(f"stale declaration: {pattern}: {why}")
    return wrong, covered
