"""Orders of execution, chosen by a seed or a tape: schedule() runs a block under one, explore() a
function under many."""

import contextlib
import gc
import os
import re
import sys
import threading
import time
from collections.abc import Iterable

import torch

from ... import _C
from .. import sanitizer
from .._lazy import _lazy_init, is_initialized
from ..device import internal_waits, synchronize_all
from ._coverage import Coverage
from ._exploration import Exploration, Result, kept
from ._tapes import Search, count_queued

SEEDED, LATE, EARLY, TAPE = 1, 2, 3, 4  # the core's orSchedulePolicy
_QUIET = 2  # the sanitizer's mode that only reports
_A_TAPE = re.compile(r"tape:(\d+(?::\d+)?(?:,\d+(?::\d+)?)*)", re.ASCII)


def _policy(seed):
    """The core's form: (policy, seed)."""
    if isinstance(seed, str) and seed in ("late", "early"):
        return (LATE if seed == "late" else EARLY), 0
    tape = _A_TAPE.fullmatch(seed) if isinstance(seed, str) else None
    if tape:
        return TAPE, tape[1]
    number = -1 if isinstance(seed, bool) else getattr(seed, "__index__", lambda: -1)()
    if 0 <= number < 2**64:
        return SEEDED, number
    raise ValueError(
        f"a schedule is a whole number from 0 to 2**64 - 1, 'late' or 'early', not {seed!r}\n"
        "  (or 'tape:' and the choices that explore() prints)"
    )


def _now():
    """The active schedule, in the form of _policy()."""
    policy, seed = _C._schedule_get()
    return policy, os.environ.get("OPENREG_SCHEDULE_TAPE", "0") if policy == TAPE else seed


def _change(policy, seed, at_once=False):
    if policy == TAPE and not at_once:
        _C._schedule_set_tape(seed)
    else:
        _C._schedule_set(policy, 0 if policy == TAPE else seed, at_once)


# The state before the first context, and that of each context entered; threads may leave them in
# any order.
_entered = []
_entered_lock = threading.Lock()


class schedule(contextlib.ContextDecorator):
    """Runs queued tasks one at a time, in an order that `seed` decides.

    ::

        with torch.openreg.testing.schedule(7):
            train_step()

    Tasks run only while a thread is inside a call that queues work, queries or waits. The same seed
    gives the same order each time, on any machine, if one thread at a time uses the device. Cached
    memory that is not in use is returned first, and gaps between live tensors are not reused, so
    that the process's earlier work has no influence. The context waits at its begin and at its end
    until no work is queued, except when an exception leaves it. The schedule is the whole
    process's. Contexts nest; the outer schedule starts anew when the inner one ends. The function
    is also a decorator.

    Args:
        seed: a whole number from 0 to 2**64 - 1; ``"late"``: a task runs only when a call waits for
            it or queries it; ``"early"``: every task runs as soon as it can;
            ``"tape:1,12:2"``: the choices of a search with ``explore(preemptions=)``, with fresh
            and freed memory poisoned as there.
            Anything else raises ValueError.
    """

    def __init__(self, seed):
        self._policy = _policy(seed)
        self._mine = []

    def __enter__(self):
        mine = [self._policy]
        with _entered_lock:
            if not _entered:
                _entered.append([_now()])
            _entered.append(mine)
            self._mine.append(mine)
        try:
            if is_initialized():
                with internal_waits():
                    torch.openreg.empty_cache()
                    torch.accelerator.empty_host_cache()
            _change(*self._policy)
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
        # After an error the caller that would open a gate may be gone.
        _change(*outer, at_once=error is not None)
        return False


# ---- explore ----


BLOCKED = "each launch waits, so every schedule is the same"
UNBLOCK = "run without OPENREG_LAUNCH_BLOCKING (under as_cuda(), CUDA_LAUNCH_BLOCKING)"


def launches_block():
    """Whether each launch waits, which leaves no work for a schedule to order."""
    return ("OPENREG_LAUNCH_BLOCKING", "1") in (setting[:2] for setting in _C._settings())


def refuse_blocking(who):
    _lazy_init()  # as_cuda() reads CUDA_LAUNCH_BLOCKING then
    if launches_block():
        raise RuntimeError(f"{who} cannot compare schedules: {BLOCKED}: {UNBLOCK}")


