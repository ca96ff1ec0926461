"""The linear forms of integers and pointers, and the bounds that comparisons of them are."""

from dataclasses import replace

from .expressions import Linear

_WIDE = ("i64", "index")


def _form(expression, rank):
    """The expression's form; without one the expression itself is its only term."""
    if expression.linear is not None:
        form = expression.linear
        return form if len(form.strides) == rank else replace(form, strides=(0,) * rank)
    return Linear(0, (0,) * rank, ((expression, 1),))


def _uniform(form):
    return not form.terms and all(stride == 0 for stride in form.strides)


def used(form, element):
    """The form where its value leaves 32 bits, or is compared: there it must not have wrapped."""
    bits = 32 if element == "i32" else 62
    return replace(form, fits=(*form.fits, (replace(form, fits=(), guards=()), bits)))


def add(emitter, a, b, sign="+"):
    strides = tuple(emitter.plus(x, y, sign) for x, y in zip(a.strides, b.strides, strict=False))
    terms = b.terms if sign == "+" else tuple((t, emitter.times(f, -1)) for t, f in b.terms)
    guards, fits = _joined(a, b)
    base = emitter.plus(a.base, b.base, sign)
    return Linear(base, strides, a.terms + terms, guards, fits, a.pointer)


def _joined(a, b):
    return tuple(dict.fromkeys(a.guards + b.guards)), tuple(dict.fromkeys(a.fits + b.fits))


def _multiply(emitter, form, factor):
    strides = tuple(emitter.times(stride, factor.base) for stride in form.strides)
    terms = tuple((term, emitter.times(f, factor.base)) for term, f in form.terms)
    guards, fits = _joined(form, factor)
    return Linear(emitter.times(form.base, factor.base), strides, terms, guards, fits)


def arithmetic(emitter, name, element, operands, shape):
    """The form of a result, or None."""
    if element not in ("i32", *_WIDE) or all(operand.linear is None for operand in operands):
        return None
    if not shape:
        return None  # a scalar's form is its variable
    a, b = (_form(operand, len(shape)) for operand in operands)
    if name == "arith.addi":
        return add(emitter, a, b)
    if name == "arith.subi":
        return add(emitter, a, b, "-")
    if name == "arith.muli" and (_uniform(a) or _uniform(b)):
        form = _multiply(emitter, a, b) if _uniform(b) else _multiply(emitter, b, a)
        return used(form, element) if element == "i32" else form
    if name in ("arith.remsi", "arith.divsi") and _uniform(b):
        return _divided(emitter, name, a, b, element, shape)
    return None


def _divided(emitter, name, a, b, element, shape):
    """A quotient or remainder of a form that stays between two multiples of the divisor."""
    if a.terms or not all(isinstance(stride, int) and stride >= 0 for stride in a.strides):
        return None
    span = sum(stride * (length - 1) for stride, length in zip(a.strides, shape, strict=False))
    part = emitter.variable("int64_t", "n")
    guard = emitter.variable("bool", "g")
    emitter.line(f"{part} = {b.base} ? (int64_t){a.base} % {b.base} : 0;")
    emitter.line(
        f"{guard} = {a.base} >= 0 && {b.base} > 0 && {part} + {span} < {b.base}"
        f" && fits{32 if element == 'i32' else 62}({a.base}, {a.base} + {span});"
    )
    guards = (*a.guards, *b.guards, guard)
    if name == "arith.remsi":
        return Linear(part, a.strides, (), guards, a.fits + b.fits)
    quotient = emitter.variable("int64_t", "n")
    emitter.line(f"{quotient} = {b.base} ? (int64_t){a.base} / {b.base} : 0;")
    return Linear(quotient, tuple(0 for _ in a.strides), (), guards, a.fits + b.fits)


def advance(emitter, pointer, offset, element, rank):
    """The form of a pointer plus an offset of so many elements, relative to its base pointer."""
    if pointer.linear is None:
        return None
    a, b = (_form(operand, rank) for operand in (pointer, offset))
    return add(emitter, a, used(b, element))


_BELOW = {  # predicate: (the smaller side first?, 1 where equality holds it as well)
    "slt": (True, 0),
    "sle": (True, 1),
    "sgt": (False, 0),
    "sge": (False, 1),
}


def bounds(emitter, predicate, operands, rank):
    """The forms that are below zero where the comparison holds, or None."""
    if predicate not in _BELOW or all(operand.linear is None for operand in operands):
        return None
    element = operands[0].element
    if element not in ("i32", *_WIDE):
        return None
    a, b = (used(_form(operand, rank), element) for operand in operands)
    first, equal = _BELOW[predicate]
    form = add(emitter, a, b, "-") if first else add(emitter, b, a, "-")
    return (replace(form, base=emitter.plus(form.base, equal, "-")),)


def of_variable(scalar):
    """The form of a scalar variable of integers or pointers."""
    if scalar.element.startswith("*"):
        return Linear(0, (), pointer=scalar.text)
    return Linear(scalar.text, ()) if scalar.element in ("i32", *_WIDE) else None
