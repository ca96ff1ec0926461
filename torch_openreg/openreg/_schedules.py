"""Orders of execution, chosen by a seed: schedule() runs a block under one, explore() a function
under many."""

import contextlib
import gc
import sys
import threading
from collections.abc import Iterable

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from .. import _C
from ._lazy import is_initialized

SEEDED, LATE, EARLY = 1, 2, 3  # the core's orSchedulePolicy


def _policy(seed):
    """What the core calls it: (policy, seed)."""
    if isinstance(seed, str) and seed in ("late", "early"):
        return (LATE if seed == "late" else EARLY), 0
    number = -1 if isinstance(seed, bool) else getattr(seed, "__index__", lambda: -1)()
    if 0 <= number < 2**64:
        return SEEDED, number
    raise ValueError(
        f"a schedule is a whole number from 0 to 2**64 - 1, 'late' or 'early', not {seed!r}"
    )


def _synchronize():
    if is_initialized():
        for index in range(_C._device_count()):
            torch.openreg.synchronize(index)


# What was there before the first context, and what each is that is entered; threads may leave them
# in any order.
_entered = []
_entered_lock = threading.Lock()


class schedule(contextlib.ContextDecorator):
    """Runs queued tasks one at a time, in an order that `seed` decides.

    ::

        with torch.openreg.testing.schedule(7):
            train_step()

    Tasks run only while a thread is inside a call that queues work, asks or waits. The same seed
    gives the same order each time, on any machine, if one thread at a time uses the device. Memory
    that is cached and not in use is given back first, so that the order does not depend on what the
    process did before. The context waits at its begin and at its end until nothing is queued; when
    an exception leaves it, it does not wait. The schedule is the whole process's. Contexts nest;
    the outer schedule starts anew when the inner one ends. It decorates a function too.

    Args:
        seed: a whole number from 0 to 2**64 - 1; ``"late"``: a task runs when something waits for
            it or asks for it, and not before; ``"early"``: everything runs as soon as it can.
            Anything else raises ValueError.
    """

    def __init__(self, seed):
        self._policy = _policy(seed)
        self._mine = []

    def __enter__(self):
        mine = [self._policy]
        with _entered_lock:
            if not _entered:
                _entered.append([_C._schedule_get()])
            _entered.append(mine)
            self._mine.append(mine)
        try:
            if is_initialized():
                torch.openreg.empty_cache()
                torch.accelerator.empty_host_cache()
            _C._schedule_set(*self._policy)
        except BaseException as error:
            self.__exit__(error)
            raise
        return self

    def __exit__(self, error, *_):
        with _entered_lock:
            mine = self._mine.pop()
            was_last = _entered[-1] is mine
            _entered[:] = [entry for entry in _entered if entry is not mine]
            (outer,) = _entered[-1]
            if len(_entered) == 1:
                _entered.clear()
        if not was_last or _C._in_forked_child():  # where no device works
            return False
        # On the way out of an error nobody may be left who would open a gate.
        (_C._schedule_set if error is None else _C._schedule_switch)(*outer)
        return False


# ---- explore ----


