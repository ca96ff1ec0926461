"""How many of a program's possible orders explore() has seen, by seeds.

For each two tasks of different streams that touch the same bytes, one of them writing, an order
contains which came first. A result depends on nothing else, except for what the host sees on its
way.
"""

from ._tapes import ADD, ASKS, AWAITS, read_program

_MOST_STATES = 20_000


def _merge(counts, others):
    for stream, count in others.items():
        counts[stream] = max(counts.get(stream, 0), count)


class _Tasks:
    """The tasks of each stream, the number of each other stream's tasks that must precede each, and
    the pairs of which either may come first."""

    def __init__(self, program):
        self.streams = [[] for _ in program.items]
        self.before, self.pairs = {}, program.conflicts
        self._needs = [{} for _ in program.items]  # of the stream's next task
        self._records, self._known = {}, {}
        position = [0] * len(program.items)
        for what, which in program.operations:
            if what == AWAITS:
                self._host_waits(which)
            elif what == ADD:
                self._add(which, *program.items[which][position[which]])
                position[which] += 1

    def _add(self, stream, kind, number):
        needs = self._needs[stream]
        if kind == "record":
            self._records[number] = {**needs, stream: len(self.streams[stream])}
        elif kind == "wait":
            _merge(needs, self._records[number])
        elif kind == "task":
            _merge(needs, self._known)
            self.before[number] = [item for item in needs.items() if item[0] != stream]
            self.streams[stream].append(number)

    def _host_waits(self, goal):
        if isinstance(goal, int):
            _merge(self._known, self._records[goal])
            return
        for stream, _ in goal:  # for all that it has been given
            _merge(self._known, self._needs[stream])
            _merge(self._known, {stream: len(self.streams[stream])})

    def count(self):
        """The number of orders; None if there are too many to count."""
        bits = {}  # by task: the other tasks, and the bit that is set if it was first
        for index, (a, b) in enumerate(self.pairs):
            bits.setdefault(a, []).append((b, 1 << index))
            bits.setdefault(b, []).append((a, 0))
        place = {n: (s, i) for s, tasks in enumerate(self.streams) for i, n in enumerate(tasks)}
        states, looked = {((0,) * len(self.streams), 0)}, 0
        for _ in place:
            following = set()
            for done, order in states:
                for stream, task in self._ready(done):
                    first = sum(
                        bit for n, bit in bits.get(task, ()) if done[place[n][0]] <= place[n][1]
                    )
                    now = (*done[:stream], done[stream] + 1, *done[stream + 1 :])
                    following.add((now, order | first))
            states = following
            looked += len(states)
            if looked > _MOST_STATES:
                return None
        return len({order for _, order in states})

    def _ready(self, done):
        for stream, tasks in enumerate(self.streams):
            if done[stream] < len(tasks):
                task = tasks[done[stream]]
                if all(done[s] >= count for s, count in self.before[task]):
                    yield stream, task


class Coverage:
    """What the runs of one function have shown."""

    def __init__(self):
        self._orders, self._program, self._possible = set(), None, None
        self._one_program, self._asks = True, False

    def add(self, steps, failed):
        """Adds a run under a seed."""
        self._asks |= any(step[0] == ASKS for step in steps)
        program, order = (None, None) if failed else read_program(steps)
        self._program = self._program or program
        if program is None or program.key != self._program.key:
            self._one_program = False
            return
        position = {number: at for at, number in enumerate(order)}
        self._orders.add(tuple(position[a] < position[b] for a, b in program.conflicts))

    @property
    def orders(self):
        """(number seen, number of all). The second is None where it cannot be counted: the program
        acts on what it sees or on outside input, or there are too many. None instead of the pair if
        it is unknown what was seen."""
        if not self._one_program or self._program is None:
            return None
        if self._possible is None:
            self._possible = (None if self._asks else _Tasks(self._program).count(),)
        return len(self._orders), self._possible[0]
