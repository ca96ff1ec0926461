"""Loops, branches, calls, assertions and prints."""

import re
from dataclasses import replace

from .expressions import Apply, Array, Scalar
from .linear import of_variable
from .operations import operation
from .ttir import Type
from .types import c_type, literal

ROUNDS = 1 << 24  # of a while loop in a trace, which is then given up


def variable(emitter, *values):
    """What a loop or a branch assigns: a variable, or an array for a tile. None where a trace needs
    none of the values."""
    kind = values[0].type
    if not any(map(emitter.wanted, values)):
        return None
    if kind.is_tensor:
        return emitter.array(kind.element, kind.shape)
    scalar = Scalar(kind.element, emitter.variable(c_type(kind.element)))
    scalar.linear = of_variable(scalar)
    return scalar


def assign(emitter, targets, values, kinds):
    """Assigns all at once: what a target holds may be read by the values of the others. Tiles are
    first, because they are computed from scalars only now."""
    pending = []
    for at, (target, value, kind) in enumerate(zip(targets, values, kinds, strict=False)):
        if target is None or _same(target, value):
            continue
        others = [t for i, t in enumerate(targets) if i != at and t is not None]
        if _reads(value, target, others, len(targets)):
            value = (
                emitter.copy(value, kind.shape)
                if kind.is_tensor
                else Scalar(kind.element, _saved(emitter, value))
            )
        pending.append((target, value, kind))
    for target, value, kind in sorted(pending, key=lambda item: not item[2].is_tensor):
        if kind.is_tensor:
            emitter.assign(target, value, kind.shape)
        else:
            emitter.line(f"{target.text} = {emitter.text(value)};")


def _same(target, value):
    if isinstance(target, Array):
        return isinstance(value, Array) and vars_of(target) == vars_of(value)
    return target.text == getattr(value, "text", None)


def vars_of(array):
    return array.name, array.offset, array.strides


def _saved(emitter, value):
    name = emitter.variable(c_type(value.element))
    emitter.line(f"{name} = {emitter.text(value)};")
    return name


def _reads(value, target, others, count):
    """Whether the value may read what another assignment changes, or its own target elsewhere."""
    if isinstance(target, Scalar):
        return count > 1
    arrays = [leaf for leaf in value.leaves() if isinstance(leaf, Array)]
    names = {other.name for other in others if isinstance(other, Array)}
    return any(
        leaf.name in names or (leaf.name == target.name and vars_of(leaf) != vars_of(target))
        for leaf in arrays
    )


def _step(argument, result):
    """The value that is added to a loop's tile in each round, if that is all that happens to it."""
    made = result.operation
    if made is None or made.name not in ("tt.addptr", "arith.addi"):
        return None
    if made.operands[0] is not argument:
        return None
    step = made.operands[1].operation
    if step is not None and step.name in ("tt.splat", "arith.constant"):
        return made.operands[1]
    return None


@operation("scf.for")
def for_loop(emitter, op):
    lower, upper, step = (emitter.text(emitter.values[operand]) for operand in op.operands[:3])
    block = op.regions[0][0]
    index, *arguments = block.arguments
    final = block.terminator.operands
    targets, moved = [], []
    for argument, initial, last in zip(arguments, op.operands[3:], final, strict=False):
        if not emitter.wanted(argument):
            targets.append(None)
            continue
        by = _step(argument, last) if argument.type.is_tensor else None
        source = emitter.values[initial]
        if by is not None and source.linear is not None:
            offset = emitter.variable("int64_t", "n")
            emitter.line(f"{offset} = 0;")
            emitter.values[argument] = _moved(emitter, source, offset)
            targets.append(None)
            moved.append((Scalar("i64", offset), by))
            continue
        target = variable(emitter, argument)
        assign(emitter, [target], [source], [argument.type])
        emitter.values[argument] = target
        targets.append(target)
    name = emitter.variable(c_type(index.type.element), "i")
    counter = Scalar(index.type.element, name)
    counter.linear = of_variable(counter)
    emitter.values[index] = counter
    below = f"{name} < {upper}" if op.text != "unsigned" else f"unsign({name}) < unsign({upper})"
    with emitter.braces(f"for ({name} = {lower}; {below}; {name} += {step})"):
        emitter.block(block)
        kinds = [argument.type for argument in arguments]
        values = [
            None if t is None else emitter.values[v] for t, v in zip(targets, final, strict=False)
        ]
        steps = [emitter.text(emitter.values[by]) for _, by in moved]
        offsets = [offset for offset, _ in moved]
        values += [
            Scalar("i64", f"{o.text} + {step}") for o, step in zip(offsets, steps, strict=False)
        ]
        assign(emitter, targets + offsets, values, kinds + [Type("i64")] * len(moved))
    for result, argument in zip(op.results, arguments, strict=False):
        if emitter.wanted(result):
            emitter.values[result] = emitter.values[argument]


def _moved(emitter, source, offset):
    """A loop's tile of pointers or integers, as what it was before the loop plus a scalar."""
    by = Scalar("i64", offset)
    if source.element.startswith("*"):
        node = Apply(source.element, lambda p, n: f"({p} + {n})", [source, by], 0)
    else:
        kind = c_type(source.element)
        node = Apply(source.element, lambda a, n: f"({kind})({a} + {n})", [source, by], 0)
    form = source.linear
    base = offset if form.base == 0 else f"({form.base} + {offset})"
    node.linear = replace(form, base=base)
    return node


