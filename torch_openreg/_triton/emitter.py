"""Writes C++: statements, scalars, scratch memory, loops over tiles, linear forms of rows."""

import contextlib

from .borrowed import rows
from .expressions import LIMIT, Array, Linear, Loop, Scalar, layout, merged, row_major
from .types import c_type, size_of

APART = "#pragma GCC ivdep"


class Emitter:
    """`trace` is whether addresses alone are told. `values` maps TTIR's values to expressions."""

    def __init__(self, trace):
        self.trace = trace
        self.lines, self.declarations = [], []
        self.values = {}
        self.scratch = 0
        self._serial = 0
        self._depth = 1
        self._inner = 0  # depth of loops over elements, whose scalars are declared where they are

    # -- text

    def line(self, text):
        self.lines.append("  " * self._depth + text)

    @contextlib.contextmanager
    def braces(self, head, tail="}"):
        self.line(head + " {")
        self._depth += 1
        yield
        self._depth -= 1
        self.line(tail)

    def fresh(self, letter="v"):
        self._serial += 1
        return f"{letter}{self._serial}"

    def local(self, element, text):
        name = self.fresh("t")
        self.line(f"{c_type(element)} const {name} = {text};")
        return name

    def variable(self, kind, letter="v"):
        """A variable of the whole function, because labels must not be crossed by definitions."""
        name = self.fresh(letter)
        self.declarations.append(f"{kind} {name};")
        return name

    def scalar(self, element, text):
        """The scalar as an expression: a variable, with its linear form where it has one."""
        if self._inner:
            return Scalar(element, self.local(element, text))
        name = self.variable(c_type(element))
        self.line(f"{name} = {text};")
        scalar = Scalar(element, name)
        if element in ("i8", "i16", "i32", "i64", "index"):
            scalar.linear = Linear(name, ())
        elif element.startswith("*"):
            scalar.linear = Linear(0, (), pointer=name)
        return scalar

    def text(self, scalar):
        return scalar.code(Loop(self, []))

    # -- numbers of linear forms, which are ints or variables

    def number(self, text):
        name = self.variable("int64_t", "n")
        self.line(f"{name} = {text};")
        return name

    def plus(self, a, b, sign="+"):
        if isinstance(a, int) and isinstance(b, int):
            return a + b if sign == "+" else a - b
        if b == 0:
            return a
        if a == 0 and sign == "+":
            return b
        return self.number(f"(int64_t){a} {sign} (int64_t){b}")

    def times(self, a, b):
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        if 0 in (a, b):
            return 0
        if 1 in (a, b):
            return b if a == 1 else a
        return self.number(f"(int64_t){a} * (int64_t){b}")

    # -- loops over the elements of a tile

    @contextlib.contextmanager
    def loops(self, shape, leaves=(), fixed=(), apart=False):
        """Loops over all axes but the fixed ones; gives a Loop. Neighbouring axes become one loop
        where all leaves allow it, and the innermost has the most neighbouring elements. `apart`: no
        round writes what another one reads, which the compiler cannot see."""
        groups = merged(shape, leaves, fixed)
        near = lambda group: sum(leaf.strides[group[-1]] == 1 for leaf in leaves)  # noqa: E731
        inner = max(range(len(groups)), key=lambda i: (near(groups[i]), i), default=0)
        groups = groups[:inner] + groups[inner + 1 :] + groups[inner : inner + 1]
        indices = ["0"] * len(shape)
        with contextlib.ExitStack() as stack:
            for group in groups:
                length = 1
                for axis in group:
                    length *= shape[axis]
                name = indices[group[-1]] = self.fresh("i")
                if apart and group is groups[-1]:
                    self.line(APART)
                stack.enter_context(
                    self.braces(f"for (int {name} = 0; {name} < {length}; ++{name})")
                )
            if not groups:
                stack.enter_context(self.braces("if (true)"))
            self._inner += 1
            try:
                yield Loop(self, indices)
            finally:
                self._inner -= 1

    def array(self, element, shape, order=None):
        strides = row_major(shape) if order is None else layout(shape, order)
        count = 1
        for length in shape:
            count *= length
        name = self.fresh("a")
        kind = c_type(element)
        self.declarations.append(f"{kind} *const {name} = ({kind} *)(scratch + {self.scratch});")
        self.scratch += (count * size_of(element) + 63) // 64 * 64
        return Array(element, name, 0, strides)

    def assign(self, target, expression, shape):
        apart = bool(rows(expression))
        with self.loops(shape, [target, *expression.leaves()], apart=apart) as loop:
            self.line(f"{target.code(loop)} = {expression.code(loop)};")

    def _order(self, expression, shape):
        """The order of axes of the first array that fills the shape, or None."""
        for leaf in expression.leaves():
            if isinstance(leaf, Array):
                steps = [(leaf.strides[axis], -axis) for axis in range(len(shape))]
                if all(step or shape[axis] == 1 for axis, (step, _) in enumerate(steps)):
                    return sorted(range(len(shape)), key=lambda axis: steps[axis], reverse=True)
        return None

    def copy(self, expression, shape, element=None, order=None):
        target = self.array(
            element or expression.element, shape, order or self._order(expression, shape)
        )
        self.assign(target, expression, shape)
        target.linear, target.bounds = expression.linear, expression.bounds
        return target

    def materialise(self, expression, shape, straight=False):
        """The expression as an array; with `straight` one without gaps, in its axes' order."""
        if isinstance(expression, Array):
            full = expression.strides == row_major(shape) and expression.offset == 0
            if full or not straight:
                return expression
        return self.copy(expression, shape, order=range(len(shape)) if straight else None)

    def define(self, value, expression):
        """Keeps an expression where computing it again is cheap, and computes it otherwise."""
        if not value.type.is_tensor:
            if not isinstance(expression, Scalar):
                operands = [self.text(child) for child in expression.children]
                kept = self.scalar(expression.element, expression.write(*operands))
                if expression.linear is not None:
                    kept.linear = expression.linear
                kept.bounds = expression.bounds
                expression = kept
        elif not isinstance(expression, Array):
            cheap = expression.linear is not None or expression.bounds is not None
            limit = 12 if cheap else LIMIT if value.uses <= 1 else 1
            if expression.cost > limit and value.uses:
                expression = self.copy(expression, value.type.shape)
        self.values[value] = expression

    # -- rows

    def at_row(self, loop, form, axis):
        """The linear form as C++ where the index of `axis` is 0."""
        parts = [str(form.base)] if form.base != 0 else []
        for d, (index, stride) in enumerate(zip(loop.indices, form.strides, strict=False)):
            if d != axis and stride != 0 and index != "0":
                parts.append(f"{index} * (int64_t){stride}")
        parts += [f"(int64_t){term.code(loop)} * {factor}" for term, factor in form.terms]
        return " + ".join(parts) or "0"

    def guards(self, loop, form, axis, shape):
        """Conditions in C++ under which the linear form holds in a row along `axis`."""
        found = list(form.guards)
        for part, bits in form.fits:
            if _always_fits(part, shape):
                continue
            first = last = self.at_row(loop, part, axis)
            if part.strides[axis] != 0:
                last = f"{first} + {shape[axis] - 1} * (int64_t){part.strides[axis]}"
            found.append(f"fits{bits}({first}, {last})")
        return list(dict.fromkeys(found))


def _always_fits(form, shape):
    if form.terms:
        return False
    if not any(form.strides) and str(form.base)[0] in "vi":
        return True  # a scalar of its own type
    numbers = [form.base, *form.strides]
    if not all(isinstance(number, int) for number in numbers):
        return False
    spans = [stride * (length - 1) for stride, length in zip(form.strides, shape, strict=False)]
    least = form.base + sum(min(span, 0) for span in spans)
    most = form.base + sum(max(span, 0) for span in spans)
    return least >= -(2**31) and most < 2**31
