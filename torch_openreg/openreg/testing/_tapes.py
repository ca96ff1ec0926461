"""Schedules by tapes, for explore(preemptions=): a run's possible choices, which schedules are the
same run, and the search over all with few preemptions.

A run under a tape leaves a record (openreg_schedule.h): what the host waited for, what tasks touch,
and each choice with its options. A Program is made from it, which simulates the order in which any
other tape would run the same tasks. Two schedules give the same result if all tasks that touch the
same bytes, and all that the host can see, come in the same order, so one of them is run. This holds
as long as the order is that of a run which was made: the tasks that run are then known.
"""

import heapq
from typing import NamedTuple

(QUEUED, TOUCHES, RECORDS, WAITS, POINT, ASKS, AWAITS, KNOWS, LOOKS, CHOOSES, RUNS, OUTSIDE) = (
    range(1, 13)
)
_WRITES, _PINNED, _INTERNAL, _HALF = 1, 2, 1, 1
ADD = 0
_HOST = -1
_NOBODY = None


def text_of(choices):
    """The tape in the format of openreg_schedule.h."""
    items, gap = [], 0
    for choice in choices:
        if choice:
            items.append(f"{gap}:{choice}" if gap else str(choice))
            gap = 0
        else:
            gap += 1
    return ",".join(items) or "0"


class Choice(NamedTuple):
    """A choice: of `options`, the first `free` of which were no preemption, it was `taken`; and
    whether that was right after the first half of a task."""

    options: int
    free: int
    taken: int
    split: bool


class Program:
    """The host's requests, in order, and the tasks; equal for runs that did the same.

    Streams are numbered by their first task, those without one last. An item of a stream's queue
    is ("task" | "internal", its number), ("record", m) or ("wait", m); a split task is two items.
    A goal is what has to be over: one record, or for some streams the number of items.
    """

    def __init__(self, operations, items, streams, conflicts, visible, firsts):
        self.operations = operations  # (what, stream or goal)
        self.items = items  # of each stream
        self.streams = streams  # how many have tasks
        self.conflicts = conflicts  # pairs of tasks
        self.visible = visible  # tasks that the host may see, or that may see what it does
        self.firsts = firsts  # halves of split tasks
        self.key = (tuple(operations), tuple(map(tuple, items)), conflicts, visible, firsts)

    def simulate(self, tape):
        """Returns the simulation of a tape; None if it would not finish."""
        run = _Simulation(self, tape)
        return run if run.go() else None


class _Simulation:
    def __init__(self, program, tape):
        self.program, self.tape = program, tape
        self.items = program.items
        self.queued = [0] * len(program.items)
        self.done = [0] * len(program.items)
        self.records = set()
        self.choices, self.order, self.seen = [], [], []
        self.position, self.host = {}, {}
        self.latest = self.left = _NOBODY
        self.operation, self.split = 0, False

    def first(self, stream):
        """The first item of a stream's queue, or None."""
        at = self.done[stream]
        return self.items[stream][at] if at < self.queued[stream] else None

    def run(self, stream):
        kind, number = self.first(stream)
        self.done[stream] += 1
        if kind == "record":
            self.records.add(number)
        elif kind != "wait":
            self.position[number] = len(self.position)
            self.host[number] = self.operation
            if kind == "task":
                self.order.append(number)
                self.split = number in self.program.firsts

    def settle(self):
        """Runs records, poison, and waits that are over."""
        again = True
        while again:
            again = False
            for stream in range(len(self.items)):
                while (item := self.first(stream)) is not None and item[0] != "task":
                    if item[0] == "wait" and item[1] not in self.records:
                        break
                    again |= item[0] == "record"
                    self.run(stream)

    def reached(self, goal):
        if isinstance(goal, int):
            return goal in self.records
        return all(self.done[stream] >= count for stream, count in goal)

    def can_run(self, stream):
        item = self.first(stream)
        return item is not None and item[0] == "task"

    def choose(self, host_may, left):
        """Repeats chooseByTape() of csrc/openreg/tools/schedule.c."""
        ready = [s for s in range(self.program.streams) if self.can_run(s)]
        if host_may and not left:
            current = _HOST
        else:
            current = self.latest if self.latest in ready else _NOBODY
        options = [_HOST, *ready] if host_may else ready
        if not options:
            return None
        if current is not _NOBODY:
            classes = {current: 0} if self.left is current else {self.left: 1, current: 0}
            options.sort(key=lambda who: classes.get(who, 2))
            free = sum(classes.get(who, 2) < 2 for who in options)
        else:
            free = len(options)
        taken = 0
        if len(options) > 1:
            at = len(self.choices)
            taken = self.tape[at] if at < len(self.tape) else 0
            taken = taken if taken < len(options) else 0
            self.choices.append(Choice(len(options), free, taken, self.split))
        who = options[taken]
        if who != current:
            self.left = _NOBODY if current is _NOBODY or who == self.left else current
        return who

    def step(self, host_may=False, left=True):
        """Runs one task; False if the host continues, or nothing can run."""
        who = self.choose(host_may, left)
        if who is None or who == _HOST:
            return False
        self.latest = who
        self.run(who)
        self.settle()
        return True

    def go(self):
        for at, (what, which) in enumerate(self.program.operations):
            self.operation = at
            if what == ADD:
                self.queued[which] += 1
                continue
            if what == AWAITS:
                while not self.reached(which):
                    self.settle()
                    if not self.reached(which) and not self.step():
                        return False
                continue
            if what == LOOKS:
                self.seen.append(self.done[which])
                continue
            if what == KNOWS:
                self.seen.append(self.reached(which))
                continue
            self.settle()
            if what == POINT:
                left = False
                while self.step(host_may=True, left=left):
                    left = True
            else:
                self.seen.append(self.reached(which))
                if not self.seen[-1]:
                    self.step()
        return True

    def signature(self):
        """Equal for schedules that give the same result."""
        far, position = len(self.position), self.position
        pairs = tuple(
            position.get(a, far) < position.get(b, far) for a, b in self.program.conflicts
        )
        host = tuple(self.host.get(n) for n in self.program.visible)
        return pairs, host, tuple(self.seen)