class _Bar:
    """A progress line on stderr; nothing where there is no terminal."""

    WIDTH = 30

    def __init__(self, shown, total=None):
        self.total, self.done = total, 0
        self.shown = sys.stderr.isatty() if shown is None else shown
        self.last = 0.0

    def _show(self, text):
        print(f"\rexplore {text}", end="", file=sys.stderr, flush=True)

    def step(self, results):
        self.done += 1
        if self.shown:
            filled = "#" * (self.WIDTH * self.done // self.total)
            self._show(f"[{filled:<{self.WIDTH}}] {self.done}/{self.total}, results: {results}")

    def search(self, found, search):
        """The total is unknown, so it shows how many are left to look at."""
        now = time.monotonic()
        if self.shown and (now > self.last + 0.1 or not search.left):
            self.last = now
            counts = f"{search.runs} runs, {search.same} the same, {search.left} or more to go"
            self._show(f"{counts}, results: {len(found.results)}")

    def close(self):
        if self.shown:
            print(file=sys.stderr)


@contextlib.contextmanager
def _quick_collections():
    """Excludes existing objects from collections: then one before each run is cheap."""
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


@contextlib.contextmanager
def _watched():
    """The sanitizer, which only reports; yields True unless it is on already."""
    if sanitizer.is_enabled():
        yield False
        return
    _C._sanitizer_enable(how=_QUIET, stacks=True, initcheck=False, possible=True)
    try:
        yield True
    finally:
        _C._sanitizer_disable()
        _C._sanitizer_clear()


@contextlib.contextmanager
def _poisoned():
    """Memory that is read before it is written, or after it was freed, is NaN and not an earlier
    run's data."""
    before = _C._poison(True)
    try:
        yield
    finally:
        _C._poison(before)


@contextlib.contextmanager
def _recorded():
    _C._schedule_record(True)
    try:
        yield
    finally:
        _C._schedule_record(False)


class _Runs:
    """Calls a function under a sequence of schedules."""

    def __init__(self, fn, found, watched):
        self._fn, self._found, self._watched = fn, found, watched
        self._state = _random_state()
        self.steps = []  # of the last run, if it was recorded
        self.failed = False

    def __call__(self, seed):
        """Returns the Result that the run belongs to."""
        _set_random_state(self._state)
        if self._watched:
            _C._sanitizer_clear()
        result = self._under(seed)
        found = self._found
        found.tasks, found.streams = max((found.tasks, found.streams), count_queued(self.steps))
        known = self._found._add(seed, result)
        if self._watched:
            self._keep_races(seed, result, known is result)
        return known

    def _keep_races(self, seed, result, is_new):
        second = is_new and len(self._found.results) == 2
        reports = sanitizer.reports() if second or not self._found.races else []
        if second:
            result.races = reports
        if reports and not self._found.races:
            self._found.races, self._found.raced = reports, seed

    def _under(self, seed):
        gc.collect()
        with schedule(seed):
            try:
                value = self._fn()
                synchronize_all()
            except Exception as error:
                self.steps, self.failed = _C._schedule_steps(), True
                # Its frames hold tensors, which would stay alive during the next run.
                return Result(error=error.with_traceback(None))
            self.steps, self.failed = _C._schedule_steps(), False
            with internal_waits():
                return Result(kept(value))

    def restore(self):
        _set_random_state(self._state)


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


def _search(runs, found, limit, bar):
    search = Search(found.preemptions, limit)
    runs("early")

    def run(tape):
        result = runs(f"tape:{tape}")
        return result, runs.steps, runs.failed

    with _recorded():
        for result, is_new in search.go(run):
            result.same += not is_new
            found.left = search.left
            bar.search(found, search)
    found.complete = not search.left


def _by_seeds(runs, found, seeds, bar):
    coverage = Coverage()
    with _recorded():
        for seed in seeds:
            runs(seed)
            coverage.add(runs.steps, runs.failed)
            bar.step(len(found.results))
    found.orders = coverage.orders


def _bound(name, value, least):
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")


def explore(fn, schedules=100, *, preemptions=None, limit=1000, progress=None):
    """Calls a function under many schedules and compares the results.

    ::

        found = torch.openreg.testing.explore(lambda: train(steps=2))
        assert found.ok, found
        found = torch.openreg.testing.explore(lambda: train(steps=2), preemptions=1)
        assert found.ok and found.complete, found

    The first run is under ``"early"``, the order of a device that runs everything at once. Every
    run begins with PyTorch's random state as it is now, and ends with a synchronisation of all
    devices, so that a kernel's error belongs to its own run. Results may be tensors of any layout,
    NumPy arrays, storages, modules and other objects, and nested containers of them. Objects are
    copied and compared by what pickle would store of them, modules without their hooks, tensors
    without their gradients. NaN equals NaN, and 0.0 does not equal -0.0. A result that cannot be
    copied or compared raises TypeError with its type. Exceptions are compared by type and text,
    DataRaceErrors by operators, streams and kind of memory. The sanitizer is on, and its reports
    are printed with a result that differs; if it is on already, it keeps its settings.

    Args:
        fn: called without arguments. It has to do the same each time. A value that is not a
            function raises TypeError. An exception that it raises is a result.
        schedules: how many seeds, from 0 on; or the seeds themselves, which may include ``"late"``
            and tapes. Another type raises TypeError; no seed, or a bad one, raises ValueError.
        preemptions: in place of seeds, all schedules with at most so many preemptions: choices that
            leave the host or a stream although it could go on (a return to it does not count).
            Those with fewer come first. Fresh and freed memory is poisoned. Schedules that are
            known to give the same result as one that was run are not run. Together with
            `schedules`, or negative, it raises ValueError; another type raises TypeError.
        limit: how many schedules of such a search are run at most; below 1 raises ValueError.
        progress: whether to draw a progress line on stderr; None draws one if that is a terminal.

    Where launches block (``OPENREG_LAUNCH_BLOCKING=1``) it raises RuntimeError.

    Returns:
        Exploration: print it to see the results and how to repeat them.
    """
    if not callable(fn):
        raise TypeError(f"explore needs a function to call, not {fn!r}")
    if preemptions is None:
        seeds = _seeds(schedules)
        bar = _Bar(progress, len(seeds))
    else:
        if schedules != 100:
            raise ValueError(f"give schedules ({schedules!r}) or preemptions, not both")
        _bound("preemptions", preemptions, 0)
        _bound("limit", limit, 1)
        bar = _Bar(progress)
    refuse_blocking("explore")
    synchronize_all()
    found = Exploration(preemptions)
    poison = contextlib.nullcontext() if preemptions is None else _poisoned()
    with _quick_collections(), poison, _watched() as watched:
        runs = _Runs(fn, found, watched)
        try:
            if preemptions is not None:
                _search(runs, found, limit, bar)
            else:
                _by_seeds(runs, found, seeds, bar)
        finally:
            bar.close()
            runs.restore()
    return found
