"""Tiles as expressions of their indices, and the loops in C++ that compute them.

A tile is a tree. Its leaves are arrays in a thread's scratch memory, ranges and scalars; its nodes
are element-wise operations. A view (broadcast, transpose, reshape) changes the strides of the
leaves alone. Beside its tree an integer or a pointer may have a linear form and a condition its
bounds: facts that hold while their guards do, by which memory is moved in whole rows.
"""

from dataclasses import dataclass, replace

from .types import c_type

# An expression that is dearer than this is computed into an array before it is used again.
LIMIT = 40


@dataclass(frozen=True)
class Linear:
    """base + the sum of strides[d] * index[d] + the sum of terms, exact in 64 bits.

    A number is an int or the name of a C++ variable. `guards` are conditions in C++ without
    indices. `fits` are linear forms that must stay within so many bits at every index.
    """

    base: object
    strides: tuple
    terms: tuple = ()  # of (Expression, number)
    guards: tuple = ()
    fits: tuple = ()  # of (Linear, bits)
    pointer: str = ""  # the variable that the form is relative to

    def view(self, strides, term):
        """The form behind a view: `strides` maps strides, `term` maps expressions."""
        fits = tuple((form.view(strides, term), bits) for form, bits in self.fits)
        terms = tuple((term(expression), factor) for expression, factor in self.terms)
        return replace(self, strides=strides(self.strides), terms=terms, fits=fits)

    def row(self, axis):
        """Whether nothing but the stride of `axis` changes along that axis."""
        forms = [self, *(form for form, _ in self.fits)]
        return all(not term.varies(axis) for form in forms for term, _ in form.terms)


class Expression:
    """`cost` is roughly the number of operations. A scalar has no strides."""

    cost = 0
    children = ()
    linear = None
    bounds = None  # linear forms, each of which is below zero where the condition holds

    def __init__(self, element):
        self.element = element

    def varies(self, axis):
        return any(child.varies(axis) for child in self.children)

    def leaves(self):
        for child in self.children:
            yield from child.leaves()


class Scalar(Expression):
    def __init__(self, element, text):
        super().__init__(element)
        self.text = text

    def view(self, change):
        return self

    def code(self, loop):
        return self.text


class Leaf(Expression):
    """What depends on indices directly: offset + the sum of strides[d] * index[d]."""

    def __init__(self, element, offset, strides):
        super().__init__(element)
        self.offset, self.strides = offset, strides

    def varies(self, axis):
        return self.strides[axis] != 0

    def leaves(self):
        yield self

    def view(self, change):
        return self.like(*change(self.offset, self.strides))


class Array(Leaf):
    def __init__(self, element, name, offset, strides):
        super().__init__(element, offset, strides)
        self.name = name

    def like(self, offset, strides):
        return Array(self.element, self.name, offset, strides)

    def code(self, loop):
        return f"{self.name}[{loop.position(self.offset, self.strides)}]"


class Range(Leaf):
    cost = 1

    def like(self, offset, strides):
        return Range(self.element, offset, strides)

    def code(self, loop):
        return f"({c_type(self.element)})({loop.position(self.offset, self.strides)})"


class Apply(Expression):
    """An operation on each element; `write` gives its C++ from that of its operands."""

    def __init__(self, element, write, children, cost=1):
        super().__init__(element)
        self.write, self.children = write, tuple(children)
        self.cost = cost + sum(child.cost for child in self.children)

    def view(self, change):
        viewed = Apply(self.element, self.write, [child.view(change) for child in self.children])
        viewed.cost = self.cost
        return viewed

    def code(self, loop):
        return loop.name(self)


class Loop:
    """The text of expressions within a nest of loops; each node is computed once."""

    def __init__(self, writer, indices):
        self.writer, self.indices, self.names = writer, indices, {}

    def position(self, offset, strides):
        parts = [str(offset)] if offset else []
        for index, stride in zip(self.indices, strides, strict=False):
            if stride and index != "0":
                parts.append(index if stride == 1 else f"{index} * {stride}")
        return " + ".join(parts) or "0"

    def name(self, node):
        if id(node) not in self.names:
            text = node.write(*(child.code(self) for child in node.children))
            name = self.writer.local(node.element, text)
            self.names[id(node)] = name, node
        return self.names[id(node)][0]


def row_major(shape):
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step if length > 1 else 0)
        step *= length
    return tuple(reversed(strides))


def layout(shape, order):
    """Strides of an array without gaps, whose axes are `order` from the outermost."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step if shape[axis] > 1 else 0
        step *= shape[axis]
    return tuple(strides)


def reshape(strides, old, new):
    """The strides behind a reshape, or None where only a copy can have that shape."""
    result, at = [], 0
    axes = [(length, stride) for length, stride in zip(old, strides, strict=False) if length > 1]
    group, size = None, 1  # the axes that are being divided, as one
    for length in new:
        if length == 1:
            result.append(0)
            continue
        while size % length or size < length:
            if at == len(axes):
                return None
            more, stride = axes[at]
            at += 1
            if size > 1:
                joined = stride * more if isinstance(stride, int) else 0 if not group else None
                if joined is None or group != joined:
                    return None
            group, size = stride, size * more
        size //= length
        if isinstance(group, int):
            result.append(group * size)
        elif size == 1:
            result.append(group)
        else:
            return None
    return tuple(result)


def merged(shape, leaves, fixed):
    """Axes that can be one loop for all leaves: lists of neighbouring axes, outermost first."""

    def joins(before, axis):
        for leaf in leaves:
            stride = leaf.strides[axis]
            if not isinstance(stride, int) or leaf.strides[before] != stride * shape[axis]:
                return False
        return True

    groups, last = [], None
    for axis, length in enumerate(shape):
        if axis in fixed:
            last = None
        elif length > 1:
            if last is not None and joins(last, axis):
                groups[-1].append(axis)
            else:
                groups.append([axis])
            last = axis
    return groups
