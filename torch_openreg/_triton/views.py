"""Operations that change a tile's shape. All but a few change strides alone."""

import re

from . import expressions, linear
from .expressions import Apply, Linear, Scalar
from .operations import operation


def _viewed(expression, change, form=True):
    """The expression behind a view; `change` maps strides. Scalars stay as they are."""
    if isinstance(expression, Scalar):
        result = Scalar(expression.element, expression.text)
    else:
        result = expression.view(lambda offset, strides: (offset, change(strides)))
    if form:
        view = lambda linear: linear.view(change, lambda term: _viewed(term, change))  # noqa: E731
        result.linear = expression.linear and view(expression.linear)
        result.bounds = expression.bounds and tuple(map(view, expression.bounds))
    return result


def _source(emitter, op):
    return emitter.values[op.operands[0]], op.operands[0].type, op.results[0].type


@operation("tt.splat")
def splat(emitter, op):
    source, kind, to = _source(emitter, op)
    result = _viewed(source, lambda strides: (0,) * len(to.shape))
    if kind.element == "i1" and result.bounds is None:
        number = emitter.number(f"{source.text} ? -1 : 0")
        result.bounds = (Linear(number, (0,) * len(to.shape)),)
    emitter.values[op.results[0]] = result


@operation("tt.unsplat")
def unsplat(emitter, op):
    source, _, _ = _source(emitter, op)
    emitter.define(op.results[0], _viewed(source, lambda strides: (), form=False))


@operation("tt.broadcast")
def broadcast(emitter, op):
    source, kind, to = _source(emitter, op)
    cheap = source.linear is not None or source.bounds is not None
    if source.cost > (12 if cheap else 3) and to.size > kind.size:
        source = emitter.copy(source, kind.shape)

    def change(strides):
        return tuple(
            0 if length == 1 else stride
            for length, stride in zip(kind.shape, strides, strict=False)
        )

    emitter.values[op.results[0]] = _viewed(source, change)


@operation("tt.expand_dims")
def expand(emitter, op):
    source, _, _ = _source(emitter, op)
    axis = int(op.attributes["axis"])
    change = lambda strides: (*strides[:axis], 0, *strides[axis:])  # noqa: E731
    emitter.values[op.results[0]] = _viewed(source, change)


@operation("tt.trans")
def transpose(emitter, op):
    source, _, _ = _source(emitter, op)
    order = [int(axis) for axis in re.findall(r"\d+", op.attributes["order"].partition(":")[2])]
    change = lambda strides: tuple(strides[axis] for axis in order)  # noqa: E731
    emitter.values[op.results[0]] = _viewed(source, change)


@operation("tt.reshape", "tt.view")
def reshape(emitter, op):
    source, kind, to = _source(emitter, op)
    change = lambda strides: expressions.reshape(strides, kind.shape, to.shape)  # noqa: E731
    if any(change(leaf.strides) is None for leaf in source.leaves()):
        source = emitter.materialise(source, kind.shape, straight=True)
    forms = [source.linear, *(source.bounds or ())]
    parts = [f for form in forms if form for f in (form, *(part for part, _ in form.fits))]
    simple = all(not form.terms and change(form.strides) is not None for form in parts)
    emitter.values[op.results[0]] = _viewed(source, change, form=simple)


@operation("tt.join")
def join(emitter, op):
    to = op.results[0].type
    result = emitter.array(to.element, to.shape)
    for at, operand in enumerate(op.operands):
        source = emitter.values[operand]
        half = result.view(lambda offset, strides, at=at: (offset + at * strides[-1], strides[:-1]))
        emitter.assign(half, source, operand.type.shape)
    emitter.values[op.results[0]] = result


@operation("tt.split")
def halves(emitter, op):
    source, kind, _ = _source(emitter, op)
    if any(not isinstance(leaf.strides[-1], int) for leaf in source.leaves()) or source.cost > 3:
        source = emitter.copy(source, kind.shape)
    for at, result in enumerate(op.results):
        if isinstance(source, Scalar):
            emitter.values[result] = source
            continue
        take = lambda offset, strides, at=at: (offset + at * strides[-1], strides[:-1])  # noqa: E731
        emitter.values[result] = source.view(take)


@operation("tt.cat")
def concatenate(emitter, op):
    to = op.results[0].type
    result = emitter.array(to.element, to.shape)
    for at, operand in enumerate(op.operands):
        start = at * operand.type.shape[0] * result.strides[0]
        part = result.view(lambda offset, strides, start=start: (offset + start, strides))
        emitter.assign(part, emitter.values[operand], operand.type.shape)
    emitter.values[op.results[0]] = result


@operation("tt.addptr")
def add_pointer(emitter, op):
    pointer, offset = (emitter.values[operand] for operand in op.operands)
    node = Apply(pointer.element, lambda p, n: f"({p} + (int64_t){n})", [pointer, offset])
    shape = op.results[0].type.shape or ()
    if shape:
        element = op.operands[1].type.element
        node.linear = linear.advance(emitter, pointer, offset, element, len(shape))
    emitter.define(op.results[0], node)
