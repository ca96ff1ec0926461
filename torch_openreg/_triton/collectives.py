"""Operations whose results depend on many elements: reductions, scans, gathers, products."""

from .expressions import Apply, Array, Scalar, row_major
from .operations import operation
from .types import c_type, literal

LANES = 16


def _without(shape, axis):
    return (*shape[:axis], *shape[axis + 1 :])


def _inputs(emitter, op):
    """The operands, each cheap enough to be read twice. A GPU's reductions and scans are trees,
    which round for each level and not for each element. So sums and products of halves are kept in
    float32."""
    inputs = []
    for operand in op.operands:
        source = emitter.values[operand]
        dear = source.cost > 1 and not isinstance(source, Scalar)
        inputs.append(emitter.copy(source, operand.type.shape) if dear else source)
    return [_converted(source, "f32") for source in inputs] if _sign_of_halves(op) else inputs


def _at(emitter, loop, axis, index, source):
    """The source's C++ with another index along the axis."""
    before, names = loop.indices[axis], loop.names
    loop.indices[axis], loop.names = index, {}
    text = source.code(loop)
    loop.indices[axis], loop.names = before, names
    return text


_VECTORS = {  # reductions of one operand by one operation, which kernel.h has on vectors
    "arith.addf": "Add",
    "arith.addi": "Add",
    "arith.mulf": "Multiply",
    "arith.maxnumf": "MaxNum",
    "arith.minnumf": "MinNum",
    "arith.maximumf": "Maximum",
    "arith.minimumf": "Minimum",
    "arith.maxsi": "Larger",
    "arith.minsi": "Smaller",
    "arith.andi": "And",
    "arith.ori": "Or",
    "arith.xori": "Xor",
}


def _on_vectors(op, axis):
    """The vector reduction that an operation is, or None."""
    numbers = op.operands[0].type.element in ("f32", "f64", "i32", "i64") or _sign_of_halves(op)
    return _VECTORS.get(_only(op)) if numbers and op.operands[0].type.shape[axis] > 1 else None


def _only(op):
    """The name of the only operation in the region, if it takes both arguments."""
    block = op.regions[0][0]
    first = block.operations[0]
    simple = len(block.operations) == 2 and {*first.operands} == {*block.arguments}
    return first.name if simple else None


@operation("tt.reduce")
def reduce(emitter, op):
    axis, shape = int(op.attributes["axis"]), op.operands[0].type.shape
    inputs, rest = _inputs(emitter, op), _without(shape, axis)
    leaves = [leaf for source in inputs for leaf in source.leaves()]
    results = [emitter.array(source.element, rest or (1,)) for source in inputs]
    targets = [
        result.view(lambda offset, strides: (offset, (*strides[:axis], 0, *strides[axis:])))
        if rest
        else result.view(lambda offset, strides: (offset, (0,)))
        for result in results
    ]
    near = all(leaf.strides[axis] in (0, 1) for leaf in leaves)
    across = near and shape[axis] % LANES == 0 and shape[axis] > LANES
    name = _on_vectors(op, axis)
    if name and all(leaf.strides[axis] == 1 for leaf in leaves) and isinstance(inputs[0], Array):
        with emitter.loops(shape, [*leaves, *targets], fixed=[axis]) as loop:
            text = f"reduce_row<{name}, {shape[axis]}>(&{inputs[0].code(loop)})"
            emitter.line(f"{targets[0].code(loop)} = {text};")
    elif name and (across or (near and not rest)) and not isinstance(inputs[0], Scalar):
        with emitter.loops(shape, [*leaves, *targets], fixed=[axis]) as loop:
            _reduce_each(emitter, loop, axis, f"{name}, {shape[axis]}", inputs[0], targets[0])
    elif across or len(rest) == 0 or shape[axis] == 1:
        with emitter.loops(shape, [*leaves, *targets], fixed=[axis]) as loop:
            _reduce_row(emitter, op, loop, axis, shape[axis], inputs, targets, across)
    else:
        _reduce_planes(emitter, op, axis, shape, inputs, targets, leaves)
    for value, result in zip(op.results, results, strict=False):
        element = value.type.element
        if value.type.is_tensor:
            emitter.values[value] = _converted(result, element)
        else:
            emitter.values[value] = emitter.scalar(element, f"({c_type(element)}){result.name}[0]")


def _reduce_each(emitter, loop, axis, kind, source, target):
    """One row of what is computed for it alone."""
    k, into = emitter.fresh("k"), target.code(loop)
    head = f"{into} = reduce_each<{kind}, {c_type(source.element)}>([=](int {k})"
    with emitter.braces(head, "});"):
        emitter.line(f"return {_at(emitter, loop, axis, k, source)};")


