"""The findings of explore(): results, the schedules that gave them, races, and their text."""

import copy
import copyreg
import enum
import re
import sys
import types

import torch

from .. import _messages
from .._utils import OWN_MODULE

_ADDRESS = re.compile(r"\b0x[0-9a-f]+\b")


class Result:
    """One outcome of a function, and the schedules that gave it.

    Attributes:
        seeds: these schedules, in the order in which they ran.
        same: how many more, of a search with `preemptions`, are the same run as one of these.
        value: what was returned, tensors on the CPU; None if `error` is set.
        error: the exception that was raised, or None.
        races: the sanitizer's reports of the first run whose result differs from the first one's;
            empty for all others, and where the sanitizer was on before.
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
    """The text of a race has a number, addresses and stacks, which differ between runs; other
    objects may be printed with addresses too."""
    report = getattr(error, "report", None)
    if report is not None:
        return type(error), report._identity
    return type(error), _ADDRESS.sub("0x", str(error))


# ---- copies and comparisons ----

_ATOMS = (type(None), type(...), bool, int, float, complex, str, bytes)
_STORAGES = (torch.UntypedStorage, torch.TypedStorage)


class _NotComparable(TypeError):
    __module__, __qualname__ = "builtins", "TypeError"  # in tracebacks

    def __init__(self, value, why):
        text = f"explore cannot compare results of type {type(value).__qualname__} ({why})"
        super().__init__(
            f"{_messages.sentence(text, len('TypeError: '))}\n"
            "  help: return tensors, numbers, arrays, or containers and objects that hold these"
        )


def _is_immutable(value):
    """Only these may be kept without a copy."""
    return type(value) in _ATOMS or isinstance(value, (type, enum.Enum, types.FunctionType))


def _is_array(value):
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def _reduced(value):
    """What pickle makes of an object: a function, its arguments, and optionally state, items of a
    list and pairs of a dictionary. A string is the name of a global."""
    reduce = copyreg.dispatch_table.get(type(value))
    parts = reduce(value) if reduce else value.__reduce_ex__(4)
    if isinstance(value, torch.nn.Module):  # the keys of hooks are numbers of the process
        state = {name: {} if "_hook" in name else x for name, x in parts[2].items()}
        parts = (*parts[:2], state)
    return parts


def kept(value, memo=None):
    """A copy, with tensors on the CPU. TypeError if the type cannot be copied and compared."""
    if _is_immutable(value):
        return value
    memo = {} if memo is None else memo
    if id(value) not in memo:
        memo.setdefault("alive", []).append(value)  # no other object may get its id
        try:
            memo[id(value)] = _copied(value, memo)
        except _NotComparable:
            raise
        except Exception as error:
            raise _NotComparable(value, error) from error
    return memo[id(value)]


def _copied(value, memo):
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, _STORAGES):
        copied = _as_tensor(value).cpu().clone()
        untyped = isinstance(value, torch.UntypedStorage)
        return copied.untyped_storage() if untyped else copied._typed_storage()
    if _is_array(value) and not value.dtype.hasobject:
        return value.copy()
    if type(value) is tuple:
        return tuple(kept(item, memo) for item in value)
    parts = _reduced(value)
    if isinstance(parts, str):
        return value
    return copy._reconstruct(value, memo, *parts, deepcopy=kept)


def _as_tensor(storage):
    if isinstance(storage, torch.UntypedStorage):
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    untyped = storage._untyped_storage
    return torch.empty(0, dtype=storage.dtype, device=untyped.device).set_(untyped)


def _same(a, b, seen=None):
    """Whether two results are equal: NaN equals itself, 0.0 does not equal -0.0. TypeError if this
    cannot be decided."""
    if type(a) is not type(b):
        return False
    if _is_immutable(a):
        return _same_immutables(a, b)
    seen = {} if seen is None else seen
    if (id(a), id(b)) in seen:  # objects may refer to each other
        return True
    seen[id(a), id(b)] = a, b
    try:
        return _same_objects(a, b, seen)
    except _NotComparable:
        raise
    except Exception as error:
        raise _NotComparable(a, error) from error


def _same_immutables(a, b):
    if isinstance(a, types.FunctionType) and a is not b:
        raise _NotComparable(a, "each run returns a different one")
    return repr(a) == repr(b) if isinstance(a, (float, complex)) else a == b


def _same_objects(a, b, seen):
    if isinstance(a, torch.Tensor):
        return _same_tensors(a, b)
    if isinstance(a, _STORAGES):
        return _same_tensors(_as_tensor(a), _as_tensor(b))
    if _is_array(a):
        return _same_arrays(a, b)
    if type(a) in (tuple, list):
        return _same_items(a, b, seen)
    if type(a) is dict:  # in order: PyTorch's pytrees and state_dicts have one
        return _same_items(list(a.items()), list(b.items()), seen)
    if isinstance(a, (set, frozenset)):
        own = (getattr(x, "__dict__", None) for x in (a, b))
        return _same_sets(a, b, seen) and _same(*own, seen)
    mine, others = _reduced(a), _reduced(b)
    if isinstance(mine, str):
        return mine == others
    return _same_items(_listed(*mine), _listed(*others), seen)


def _listed(function, arguments, state=None, items=None, pairs=None, *_):
    return function, arguments, state, list(items or ()), list(pairs or ())


def _same_items(a, b, seen):
    return len(a) == len(b) and all(_same(x, y, seen) for x, y in zip(a, b, strict=True))


def _same_sets(a, b, seen):
    """Most items are found by their hash; NaN, tensors and others hash by their address."""
    left = {item: item for item in b}
    for item in a:
        candidates = [left[item]] if item in left else left
        found = [x for x in candidates if _same(item, x, dict(seen))]
        if not found:
            return False
        del left[found[0]]
    return not left


def _same_arrays(a, b):
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    masked = sys.modules["numpy"].ma
    if isinstance(a, masked.MaskedArray):
        masks = masked.getmaskarray(a), masked.getmaskarray(b)
        return _same_arrays(*masks) and _same_arrays(a.filled(), b.filled())
    if a.dtype.names:
        return all(_same_arrays(a[name], b[name]) for name in a.dtype.names)
    if a.dtype.kind == "c":
        return _same_arrays(a.real, b.real) and _same_arrays(a.imag, b.imag)
    if a.dtype.hasobject:
        return all(map(_same, a.ravel().tolist(), b.ravel().tolist()))
    same = a == b
    if a.dtype.kind == "f":
        numpy = sys.modules["numpy"]
        same &= numpy.signbit(a) == numpy.signbit(b)
    return bool((same | ((a != a) & (b != b))).all())


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
    same = a == b
    if a.is_floating_point():
        same &= _signs(a) == _signs(b)
    return bool((same | ((a != a) & (b != b))).all())


def _signs(tensor):
    """Not every small type has signbit(); float32 has all their values."""
    return torch.signbit(tensor.float() if tensor.element_size() < 4 else tensor)


class Exploration:
    """What explore() found.

    Attributes:
        results: the distinct results, each with its `seeds`; the first is that of ``"early"``.
        preemptions: how many at most, of a search; None if it was by seeds.
        complete: whether a search has seen all schedules with at most so many.
        left: how many schedules of a search are known to be there and were not looked at.
        races: the sanitizer's reports of the first run that had any; empty where it was on before.
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
        """The number of calls of the function."""
        return sum(len(result.seeds) for result in self.results)

    @property
    def same(self):
        """The number of schedules that were not run because all tasks that touch the same memory
        have the same order as in a run that was made."""
        return sum(result.same for result in self.results)

    @property
    def different(self):
        """The seeds whose result differs from that of ``"early"``, or is an exception."""
        first = self.results[0]
        return [s for r in self.results if r is not first or r.error is not None for s in r.seeds]

    @property
    def ok(self):
        """Whether every schedule gave the same result, and none raised an exception."""
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
        """The results, the first race, and how to see them again."""
        lines = [line for text in self._headline() for line in _messages.sentence(text).split("\n")]
        lines += [line for result in self.results for line in _result_lines(result)]
        wrong = self.results[min(1, len(self.results) - 1)]
        races = self.races if self.ok else wrong.races or self.races
        if races:
            lines += ["", str(races[0]), ""]
        if not self.ok:
            seed = self.different[-1] if len(self.results) == 1 else wrong.seeds[0]
            lines.append(f"to replay: {OWN_MODULE}.testing.explore(fn, schedules=[{seed!r}])")
            if isinstance(seed, str) and seed.startswith("tape:"):
                lines.append(f"or the program with OPENREG_SCHEDULE_TAPE={seed[5:]}")
        return "\n".join(lines).rstrip("\n")


def _result_lines(result):
    """The schedules that gave it, and what it is, of which the first line is shown."""
    *first, last = _messages.wrap(f"{_named(result.seeds)}:", "  ", "    ")
    text = repr(result)
    if len(last) + len(text) >= _messages.WIDTH < 2 * len(last):
        first, last = [*first, last], "   "
    room = _messages.WIDTH - len(last) - 1
    if len(text) > room:
        text = f"{text[: room - 4].rstrip(' .')} ..."
    return [*first, f"{last} {text}"]


def _named(seeds, most=12):
    text = ", ".join(map(repr, seeds[:most]))
    return f"{text} and {len(seeds) - most} more" if len(seeds) > most else text
