"""Where the values of a kernel come from and go, found before its C++ is written."""

from collections import defaultdict

_LOADS = ("tt.load", "tt.atomic_rmw", "tt.atomic_cas", "tt.atomic_load", "tt.atomic_poll")
_MASKS = {
    "tt.load": 1,
    "tt.store": 2,
    "tt.atomic_rmw": 2,
    "tt.atomic_cas": 3,
    "tt.atomic_load": 1,
    "tt.atomic_poll": 3,
    "tt.atomic_store": 2,
}
ACCESSES = tuple(_MASKS)
MEMORY = -1  # in the place of an argument's position: the pointer is a number from memory


class Facts:
    """`roots`: the kernel's arguments that a pointer may come from, by their positions. `accesses`
    are numbered by their order. `needed`: values that an address, a mask or control depends on.
    `dependent`: accesses whose address, mask or control depends on loaded data -> the loads."""

    def __init__(self, module):
        self._module = module
        self._sources = defaultdict(list)
        self._users = defaultdict(list)
        self._depths = {}
        for function in module.functions.values():
            self._link(function, function.regions[0], 0)
        self.roots = self._find_roots()
        self.needed = self._find_needed()
        self._loaded = self._find_loaded()
        self.accesses = [op for op in self.operations() if op.name in ACCESSES]
        self.dependent = {}
        for function in module.functions.values():
            self._mark(function.regions[0], self._jumps_on_data(function))

    def _depend(self, values, sources):
        for value, source in zip(values, sources, strict=False):
            self._sources[value].append(source)

    def _link(self, function, region, depth):
        labels = {block.label: block for block in region}
        for block in region:
            for argument in block.arguments:
                self._depths[argument] = depth
            for op in block.operations:
                for operand in op.operands:
                    self._users[operand].append(op)
                    if self._depths.get(operand, depth) < depth:
                        operand.uses += 4  # a use within a loop counts for many
                for result in op.results:
                    self._depths[result] = depth
                self._link_operation(function, op, labels, depth)

    def _link_operation(self, function, op, labels, depth):
        inner = depth + (op.name in ("scf.for", "scf.while"))
        for region in op.regions:
            self._link(function, region, inner)
        ends = [region[0].terminator.operands for region in op.regions]
        if op.name == "scf.for":
            index, *arguments = op.regions[0][0].arguments
            self._sources[index] += op.operands[:3]
            self._depend(arguments, op.operands[3:])
            self._depend(arguments, ends[0])
            self._depend(op.results, arguments)
            self._depend(op.results, [op.operands[1]] * len(op.results))
        elif op.name == "scf.if":
            for end in ends:
                self._depend(op.results, end)
            self._depend(op.results, op.operands[:1] * len(op.results))
        elif op.name == "scf.while":
            before, after = op.regions[0][0], op.regions[1][0]
            self._depend(before.arguments, op.operands)
            self._depend(before.arguments, ends[1])
            self._depend(after.arguments, ends[0][1:])
            self._depend(op.results, ends[0][1:])
            self._depend(op.results, ends[0][:1] * len(op.results))
        elif op.name == "tt.call":
            callee = self._module.functions[op.text.split("(")[0][1:]]
            self._depend(callee.regions[0][0].arguments, op.operands)
            for block in callee.regions[0]:
                if block.terminator.name == "tt.return":
                    self._depend(op.results, block.terminator.operands)
        else:
            for label, values in op.successors:
                self._depend(labels[label].arguments, values)
            for result in op.results:
                self._sources[result] += op.operands
                for end in ends:
                    self._sources[result] += end

    def _find_roots(self):
        roots = defaultdict(set)
        for position, argument in enumerate(self._module.kernel.regions[0][0].arguments):
            if argument.type.element.startswith("*"):
                roots[argument] = {position}
        for op in self.operations():
            if op.name == "tt.int_to_ptr":
                roots[op.results[0]] = {MEMORY}
        self._spread(roots, lambda value: value.type.element.startswith("*"))
        return roots

    def root(self, pointer):
        """The position of the argument that a pointer comes from; None: it may be another one."""
        roots = self.roots[pointer]
        return min(roots) if len(roots) == 1 and MEMORY not in roots else None

    def reached(self, op):
        """The positions of the arguments that an access may touch."""
        roots, arguments = self.roots[op.operands[0]], self._module.kernel.regions[0][0].arguments
        if MEMORY not in roots:
            return roots
        return {at for at, a in enumerate(arguments) if a.type.element.startswith("*")}

    def _spread(self, facts, holds):
        """Joins the facts of sources until nothing changes."""
        changed = True
        while changed:
            changed = False
            for value, sources in self._sources.items():
                if not holds(value):
                    continue
                joined = set().union(facts[value], *(facts[source] for source in sources))
                if joined != facts[value]:
                    facts[value] = joined
                    changed = True

    def is_widened(self, tile):
        """Whether products alone read a tile, which they compute in float32."""
        return tile.type.element in ("f16", "bf16") and all(
            (op.name == "tt.dot" and tile is not op.operands[2])
            or (op.name == "tt.trans" and self.is_widened(op.results[0]))
            for op in self._users[tile]
        )

    def operations(self):
        for function in self._module.functions.values():
            yield from function.walk()

    @staticmethod
    def addresses(op):
        """What an access is made at: its pointer and its mask."""
        mask = _MASKS[op.name]
        return [op.operands[0], *op.operands[mask : mask + 1]]

    @staticmethod
    def _conditions(op):
        if op.name == "scf.for":
            return op.operands[:3]
        if op.name in ("scf.if", "scf.condition", "cf.cond_br"):
            return op.operands[:1]
        return []

    def _find_needed(self):
        pending, needed = [], set()
        for op in self.operations():
            pending += self._conditions(op)
            if op.name in ACCESSES:
                pending += self.addresses(op)
        while pending:
            value = pending.pop()
            if value not in needed:
                needed.add(value)
                pending += self._sources.get(value, [])
                if value.operation is not None:
                    for region in value.operation.regions:
                        if value.operation.name.startswith("tt."):
                            pending += [
                                o for b in region for op in b.operations for o in op.operands
                            ]
        return needed

    def _find_loaded(self):
        loaded = defaultdict(set)
        for op in self.operations():
            if op.name in _LOADS:
                for result in op.results:
                    loaded[result] = {op}
        self._spread(loaded, lambda value: True)
        return loaded

    def _loads_of(self, values):
        return set().union(*(self._loaded[value] for value in values))

    def _jumps_on_data(self, function):
        jumps = (op.operands for op in function.walk() if op.name == "cf.cond_br")
        return set().union(*map(self._loads_of, jumps))

    def _mark(self, region, loads):
        """`loads`: what decides whether the region runs."""
        for block in region:
            for op in block.operations:
                if op.name in ACCESSES and (found := loads | self._loads_of(self.addresses(op))):
                    self.dependent[op] = found
                controls = self._conditions(op)
                if op.name == "scf.while":
                    controls = op.regions[0][0].terminator.operands[:1]
                for inner in op.regions:
                    self._mark(inner, loads | self._loads_of(controls))

    @staticmethod
    def does(op):
        """Whether an access reads and writes."""
        return (
            op.name not in ("tt.store", "tt.atomic_store"),
            op.name not in ("tt.load", "tt.atomic_load", "tt.atomic_poll"),
        )

    def uses_of(self, position):
        """Whether the kernel reads and writes an argument."""
        reads = writes = False
        for op in self.accesses:
            if position in self.roots[op.operands[0]]:
                reads_here, writes_here = self.does(op)
                reads |= reads_here
                writes |= writes_here
        return reads, writes
