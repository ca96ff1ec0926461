"""What explore() finds: results, the schedules that gave them, races, and how it is printed."""

import re

import torch
from torch.utils._pytree import tree_flatten

_ADDRESS = re.compile(r"\b0x[0-9a-f]+\b")


class Result:
    """One outcome of a function, and the schedules that gave it.

    Attributes:
        seeds: these schedules, in the order in which they ran.
        same: how many more, of a search with `preemptions`, are the same run as one of these.
        value: what was returned, tensors on the CPU; None if `error` is set.
        error: the exception that was raised, or None.
        races: the sanitizer's reports of the first run that gave another result than the first
            did; of all others, and where the sanitizer was on before, none.
    """

    def __init__(self, value=None, error=None):
        self.seeds = []
        self.same = 0
        self.races = []
        self.value = value
        self.error = error

    def __eq__(self, other):
        if self.error is not None or other.error is not None:
            return _identity(self.error) == _identity(other.error)
        mine, shape = tree_flatten(self.value)
        others, other_shape = tree_flatten(other.value)
        return shape == other_shape and all(map(_same, mine, others))

    __hash__ = None

    def __repr__(self):
        if self.error is None:
            text = repr(self.value)
        else:
            text = f"raises {type(self.error).__name__}: {self.error}"
        lines = text.splitlines() or [""]
        return lines[0] if len(lines) == 1 else f"{lines[0]} ..."


def _identity(error):
    """Races have a number, addresses and stacks in their text, which no two runs share; what is
    printed of other objects may have addresses too."""
    report = getattr(error, "report", None)
    if report is not None:
        return type(error), report._identity
    return type(error), _ADDRESS.sub("0x", str(error))


def _same(a, b):
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _same_tensors(a, b)
    if type(a) is not type(b):
        return False
    try:
        return bool(a == b) or bool(a != a and b != b)
    except (RuntimeError, ValueError):  # an array's truth
        return repr(a) == repr(b)


def _same_tensors(a, b):
    if (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
        return False
    if a.layout != torch.strided:
        return _same_tensors(a.to_dense(), b.to_dense())
    if a.is_quantized:
        a, b = a.dequantize(), b.dequantize()
    return bool(((a == b) | ((a != a) & (b != b))).all())


class Exploration:
    """What explore() found.

    Attributes:
        results: the distinct results, each with its `seeds`; the first is that of ``"early"``.
        preemptions: how many at most, of a search; None if it was by seeds.
        complete: whether a search has seen all schedules with at most so many.
        left: how many schedules of a search are known to be there and were not looked at.
        races: the sanitizer's reports of the first run in which it had any; none where it was on
            before.
        orders: by seeds, how many orders of the tasks that touch the same memory were seen, and of
            how many, which is None where that cannot be counted; None if it is not known.
    """

    def __init__(self, preemptions=None):
        self.results = []
        self.preemptions = preemptions
        self.complete = False
        self.left = 0
        self.races, self.raced = [], None
        self.orders = None

    def _add(self, seed, result):
        """Returns the Result among `results` that the run belongs to."""
        for known in self.results:
            if known == result:
                known.seeds.append(seed)
                return known
        result.seeds.append(seed)
        self.results.append(result)
        return result

    @property
    def runs(self):
        """How often the function was called."""
        return sum(len(result.seeds) for result in self.results)

    @property
    def same(self):
        """How many schedules were not run, as all tasks that touch the same memory come in the same
        order as in a run that was made."""
        return sum(result.same for result in self.results)

    @property
    def different(self):
        """The seeds whose result is another than that of ``"early"``, or an exception."""
        first = self.results[0]
        return [s for r in self.results if r is not first or r.error is not None for s in r.seeds]

    @property
    def ok(self):
        """Whether every schedule gave the same result, and none an exception."""
        return not self.different

    def _headline(self):
        results = f"{len(self.results)} results" if len(self.results) > 1 else "one result"
        if self.preemptions is None:
            said = self._but()
            text = f"{self.runs} schedules"
            text = f"all {text} agree{said}" if said else f"{text}, {results}"
            return [text, *self._coverage()]
        bound = f"at most {self.preemptions} preemption{'s' * (self.preemptions != 1)}"
        looked = self.runs - 1 + self.same  # "early" is none of these
        if not self.complete:
            text = f"{looked} of at least {looked + self.left} schedules with {bound}, {results}"
        elif self.ok:
            text = f"all {looked} schedules with {bound} agree"
        else:
            text = f"all {looked} schedules with {bound}, {results}"
        return [
            text + self._but(),
            f"  {self.runs - 1} were run, {self.same} are known to be the same as one of them",
        ]

    def _but(self):
        if not (self.ok and self.races):
            return ""
        return f", but the sanitizer reports under {self.raced!r}:"

    def _coverage(self):
        if self.orders is None:
            return []
        seen, possible = self.orders
        of = "how many is not known" if possible is None else possible
        return [f"  orders of the tasks that touch the same memory: {seen} seen, of {of}"]

    def __str__(self):
        lines = self._headline()
        lines += [f"  {_named(result.seeds)}: {result!r}" for result in self.results]
        if self.ok:
            lines += map(str, self.races[:1])
        else:
            wrong = self.results[min(1, len(self.results) - 1)]
            seed = self.different[-1] if len(self.results) == 1 else wrong.seeds[0]
            lines += map(str, (wrong.races or self.races)[:1])
            lines.append(f"to replay: torch.openreg.testing.explore(fn, schedules=[{seed!r}])")
            if isinstance(seed, str) and seed.startswith("tape:"):
                lines.append(f"or the program with OPENREG_SCHEDULE_TAPE={seed[5:]}")
        return "\n".join(lines)


def _named(seeds, most=12):
    text = ", ".join(map(repr, seeds[:most]))
    return f"{text} and {len(seeds) - most} more" if len(seeds) > most else text