# ---- from a record ----


def _overlap(a, b):
    """Whether two tasks touch the same bytes and one writes. None stands for unknown accesses."""
    if a is None or b is None:
        return True
    return any(
        (wa or wb) and begin < other_end and other_begin < end
        for begin, end, wa, _ in a
        for other_begin, other_end, wb, _ in b
    )


class _Reader:
    def __init__(self, steps, poison=True):
        self.poison = poison  # whether the allocator's own work counts
        self.slots = {}  # a stream's place in the core's table, to its number here
        self.operations, self.queues, self.touches, self.owner = [], [], [], []
        self.devices, self.records, self.pending = {}, {}, {}
        self.choices, self.order = [], []
        self.given, self.firsts, self.half = [], [], False
        self.count = 0
        self.followed = True
        for kind, flags, stream, _, _ in steps:  # streams with tasks are numbered first
            if kind == QUEUED and not flags & _INTERNAL:
                self.number(stream)
        self.streams = len(self.slots)
        self.split = self.split_tasks(steps)
        for step in steps:
            self.read(*step)

    def number(self, stream):
        slot = stream >> 30 & 0xFFFFFF
        if slot not in self.slots:
            self.slots[slot] = len(self.slots)
            self.queues.append([])
            self.given.append(0)
        return self.slots[slot]

    def split_tasks(self, steps):
        """The position of each within its stream."""
        ran, split = [0] * self.streams, set()
        for kind, flags, stream, _, _ in steps:
            if kind == RUNS:
                s = self.number(stream)
                if flags & _HALF:
                    split.add((s, ran[s]))
                else:
                    ran[s] += 1
        return split

    def task(self, stream, touched, internal):
        self.add(stream, ("internal" if internal else "task", len(self.touches)))
        self.touches.append(touched)
        self.owner.append(stream)

    def add(self, stream, item):
        self.queues[stream].append(item)
        self.operations.append((ADD, stream))

    def goal(self, stream, record, device=None):
        if record:
            return self.records.get(record, ())  # of an earlier record: over
        if device is not None and not stream:
            chosen = [
                s for s in range(len(self.queues)) if device in (-1, self.devices.get(s, device))
            ]
        else:
            chosen = [self.number(stream)]
        return tuple((s, len(self.queues[s])) for s in chosen)

    def read(self, kind, flags, stream, a, b):
        if kind == QUEUED:
            s = self.number(stream)
            self.devices[s] = a
            internal, touched = flags & _INTERNAL, self.pending.pop(s, None)
            if internal and not self.poison:
                return
            if not internal and (s, self.given[s]) in self.split:
                self.firsts.append(len(self.touches))
                self.task(s, touched, internal)
            self.task(s, touched, internal)
            self.given[s] += not internal
        elif kind == TOUCHES:
            if stream:
                touched = (a, b, flags & _WRITES, flags & _PINNED)
                self.pending.setdefault(self.number(stream), []).append(touched)
        elif kind == RECORDS:
            self.records[a] = self.count
            self.add(self.number(stream), ("record", self.count))
            self.count += 1
        elif kind == WAITS:
            if a in self.records:
                self.add(self.number(stream), ("wait", self.records[a]))
        elif kind == POINT:
            self.operations.append((POINT, None))
        elif kind in (ASKS, KNOWS):
            self.operations.append((kind, self.goal(stream, a)))
        elif kind == AWAITS:
            device = b - 2**64 if b >= 2**63 else b
            self.operations.append((kind, self.goal(stream, a, device)))
        elif kind == LOOKS:
            self.operations.append((kind, self.number(stream)))
        elif kind == CHOOSES:
            self.choices.append(Choice(a, b, flags, self.half))
        elif kind == RUNS:
            self.order.append(self.number(stream))
            self.half = bool(flags & _HALF)
        elif kind == OUTSIDE:
            self.followed = False

    def program(self):
        touches, owner = self.touches, self.owner
        conflicts = tuple(
            (a, b)
            for b in range(len(touches))
            for a in range(b)
            if owner[a] != owner[b] and _overlap(touches[a], touches[b])
        )
        visible = tuple(
            n for n, t in enumerate(touches) if t is None or any(pinned for *_, pinned in t)
        )
        firsts = tuple(self.firsts)
        return Program(self.operations, self.queues, self.streams, conflicts, visible, firsts)


