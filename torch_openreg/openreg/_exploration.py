"""What explore() finds: results, the schedules that gave them, races, and how it is printed."""

import copy
import dataclasses
import re
import sys

import torch
from torch.utils._pytree import tree_flatten, tree_map

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
        return _same(self.value, other.value)

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


def _is_dataclass(value):
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_array(value):
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def kept(value):
    """A copy on the CPU of the tensors, arrays, containers and dataclasses in `value`."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if _is_dataclass(value):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(made, field.name, kept(getattr(value, field.name)))
        return made
    if _is_array(value):
        return value.copy()
    return value if _is_leaf(value) else tree_map(kept, value, is_leaf=lambda x: x is not value)


def _parts(value):
    """The children of a container of PyTorch's pytrees, and its shape."""
    return tree_flatten(value, is_leaf=lambda x: x is not value)


def _is_leaf(value):
    parts, _ = _parts(value)
    return len(parts) == 1 and parts[0] is value


def _same(a, b):
    """Whether two results are equal, NaN being equal to itself. TypeError if that is not known."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return _same_tensors(a, b)
    if _is_array(a):
        return _same_arrays(a, b)
    if _is_dataclass(a):
        return all(_same_fields(a, b, field.name) for field in dataclasses.fields(a))
    if not _is_leaf(a):
        (mine, shape), (others, other_shape) = _parts(a), _parts(b)
        return shape == other_shape and all(map(_same, mine, others))
    return a is b or _same_values(a, b)


def _same_fields(a, b, name):
    if not (hasattr(a, name) and hasattr(b, name)):
        return hasattr(a, name) == hasattr(b, name)
    return _same(getattr(a, name), getattr(b, name))


def _same_values(a, b):
    if type(a).__eq__ is object.__eq__:
        raise TypeError(
            f"explore cannot compare results of type {type(a).__qualname__}, which has no equality "
            "of its own: return tensors, numbers, arrays, containers or dataclasses of them"
        )
    try:
        return bool(a == b) or bool(a != a and b != b)
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"explore cannot compare results of type {type(a).__qualname__}: {error}"
        ) from error


def _same_arrays(a, b):
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if a.dtype.names:
        return all(_same_arrays(a[name], b[name]) for name in a.dtype.names)
    if a.dtype.kind == "c":
        return _same_arrays(a.real, b.real) and _same_arrays(a.imag, b.imag)
    if a.dtype.hasobject:
        return all(map(_same, a.ravel().tolist(), b.ravel().tolist()))
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _same_tensors(a, b):
    if (a.dtype, a.layout, a.is_nested) != (b.dtype, b.layout, b.is_nested):
        return False
    if a.is_nested:  # the sizes of a jagged one have a symbol of its own
        mine, others = a.unbind(), b.unbind()
        return len(mine) == len(others) and all(map(_same_tensors, mine, others))
    if a.shape != b.shape:
        return False
    if a.layout != torch.strided:
        return _same_tensors(a.to_dense(), b.to_dense())
    if a.is_quantized:
        a, b = a.dequantize(), b.dequantize()
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
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
        tasks, streams: how many tasks the function queued, and on how many streams, in the run
            with most of them.
        orders: by seeds, how many orders of the tasks that touch the same memory were seen, and of
            how many, which is None where that cannot be counted; None if it is not known.
    """

    def __init__(self, preemptions=None):
        self.results = []
        self.preemptions = preemptions
        self.complete = False
        self.left = 0
        self.tasks = self.streams = 0
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
            text = f"{self.runs} schedules of {self._queued()}"
            text = f"all {text} agree{said}" if said else f"{text}, {results}"
            return [text, *self._coverage()]
        bound = f"at most {self.preemptions} preemption{'s' * (self.preemptions != 1)}"
        bound = f"{bound} of {self._queued()}"
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

    def _queued(self):
        if not self.tasks:
            return "no task"
        tasks, streams = ("s" * (count != 1) for count in (self.tasks, self.streams))
        return f"{self.tasks} task{tasks} on {self.streams} stream{streams}"

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