def _reduce_row(emitter, op, loop, axis, length, inputs, targets, across):
    """One row: in lanes that are vectors, or from its first element to its last."""
    count = LANES if across else 1
    lanes = [emitter.fresh("lanes") for _ in inputs]
    for name, source in zip(lanes, inputs, strict=False):
        emitter.line(f"{c_type(source.element)} {name}[{count}];")
    lane, k = emitter.fresh("l"), emitter.fresh("k")

    with emitter.braces(f"for (int {lane} = 0; {lane} < {count}; ++{lane})"):
        for name, source in zip(lanes, inputs, strict=False):
            emitter.line(f"{name}[{lane}] = {_at(emitter, loop, axis, lane, source)};")
    held = [f"{name}[{lane}]" for name in lanes]
    with emitter.braces(f"for (int {k} = {count}; {k} < {length}; {k} += {count})"):
        with emitter.braces(f"for (int {lane} = 0; {lane} < {count}; ++{lane})"):
            others = [_at(emitter, loop, axis, f"({k} + {lane})", source) for source in inputs]
            _combine(emitter, op, held, others, held)
    while count > 1:
        count //= 2
        with emitter.braces(f"for (int {lane} = 0; {lane} < {count}; ++{lane})"):
            others = [f"{name}[{lane} + {count}]" for name in lanes]
            _combine(emitter, op, held, others, held)
    for name, target in zip(lanes, targets, strict=False):
        emitter.line(f"{target.code(loop)} = {name}[0];")


def _reduce_planes(emitter, op, axis, shape, inputs, targets, leaves):
    """Plane by plane along an axis that is not the nearest."""
    with emitter.loops(shape, [*leaves, *targets], fixed=[axis]) as loop:
        for source, target in zip(inputs, targets, strict=False):
            emitter.line(f"{target.code(loop)} = {_at(emitter, loop, axis, '0', source)};")
    k = emitter.fresh("k")
    with emitter.braces(f"for (int {k} = 1; {k} < {shape[axis]}; ++{k})"):
        with emitter.loops(shape, [*leaves, *targets], fixed=[axis]) as loop:
            held = [target.code(loop) for target in targets]
            others = [_at(emitter, loop, axis, k, source) for source in inputs]
            _combine(emitter, op, held, others, held)


def _combine(emitter, op, first, second, into):
    """Writes the operation's region once: into = region(first, second)."""
    if sign := _sign_of_halves(op):
        emitter.line(f"{into[0]} = {first[0]} {sign} {second[0]};")
        return
    block = op.regions[0][0]
    elements = [argument.type.element for argument in block.arguments]
    names = [
        emitter.local(element, text)
        for element, text in zip(elements, first + second, strict=False)
    ]
    for target, text in zip(into, emitter.inline(block, names), strict=False):
        emitter.line(f"{target} = {text};")


def _sign_of_halves(op):
    """The sign in C++ of a sum or a product of 16-bit floats, or None."""
    halves = op.operands[0].type.element in ("f16", "bf16")
    return {"arith.addf": "+", "arith.mulf": "*"}.get(_only(op)) if halves else None


@operation("tt.scan")
def scan(emitter, op):
    """From first to last."""
    axis, shape = int(op.attributes["axis"]), op.operands[0].type.shape
    inputs, length = _inputs(emitter, op), shape[axis]
    results = [emitter.array(source.element, shape) for source in inputs]
    leaves = [*results, *(leaf for source in inputs for leaf in source.leaves())]
    reverse = op.attributes["reverse"] == "true"
    first = str(length - 1) if reverse else "0"
    with emitter.loops(shape, leaves, fixed=[axis]) as loop:
        for source, result in zip(inputs, results, strict=False):
            text = _at(emitter, loop, axis, first, source)
            emitter.line(f"{_at(emitter, loop, axis, first, result)} = {text};")
    k = emitter.fresh("k")
    at = f"({length - 1} - {k})" if reverse else k
    before = f"({length} - {k})" if reverse else f"({k} - 1)"
    with emitter.braces(f"for (int {k} = 1; {k} < {length}; ++{k})"):
        with emitter.loops(shape, leaves, fixed=[axis]) as loop:
            held = [_at(emitter, loop, axis, before, result) for result in results]
            others = [_at(emitter, loop, axis, at, source) for source in inputs]
            into = [_at(emitter, loop, axis, at, result) for result in results]
            _combine(emitter, op, held, others, into)
    for value, result in zip(op.results, results, strict=False):
        emitter.values[value] = _converted(result, value.type.element)


