"""Loads, stores and atomics: in rows where the address is linear along an axis, else one by one.

A trace tells the same addresses instead, and reads nothing but numbers that addresses depend on.
"""

from .borrowed import Row, rows
from .emitter import APART
from .expressions import Apply, Array, Scalar
from .operations import operation
from .types import c_type, literal, size_of

READS, WRITES, UPDATES, STORES = range(4)


class Access:
    """The addresses of one load, store or atomic, and where they are masked."""

    def __init__(self, emitter, op, mask, kind):
        self.emitter, self.op, self.kind = emitter, op, kind
        self.pointer = emitter.values[op.operands[0]]
        self.shape = op.operands[0].type.shape or ()
        self.element = op.operands[0].type.element[1:]
        self.mask = emitter.values[op.operands[mask]] if len(op.operands) > mask else None
        self.site = emitter.site(op)
        self.argument = emitter.argument_of(op.operands[0])
        if self.mask is not None and self.mask.bounds is None and self.mask.cost > 3 and self.shape:
            self.mask = emitter.copy(self.mask, self.shape)
        self.axis = self._axis()
        self.used = ()  # what else each element reads or writes

    def _forms(self):
        return [self.pointer.linear, *(self.mask.bounds if self.mask is not None else ())]

    def _axis(self):
        """The axis along which whole rows are accessed, or None."""
        if self.pointer.linear is None or not self.pointer.linear.pointer:
            return None
        if self.mask is not None and self.mask.bounds is None:
            return None
        axes = [axis for axis, length in enumerate(self.shape) if length > 1]
        axes = [axis for axis in axes if self._row_along(axis)]
        strides = self.pointer.linear.strides
        return max(axes, key=lambda axis: (strides[axis] == 1, axis), default=None)

    def _row_along(self, axis):
        bounds = self._forms()[1:]
        return all(form.row(axis) for form in self._forms()) and all(
            bound.strides[axis] in (0, 1, -1) for bound in bounds
        )

    @property
    def is_row(self):
        """Whether all of it is one row, whose elements are neighbours in memory."""
        lengths = [length for length in self.shape if length > 1]
        return len(lengths) == 1 and self.is_near

    @property
    def is_near(self):
        return self.axis is not None and self.pointer.linear.strides[self.axis] == 1

    def elsewhere(self, value):
        """The rows that the value reads at other places than this access writes it."""
        return {
            row.name
            for row in rows(value)
            if row.element != self.element or row.offset or row.strides[self.axis] != 1
        }

    def order(self):
        """The order of axes in which a loaded tile lies in scratch memory."""
        axes = [axis for axis in range(len(self.shape)) if axis != self.axis]
        return axes if self.axis is None else [*axes, self.axis]

    def rows(self, each, one):
        """Writes `each(loop, pointer, stride)` for a row, and loops of `one` where its linear form
        does not hold. Without an axis, loops of `one` alone."""
        emitter = self.emitter
        if self.axis is None:
            self.elements(one)
            return
        form = self.pointer.linear
        others = self._leaves()
        with emitter.loops(self.shape, others, fixed=[self.axis]) as loop:
            start = emitter.at_row(loop, form, self.axis)
            kind = c_type(self.element)
            emitter.line(f"{kind} *const row = ({kind} *){form.pointer} + ({start});")
            self._interval(loop)
            guards = []
            for part in self._forms():
                guards += emitter.guards(loop, part, self.axis, self.shape)
            guards = list(dict.fromkeys(guards))
            if not guards:
                each(loop, "row", form.strides[self.axis])
                return
            with emitter.braces(f"if (__builtin_expect({' && '.join(guards)}, 1))"):
                each(loop, "row", form.strides[self.axis])
            with emitter.braces("else", "}"):
                if self.kind == WRITES:
                    emitter.borrowed.settle()
                with emitter.braces("[=]() COLD", "}();"):
                    index = loop.indices[self.axis] = emitter.fresh("i")
                    loop.names = {}
                    length = self.shape[self.axis]
                    with emitter.braces(f"for (int {index} = 0; {index} < {length}; ++{index})"):
                        self._one(loop, one)

    def _leaves(self):
        """Keeps axes apart whose strides are not known here."""
        found = list(self.pointer.leaves())
        if self.mask is not None:
            found += self.mask.leaves()
        strides = Scalar("i1", "")
        strides.strides = tuple(str(axis) for axis in range(len(self.shape)))
        return [*found, strides]

    def _interval(self, loop):
        """The part of the row that all bounds allow."""
        emitter, length = self.emitter, self.shape[self.axis]
        emitter.line(f"int64_t from = 0, to = {length};")
        for bound in self._forms()[1:]:
            constant = isinstance(bound.base, int) and not any(bound.strides) and not bound.terms
            if constant and bound.base < 0:
                continue
            first, stride = emitter.at_row(loop, bound, self.axis), bound.strides[self.axis]
            if stride == 0:
                emitter.line(f"to = {first} < 0 ? to : 0;")
            elif stride == 1:
                emitter.line(f"to = smaller<int64_t>(to, -({first}));")
            else:
                emitter.line(f"from = larger<int64_t>(from, {first} + 1);")

    def elements(self, one):
        used = [self.pointer, *([self.mask] if self.mask is not None else []), *self.used]
        leaves = [leaf for expression in used for leaf in expression.leaves()]
        with self.emitter.loops(self.shape, leaves or self._leaves()) as loop:
            self._one(loop, one)

    def _one(self, loop, one):
        mask = self.mask.code(loop) if self.mask is not None else "true"
        one(loop, self.pointer.code(loop), mask)

    # -- traces

    def trace(self):
        emitter, kind = self.emitter, self.kind

        def row(loop, pointer, stride):
            emitter.line(
                f"touch_row<{kind}>(record, {self.argument}, {self.site}, {pointer}, {stride},"
                " from, to);"
            )

        def one(loop, pointer, mask):
            emitter.line(
                f"if ({mask}) touch<{kind}>(record, {self.argument}, {self.site}, {pointer});"
            )

        known = [f"!record->blind[{site}]" for site in emitter.loads_of(self.op)]
        with emitter.braces(f"if ({' && '.join(known) or 'true'})"):
            self.rows(row, one)