@operation("scf.if")
def branch(emitter, op):
    kinds = [result.type for result in op.results]
    targets = [variable(emitter, result) for result in op.results]
    condition = emitter.text(emitter.values[op.operands[0]])
    for at, region in enumerate(op.regions):
        with emitter.braces("else" if at else f"if ({condition})"):
            emitter.block(region[0])
            values = [emitter.values.get(operand) for operand in region[0].terminator.operands]
            assign(emitter, targets, values, kinds)
    for result, target in zip(op.results, targets, strict=False):
        emitter.values[result] = target


@operation("scf.while")
def while_loop(emitter, op):
    before, after = op.regions[0][0], op.regions[1][0]
    kinds = [argument.type for argument in before.arguments]
    targets = [variable(emitter, argument) for argument in before.arguments]
    assign(emitter, targets, [emitter.values.get(operand) for operand in op.operands], kinds)
    for argument, target in zip(before.arguments, targets, strict=False):
        emitter.values[argument] = target
    passed = [variable(emitter, *both) for both in zip(op.results, after.arguments, strict=False)]
    if emitter.trace:
        rounds = emitter.variable("int64_t", "n")
        emitter.line(f"{rounds} = 0;")
    with emitter.braces("for (;;)"):
        emitter.block(before)
        condition, *given = before.terminator.operands
        types = [result.type for result in op.results]
        assign(emitter, passed, [emitter.values.get(value) for value in given], types)
        emitter.line(f"if (!{emitter.text(emitter.values[condition])}) break;")
        if emitter.trace:
            # The value that ends a loop may be what another program writes.
            emitter.line(f"if (++{rounds} > {ROUNDS}) {{ record->stop = 1; return; }}")
        for argument, target in zip(after.arguments, passed, strict=False):
            emitter.values[argument] = target
        emitter.block(after)
        values = [emitter.values.get(operand) for operand in after.terminator.operands]
        assign(emitter, targets, values, kinds)
    for result, target in zip(op.results, passed, strict=False):
        emitter.values[result] = target


@operation("cf.br")
def jump(emitter, op):
    _go(emitter, *op.successors[0])


@operation("cf.cond_br")
def conditional_jump(emitter, op):
    condition = emitter.text(emitter.values[op.operands[0]])
    for at, successor in enumerate(op.successors):
        with emitter.braces("else" if at else f"if ({condition})"):
            _go(emitter, *successor)


def _go(emitter, label, arguments):
    name, targets, kinds = emitter.labels[label]
    assign(emitter, targets, [emitter.values.get(argument) for argument in arguments], kinds)
    emitter.line(f"goto {name};")


@operation("tt.call")
def call(emitter, op):
    """Functions are written where they are called; Triton has no recursion."""
    callee = emitter.functions[re.match(r'@([\w$.]+|"[^"]*")', op.text)[1]]
    targets = [variable(emitter, result) for result in op.results]
    arguments = [emitter.values.get(operand) for operand in op.operands]
    emitter.called(callee, arguments, targets)
    for result, target in zip(op.results, targets, strict=False):
        emitter.values[result] = target


@operation("tt.assert")
def device_assert(emitter, op):
    if emitter.trace:
        return
    condition, (filename, line, _) = emitter.values[op.operands[0]], op.location
    shape = op.operands[0].type.shape or ()
    text = literal(f"{filename}:{line}: {op.strings[0]}")
    with emitter.loops(shape, list(condition.leaves())) as loop:
        with emitter.braces(f"if (!{condition.code(loop)})"):
            emitter.line(f"failure->set({text});")
            emitter.line("return;")


@operation("tt.print")
def device_print(emitter, op):
    if emitter.trace:
        return
    emitter.serial = True
    prefix, several = op.strings[0], len(op.operands) > 1
    if not op.operands:
        emitter.line("print_program(program);")
        emitter.line(f'__builtin_printf("%s\\n", {literal(prefix)});')
    signs = re.findall(r"\d+", op.attributes.get("isSigned", "").partition(":")[2])
    hexadecimal = op.attributes.get("hex", "false")
    for at, operand in enumerate(op.operands):
        value, shape = emitter.values[operand], operand.type.shape or ()
        signed = "true" if signs[at : at + 1] == ["1"] else "false"
        places = ", ".join(f"%{len(str(length - 1))}d" for length in shape)  # as wide as the last
        text = literal(prefix + f"(operand {at}) " * several)
        with emitter.loops(shape, [_every_axis(shape), *value.leaves()]) as loop:
            emitter.line("print_program(program);")
            words = ", ".join([f'" idx ({places})%s"', *loop.indices, text])
            emitter.line(f"__builtin_printf({words});")
            emitter.line(f"print_value({hexadecimal}, {signed}, {value.code(loop)});")


def _every_axis(shape):
    """A leaf that keeps all axes apart."""
    return Array("i1", "", 0, tuple(f"axis{axis}" for axis in range(len(shape))))


# A launch begins when those before it on its stream are done: there is nothing to wait for.
@operation("tt.grid_dependency_wait", "tt.grid_dependency_launch_dependents")
@operation("gpu.barrier", "ttg.barrier", "llvm.intr.assume", "tt.return", "scf.yield")
@operation("scf.condition", "tt.reduce.return", "tt.scan.return")
@operation("tt.map_elementwise.return")
def nothing(emitter, op):
    pass