@operation("tt.map_elementwise")
def map_elementwise(emitter, op):
    """The region takes `pack` neighbouring elements of each operand, and gives as many."""
    kind, pack = op.operands[0].type, int(op.attributes.get("pack", "1"))
    rows, places = (kind.size // pack, pack), [str(at) for at in range(pack)]
    if kind.size % pack:
        raise NotImplementedError(f"{op.name} of {kind.size} elements in packs of {pack}")
    inputs = [
        _in_rows(emitter, emitter.values[operand], kind.shape, rows) for operand in op.operands
    ]
    results = [emitter.array(value.type.element, rows) for value in op.results]
    leaves = [*results, *(leaf for source in inputs for leaf in source.leaves())]
    with emitter.loops(rows, leaves, fixed=[1]) as loop:

        def each(sources):
            pairs = ((source, at) for source in sources for at in places)
            return [Scalar(s.element, _at(emitter, loop, 1, at, s)) for s, at in pairs]

        arguments = [Scalar(x.element, emitter.local(x.element, x.text)) for x in each(inputs)]
        emitter.called(op, arguments, each(results))
    for value, result in zip(op.results, results, strict=False):
        emitter.values[value] = result.like(0, row_major(kind.shape))


def _in_rows(emitter, source, shape, rows):
    """The source's elements in another shape."""
    if isinstance(source, Scalar):
        return source
    array = emitter.materialise(source, shape, straight=True)
    return array.like(array.offset, row_major(rows))


@operation("tt.gather")
def gather(emitter, op):
    shape, source_shape = op.results[0].type.shape, op.operands[0].type.shape
    axis = int(op.attributes["axis"])
    source = emitter.materialise(emitter.values[op.operands[0]], source_shape)
    step, strides = source.strides[axis], list(source.strides)
    strides[axis] = 0
    rest = source.like(source.offset, tuple(strides))
    result = emitter.array(source.element, shape)
    index, size = emitter.values[op.operands[1]], source_shape[axis]
    place = literal(f"{op.location[0]}:{op.location[1]}")
    with emitter.loops(shape, [result, rest, *index.leaves()]) as loop:
        at, number = loop.position(rest.offset, rest.strides), index.code(loop)
        unsigned = f"unsign({number})"  # as a GPU widens an index of 8 or 16 bits
        text = f"{source.name}[{at} + (int64_t){unsigned} * {step}]"
        wrong = f"{unsigned} >= {size}u"
        if emitter.trace:  # the run, which may have other numbers, fails if its own are wrong
            text = f"{wrong} ? {c_type(source.element)}(0) : {text}"
        else:
            with emitter.braces(f"if (__builtin_expect({wrong}, 0))"):
                emitter.line(f"failure->set_index({place}, {number}, {size});")
                emitter.line("return;")
        emitter.line(f"{result.code(loop)} = {text};")
    emitter.values[op.results[0]] = result


@operation("tt.histogram")
def histogram(emitter, op):
    to, shape = op.results[0].type, op.operands[0].type.shape
    result = emitter.array(to.element, to.shape)
    emitter.assign(result, Scalar(to.element, "0"), to.shape)
    operands = [emitter.values[operand] for operand in op.operands]
    with emitter.loops(shape, [leaf for operand in operands for leaf in operand.leaves()]) as loop:
        texts = [operand.code(loop) for operand in operands]
        condition = " && ".join([f"unsign({texts[0]}) < {to.size}u", *texts[1:]])
        emitter.line(f"if ({condition}) ++{result.name}[{texts[0]}];")
    emitter.values[op.results[0]] = result


_WIDER = {"f16": "f32", "bf16": "f32", "i8": "i32"}


@operation("tt.dot")
def dot(emitter, op):
    left, right, start = op.operands[:3]
    element = left.type.element
    wide = "f32" if element.startswith("f8") else _WIDER.get(element, element)
    total = "f32" if op.results[0].type.element in ("f16", "bf16") else op.results[0].type.element
    a = emitter.materialise(_converted(emitter.values[left], wide), left.type.shape)
    b = _rows_of(emitter, right, wide)
    c = emitter.copy(
        _converted(emitter.values[start], total),
        start.type.shape,
        total,
        range(len(start.type.shape)),
    )
    *batch, rows, depth = left.type.shape
    columns = right.type.shape[-1]
    shape = (*batch, 1, 1)
    with emitter.loops(shape, [a, b, c]) as loop:
        at = [f"{x.name} + {loop.position(x.offset, x.strides)}" for x in (a, b, c)]
        steps = f"{a.strides[-2]}, {a.strides[-1]}"
        emitter.line(f"multiply<{rows}, {columns}, {depth}>({at[0]}, {steps}, {at[1]}, {at[2]});")
    emitter.values[op.results[0]] = c
    if total != op.results[0].type.element:
        converted = _converted(c, op.results[0].type.element)
        emitter.values[op.results[0]] = emitter.copy(converted, start.type.shape)


def _converted(expression, element):
    if expression.element == element:
        return expression
    return Apply(element, lambda x: f"({c_type(element)}){x}", [expression])


def _rows_of(emitter, value, element):
    """The right operand, whose rows must lie one behind the other."""
    source, shape = _converted(emitter.values[value], element), value.type.shape
    *_, rows, columns = shape
    turned = isinstance(source, Array) and source.strides == (1, rows)
    if turned and element == "f32" and rows % 8 == 0 and columns % 8 == 0:
        target = emitter.array(element, shape)
        at = f"{source.name} + {source.offset}"
        emitter.line(f"transpose<{columns}, {rows}>({at}, {target.name});")
        return target
    return emitter.materialise(source, shape, straight=True)


@operation("tt.dot_scaled")
def dot_scaled(emitter, op):
    raise NotImplementedError("tt.dot_scaled")


@operation("tt.elementwise_inline_asm")
def inline_assembly(emitter, op):
    raise NotImplementedError(f"inline assembly: {op.strings[0] if op.strings else ''}")