class Result:
    """One outcome of a function, and the schedules that gave it.

    Attributes:
        seeds: these schedules, in the order in which they ran.
        value: what was returned, tensors on the CPU; None if `error` is set.
        error: the exception that was raised, or None.
    """

    def __init__(self, value=None, error=None):
        self.seeds = []
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
    """Races have a number, addresses and stacks in their text, which no two runs share."""
    report = getattr(error, "report", None)
    return type(error), str(error) if report is None else report._identity


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
    """

    def __init__(self):
        self.results = []

    def _add(self, seed, result):
        for known in self.results:
            if known == result:
                known.seeds.append(seed)
                return
        result.seeds.append(seed)
        self.results.append(result)

    @property
    def different(self):
        """The seeds whose result is another than that of ``"early"``, or an exception."""
        first = self.results[0]
        return [s for r in self.results if r is not first or r.error is not None for s in r.seeds]

    @property
    def ok(self):
        """Whether every schedule gave the same result, and none an exception."""
        return not self.different

    def __str__(self):
        count = sum(len(result.seeds) for result in self.results)
        results = f"{len(self.results)} results" if len(self.results) > 1 else "one result"
        lines = [f"{count} schedules, {results}"]
        lines += [f"  {_named(result.seeds)}: {result!r}" for result in self.results]
        if not self.ok:
            seed = self.different[-1] if len(self.results) == 1 else self.results[1].seeds[0]
            lines.append(f"to replay: torch.openreg.testing.explore(fn, schedules=[{seed!r}])")
        return "\n".join(lines)


def _named(seeds, most=12):
    text = ", ".join(map(repr, seeds[:most]))
    return f"{text} and {len(seeds) - most} more" if len(seeds) > most else text


class _Bar:
    """A progress bar of one line; nothing where there is no terminal."""

    WIDTH = 30

    def __init__(self, total, shown):
        self.total, self.done = total, 0
        self.shown = sys.stderr.isatty() if shown is None else shown

    def step(self, results):
        self.done += 1
        if self.shown:
            filled = "#" * (self.WIDTH * self.done // self.total)
            text = f"\rexplore [{filled:<{self.WIDTH}}] {self.done}/{self.total}, "
            print(f"{text}results: {results}", end="", file=sys.stderr, flush=True)

    def close(self):
        if self.shown:
            print(file=sys.stderr)


@contextlib.contextmanager
def _quick_collections():
    """What lives already is left out of collections: one before each run costs little then."""
    gc.collect()
    freeze = gc.get_freeze_count() == 0
    if freeze:
        gc.freeze()
    try:
        yield
    finally:
        if freeze:
            gc.unfreeze()


def _random_state():
    return torch.get_rng_state(), torch.openreg.get_rng_state_all()


def _set_random_state(state):
    torch.set_rng_state(state[0])
    torch.openreg.set_rng_state_all(state[1])


def _run(fn, seed):
    gc.collect()
    with schedule(seed):
        try:
            value = fn()
            _synchronize()
            return Result(tree_map_only(torch.Tensor, lambda t: t.detach().cpu().clone(), value))
        except Exception as error:
            # Its frames hold tensors, which would live into the next run.
            return Result(error=error.with_traceback(None))


def _seeds(schedules):
    if isinstance(schedules, int) and not isinstance(schedules, bool):
        if schedules < 1:
            raise ValueError(f"schedules must be at least 1, not {schedules}")
        schedules = range(schedules)
    if isinstance(schedules, str) or not isinstance(schedules, Iterable):
        raise TypeError(f"schedules must be how many seeds, or the seeds, not {schedules!r}")
    seeds = list(schedules)
    if not seeds:
        raise ValueError("schedules must be at least one seed, not []")
    for seed in seeds:
        _policy(seed)
    return ["early", *(seed for seed in seeds if seed != "early")]


def explore(fn, schedules=100, *, progress=None):
    """Calls a function under many schedules and compares the results.

    ::

        found = torch.openreg.testing.explore(lambda: train(steps=2))
        assert found.ok, found

    The first run is under ``"early"``, the order of a device that runs everything at once. Every
    run begins with PyTorch's random state as it is now, and ends with a synchronisation of all
    devices, so that a kernel's error belongs to its own run. Results may be nested containers.
    Tensors are compared by value, where NaN equals NaN; exceptions by type and text; DataRaceErrors
    by operators, streams and kind of memory.

    Args:
        fn: called without arguments. It has to do the same each time; what is no function raises
            TypeError. An exception that it raises is a result.
        schedules: how many seeds, from 0 on; or the seeds themselves, which may include ``"late"``.
            What is neither raises TypeError; no seed, or a bad one, raises ValueError.
        progress: whether to draw a progress bar on stderr; None draws one if that is a terminal.

    Returns:
        Exploration: print it to see the results and how to repeat them.
    """
    if not callable(fn):
        raise TypeError(f"explore calls a function; {fn!r} cannot be called")
    seeds = _seeds(schedules)
    _synchronize()
    found, state, bar = Exploration(), _random_state(), _Bar(len(seeds), progress)
    try:
        with _quick_collections():
            for seed in seeds:
                _set_random_state(state)
                found._add(seed, _run(fn, seed))
                bar.step(len(found.results))
    finally:
        bar.close()
        _set_random_state(state)
    return found
