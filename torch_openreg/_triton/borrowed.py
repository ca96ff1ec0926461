"""Loaded rows that are read where they lie, in a tensor's memory.

A row is copied before something may be written there, if that operation or a later one reads it.
"""

from .expressions import Array
from .facts import ACCESSES
from .types import c_type

_WRITES = {*ACCESSES, "tt.call"} - {"tt.load"}


def _may_write(op):
    return op.name in _WRITES or any(inner.name in _WRITES for inner in op.walk())


class Row(Array):
    """`name` is a pointer, to memory or to the array `copy`."""

    def __init__(self, element, name, offset, strides, copy, count):
        super().__init__(element, name, offset, strides)
        self.copy, self.count = copy, count

    def like(self, offset, strides):
        return Row(self.element, self.name, offset, strides, self.copy, self.count)


def _leaves(expression):
    """Those of the expression and of its forms."""
    yield from expression.leaves()
    forms = [form for form in (expression.linear, *(expression.bounds or ())) if form]
    for part in [*forms, *(part for form in forms for part, _ in form.fits)]:
        for term, _ in part.terms:
            yield from _leaves(term)


def rows(expression):
    return [leaf for leaf in _leaves(expression) if isinstance(leaf, Row)]


class Borrowed:
    """What the operations of one block have borrowed. Blocks within it borrow for themselves."""

    def __init__(self, emitter, block):
        self._emitter, self._block = emitter, block
        self._last = {}  # value: the number of the operation that reads it last
        self._number = 0  # of the operation that is being written

    @property
    def allowed(self):
        """Whether no other block reads what this one loads."""
        return not self._block.terminator.successors

    def borrow(self, copy, count):
        """A row of so many elements, which is `copy` until it is set to another address."""
        if not self._last:
            for number, op in enumerate(self._block.operations):
                for inner in (op, *op.walk()):
                    self._last.update(dict.fromkeys(inner.operands, number))
        name = self._emitter.variable(f"{c_type(copy.element)} *", "a")
        self._emitter.line(f"{name} = {copy.name};")
        return Row(copy.element, name, 0, copy.strides, copy, count)

    def begin(self, number):
        """Called before each operation."""
        self._number = number
        op = self._block.operations[number]
        if self._last and op.name != "tt.store" and _may_write(op):
            self.settle()

    def settle(self):
        """Copies the rows that this operation or a later one reads."""
        for row in self._read_since(self._number).values():
            self._emitter.line(f"{row.name} = settled({row.name}, {row.copy.name}, {row.count});")

    def settle_for(self, begin, count, elsewhere=()):
        """The same before `count` elements from `begin` on are written, for rows that they may be
        part of. The written row itself is no such row if each of its elements is read right before
        it is written: not `elsewhere`, and not later."""
        later = self._read_since(self._number + 1)
        for name, row in self._read_since(self._number).items():
            may_be_same = "false" if name in elsewhere or name in later else "true"
            self._emitter.line(
                f"{name} = settled({name}, {row.copy.name}, {row.count}, {begin}, {count},"
                f" {may_be_same});"
            )

    def _read_since(self, number):
        values = self._emitter.values
        found = (values[v] for v, last in self._last.items() if last >= number and v in values)
        return {row.name: row for expression in found for row in rows(expression)}