class Record(NamedTuple):
    """What a run did: its choices, and the program and signature, or None if they are unknown."""

    choices: list
    program: Program | None
    signature: tuple | None


def read_record(steps, failed, programs):
    """Reads a run; one that failed may have left tasks behind. `programs` keeps one of each."""
    reader = _Reader(steps)
    if reader.followed and not failed:
        program = reader.program()
        program = programs.setdefault(program.key, program)
        simulated = program.simulate([choice.taken for choice in reader.choices])
        if simulated is not None:
            order = [reader.owner[number] for number in simulated.order]
            if simulated.choices == reader.choices and order == reader.order:
                return Record(reader.choices, program, simulated.signature())
    return Record(reader.choices, None, None)


def count_queued(steps):
    """The number of tasks that a run queued, and of their streams."""
    streams = [
        stream for kind, flags, stream, *_ in steps if kind == QUEUED and not flags & _INTERNAL
    ]
    return len(streams), len(set(streams))


def read_program(steps):
    """For a run under any schedule: its program, with split tasks joined and without what differs
    between schedules, and its tasks in the order of their ends; None and None if it is unknown.
    """
    kept = [step for step in steps if step[0] not in (ASKS, KNOWS, LOOKS, POINT)]
    ends = [step for step in kept if step[0] != RUNS or not step[1] & _HALF]
    reader = _Reader(ends, poison=False)
    if not reader.followed:
        return None, None
    program = reader.program()
    tasks = [iter([n for kind, n in queue if kind == "task"]) for queue in program.items]
    order = [next(tasks[stream], None) for stream in reader.order]
    if None in order or any(next(left, None) is not None for left in tasks):
        return None, None
    return program, order


# ---- the search ----


class Search:
    """Runs all tapes with at most so many preemptions. Those with fewer come first, and among them
    those that leave fewer tasks between their halves, each depth-first.

    Attributes:
        runs: how many were run.
        same: how many are known to be the same as one that was run.
        left: how many are known to exist and have not been looked at.
    """

    MOST_LOOKS = 200  # at schedules, for each that may be run

    def __init__(self, preemptions, limit):
        self.preemptions, self.limit = preemptions, limit
        self.runs = self.same = 0
        self._programs, self._known = {}, {}
        self._frontier = [(0, 0, 0, (), None)]
        self._serial = 0

    @property
    def left(self):
        return len(self._frontier)

    def go(self, run):
        """`run(tape)` makes a run and returns what is to be kept, its record, and whether it
        failed. Yields (what was kept, whether it is new) for each schedule: one that was run, or is
        known to be the same as one that was."""
        while self._frontier and self.runs + self.same < self.limit * self.MOST_LOOKS:
            cost, halves, _, tape, program = self._frontier[0]
            simulated = program.simulate(tape) if program else None
            known = simulated and self._known_of(tape, program, simulated)
            if not known and self.runs == self.limit:
                return
            heapq.heappop(self._frontier)
            if known:
                self.same += 1
                choices, (outcome,) = simulated.choices, known
            else:
                self.runs += 1
                outcome, *made = run(text_of(tape))
                record = read_record(*made, self._programs)
                choices, program = record.choices, record.program
                if program:
                    self._known[id(program), record.signature] = (outcome,)
            self._branch(cost, halves, tape, choices, program)
            yield outcome, not known

    def _known_of(self, tape, program, simulated):
        """The result of a schedule that runs these tasks, if known, or None."""
        return self._known.get((id(program), simulated.signature()))

    def _branch(self, cost, halves, tape, choices, program):
        taken = list(tape) + [0] * (len(choices) - len(tape))
        for at in range(len(tape), len(choices)):
            choice = choices[at]
            for option in range(1, choice.options):
                price = cost + (option >= choice.free)
                if price <= self.preemptions:
                    self._serial -= 1
                    split = halves + choice.split
                    branch = (price, split, self._serial, (*taken[:at], option), program)
                    heapq.heappush(self._frontier, branch)