@operation("tt.load")
def load(emitter, op):
    access = Access(emitter, op, 1, READS)
    kind, result = c_type(access.element), op.results[0]
    if emitter.trace:
        access.trace()
        if result in emitter.needed:
            _peek(emitter, op, access)
        return
    other = emitter.values[op.operands[2]] if len(op.operands) > 2 else None
    volatile = "isVolatile = true" in op.text or op.attributes.get("isVolatile") == "true"
    read = "*(volatile {} *){}" if volatile and size_of(access.element) > 2 else "*{1}"
    if not result.type.is_tensor:
        pointer, mask = emitter.text(access.pointer), access.mask
        value = read.format(kind, pointer)
        if mask is not None:
            instead = emitter.text(other) if other is not None else f"{kind}(0)"
            value = f"{emitter.text(mask)} ? {value} : {instead}"
        emitter.values[result] = emitter.scalar(access.element, value)
        return
    if other is not None and not isinstance(other, Scalar):
        access.axis = None
    # A product would convert the tile in each round of a loop.
    target = emitter.array(
        "f32" if emitter.is_widened(result) else access.element, access.shape, access.order()
    )
    access.used = [target, *([other] if other is not None else [])]
    held = c_type(target.element)
    same = target.element == access.element and not access.element.startswith(("i1", "*"))
    if access.is_row and same and not volatile and emitter.borrowed.allowed:
        target = emitter.borrowed.borrow(target, max(access.shape))

    def row(loop, pointer, stride):
        length = access.shape[access.axis]
        instead = f"({held}){other.code(loop)}" if other is not None else f"{held}(0)"
        given = f"{pointer}, {stride}, from, to, {length}, {instead}"
        if isinstance(target, Row):
            emitter.line(f"{target.name} = borrow_row({target.copy.name}, {given});")
            return
        to = f"{target.name} + {loop.position(target.offset, target.strides)}"
        emitter.line(f"load_row({to}, {given});")

    def one(loop, pointer, mask):
        instead = f"({held}){other.code(loop)}" if other is not None else f"{held}(0)"
        value = f"({held}){read.format(kind, pointer)}"
        if mask != "true":
            value = f"{mask} ? {value} : {instead}"
        emitter.line(f"{target.code(loop)} = {value};")

    access.rows(row, one)
    emitter.values[result] = target


def _peek(emitter, op, access):
    """In a trace, the numbers that addresses depend on. What the kernel itself writes is not known
    before it runs."""
    kind = c_type(access.element)
    instead = [emitter.values[operand] for operand in op.operands[2:3]]
    instead = instead or [Scalar(access.element, f"{kind}(0)")]
    if emitter.writes(access.argument):
        emitter.line(f"record->blind[{access.site}] = 1;")
        emitter.values[op.results[0]] = instead[0]
        return
    mask = [access.mask] if access.mask is not None else [Scalar("i1", "true")]

    def write(pointer, mask, instead):
        return f"({mask} ? peek(record, {access.argument}, {access.site}, {pointer}) : {instead})"

    node = Apply(access.element, write, [access.pointer, *mask, *instead], 100)
    emitter.define(op.results[0], node)


@operation("tt.store")
def store(emitter, op):
    access = Access(emitter, op, 2, WRITES)
    if emitter.trace:
        access.trace()
        return
    value, kind = emitter.values[op.operands[1]], c_type(access.element)
    if not access.shape:
        mask = f"if ({emitter.text(access.mask)}) " if access.mask is not None else ""
        pointer = emitter.text(access.pointer)
        emitter.borrowed.settle_for(pointer, 1)
        emitter.line(f"{mask}*{pointer} = {emitter.text(value)};")
        return
    if not access.is_row:
        emitter.borrowed.settle()
    if access.axis is None and value.cost > 8:
        value = emitter.copy(value, access.shape)
    access.used = [value]

    def row(loop, pointer, stride):
        if access.is_row:
            emitter.borrowed.settle_for(pointer, "to", access.elsewhere(value))
        index = loop.indices[access.axis] = emitter.fresh("i")
        at = index if stride == 1 else f"{index} * (int64_t){stride}"
        if access.is_near:
            emitter.line(APART)
        with emitter.braces(f"for (int {index} = from; {index} < to; ++{index})"):
            emitter.line(f"{pointer}[{at}] = {value.code(loop)};")
        loop.indices[access.axis] = "0"
        loop.names = {}

    def one(loop, pointer, mask):
        condition = "" if mask == "true" else f"if ({mask}) "
        emitter.line(f"{condition}*{pointer} = ({kind}){value.code(loop)};")

    access.rows(row, one)


@operation("tt.atomic_rmw")
def atomic_rmw(emitter, op):
    kind = op.text.split(",")[0].strip()
    _atomic(emitter, op, 2, lambda p, x: f"atomic_{kind}({p}, {x})", op.operands[1:2])


@operation("tt.atomic_cas")
def atomic_cas(emitter, op):
    _atomic(emitter, op, 3, lambda p, c, x: f"atomic_cas({p}, {c}, {x})", op.operands[1:3])


@operation("tt.atomic_load")
def atomic_load(emitter, op):
    _atomic(emitter, op, 1, lambda p: f"atomic_load({p})", [])


def _atomic(emitter, op, mask, write, operands):
    access = Access(emitter, op, mask, UPDATES)
    access.axis = None
    kind, result = c_type(access.element), op.results[0]
    if emitter.trace:
        access.trace()
        emitter.line(f"record->blind[{access.site}] = 1;")
        emitter.values[result] = Scalar(access.element, f"{kind}(0)")
        return
    values = [emitter.values[operand] for operand in operands]
    if not access.shape:
        text = write(emitter.text(access.pointer), *map(emitter.text, values))
        if access.mask is not None:
            text = f"{emitter.text(access.mask)} ? {text} : {kind}(0)"
        emitter.values[result] = emitter.scalar(access.element, text)
        return
    target = emitter.array(access.element, access.shape)

    def one(loop, pointer, mask):
        text = write(pointer, *(value.code(loop) for value in values))
        emitter.line(f"{target.code(loop)} = {mask} ? {text} : {kind}(0);")

    values = [
        v if isinstance(v, (Array, Scalar)) else emitter.copy(v, access.shape) for v in values
    ]
    access.used = [target, *values]
    access.elements(one)
    emitter.values[result] = target


@operation("tt.atomic_store")
def atomic_store(emitter, op):
    access = Access(emitter, op, 2, STORES)
    if emitter.trace:
        access.trace()
        return
    value = emitter.values[op.operands[1]]

    def one(loop, pointer, mask):
        condition = "" if mask == "true" else f"if ({mask}) "
        emitter.line(f"{condition}atomic_store({pointer}, {value.code(loop)});")

    access.used = [value]
    access.elements(one)


@operation("tt.atomic_poll")
def atomic_poll(emitter, op):
    access = Access(emitter, op, 3, UPDATES)
    if emitter.trace:
        access.trace()
        emitter.values[op.results[0]] = Scalar("i1", "true")  # in the end another program writes it
        return
    value, *timeout = (emitter.values[operand] for operand in op.operands[1:])
    timeout = emitter.text(*timeout) if timeout else "-1"
    target = emitter.array("i1", access.shape or (1,))

    def one(loop, pointer, mask):
        at = target.code(loop) if access.shape else f"{target.name}[0]"
        emitter.line(f"{at} = atomic_poll({pointer}, {value.code(loop)}, {timeout});")

    access.used = [value, *([target] if access.shape else [])]
    access.elements(one)
    result = target if access.shape else emitter.scalar("i1", f"{target.name}[0]")
    emitter.values[op.results[0]] = result


# ---- pointers in memory ----
#
# Memory has the addresses that the program has, and a kernel has others for the same bytes. A trace
# has the program's.


def _followed(emitter, op, element):
    """Gives the C++ of the kernel's address from that of the program's."""
    kind = c_type(element)
    if emitter.trace:
        return lambda address: f"({kind})({address})"
    emitter.serial = True  # the task's thread alone may ask
    place = literal(f"{op.location[0]}:{op.location[1]}")
    function = f"pointers[{2 * emitter.pointers}]"
    return lambda address: f"follow({function}, ({kind})({address}), {place})"


@operation("tt.int_to_ptr")
def integer_to_pointer(emitter, op):
    element = op.results[0].type.element
    write = _followed(emitter, op, element)
    emitter.define(op.results[0], Apply(element, write, [emitter.values[op.operands[0]]], 100))


@operation("tt.ptr_to_int")
def pointer_to_integer(emitter, op):
    at, shift = emitter.argument_of(op.operands[0]), ""
    if not emitter.trace:
        if at < 0:
            raise NotImplementedError(f"{op.name} of a pointer that comes from no single argument")
        shift = f" + ((int64_t)pointers[{emitter.pointers + at}] - (int64_t)pointers[{at}])"
    number = Apply("i64", lambda p: f"((int64_t)({p}){shift})", [emitter.values[op.operands[0]]], 2)
    emitter.define(op.results[0], number)
