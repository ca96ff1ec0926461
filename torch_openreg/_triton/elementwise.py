"""Operations on each element: arithmetic, comparisons, conversions and functions of libdevice."""

import re

from . import linear
from .expressions import Apply, Linear, Range, Scalar
from .libdevice import UNARY, counterpart
from .operations import operation
from .types import c_type, is_float, is_integer, size_of

_INFIX = {
    "arith.addf": "+",
    "arith.subf": "-",
    "arith.mulf": "*",
    "arith.divf": "/",
    "tt.precise_divf": "/",
    "tt.approx_divf": "/",
    "arith.andi": "&",
    "arith.ori": "|",
    "arith.xori": "^",
    "arith.addi": "+",
    "arith.subi": "-",
    "arith.muli": "*",
}
# Name: the function of numbers.h, and how many additions it costs.
_CALLS = {
    "arith.maxnumf": ("maxnum", 2),
    "arith.minnumf": ("minnum", 2),
    "arith.maximumf": ("maximum", 2),
    "arith.minimumf": ("minimum", 2),
    "arith.maxsi": ("larger", 1),
    "arith.minsi": ("smaller", 1),
    "arith.maxui": ("larger_unsigned", 1),
    "arith.minui": ("smaller_unsigned", 1),
    "arith.divsi": ("divide", 12),
    "arith.remsi": ("remainder", 12),
    "arith.divui": ("divide_unsigned", 12),
    "arith.remui": ("remainder_unsigned", 12),
    "arith.ceildivsi": ("divide_up", 14),
    "arith.floordivsi": ("divide_down", 14),
    "tt.mulhiui": ("high_unsigned", 3),
    "arith.shli": ("shift_left", 2),
    "arith.shrui": ("shift_right_unsigned", 2),
    "arith.shrsi": ("shift_right", 2),
    "math.absi": ("absolute", 1),
}
# These functions are computed in float, or in double for double.
_MATH = {
    "arith.remf": ("fmod", 20),
    "math.powf": ("pow", 30),
    "math.atan2": ("atan2", 30),
    "math.copysign": ("copysign", 1),
    "math.absf": ("fabs", 1),
    "math.sqrt": ("sqrt", 4),
    "tt.precise_sqrt": ("sqrt", 4),
    "math.rsqrt": ("rsqrt", 6),
    "math.floor": ("floor", 1),
    "math.ceil": ("ceil", 1),
    "math.trunc": ("trunc", 1),
    "math.round": ("round", 2),
    "math.roundeven": ("rint", 1),
    "math.fma": ("fma", 1),
    **{f"math.{name}": (name, 12) for name in UNARY},
}
_ORDERED = {"oeq": "==", "ogt": ">", "oge": ">=", "olt": "<", "ole": "<="}
_UNORDERED = {"une": "==", "ugt": "<=", "uge": "<", "ult": ">=", "ule": ">"}  # their negations
_SIGNED = {"eq": "==", "ne": "!=", "slt": "<", "sle": "<=", "sgt": ">", "sge": ">="}
_UNSIGNED = {"ult": "<", "ule": "<=", "ugt": ">", "uge": ">="}


def operands_of(emitter, op):
    return [emitter.values[operand] for operand in op.operands]


def define(emitter, op, write, cost=1, element=None):
    """The result of an element-wise operation, whose C++ `write` gives."""
    result = op.results[0]
    return Apply(element or result.type.element, write, operands_of(emitter, op), cost)


def _shape(op):
    return op.operands[0].type.shape or ()


def _cast(element, text):
    if element == "i1":
        return f"(bool)(({text}) & 1)"
    return f"({c_type(element)})({text})"


@operation(*_INFIX)
def infix(emitter, op):
    element, sign = op.results[0].type.element, _INFIX[op.name]
    node = define(emitter, op, lambda a, b: _cast(element, f"{a} {sign} {b}"))
    node.linear = linear.arithmetic(emitter, op.name, element, node.children, _shape(op))
    if op.name == "arith.andi" and all(child.bounds for child in node.children):
        node.bounds = node.children[0].bounds + node.children[1].bounds
    emitter.define(op.results[0], node)


@operation(*_CALLS)
def call(emitter, op):
    name, cost = _CALLS[op.name]
    element = op.results[0].type.element
    node = define(emitter, op, lambda *a: _cast(element, f"{name}({', '.join(a)})"), cost)
    if len(node.children) == 2:
        node.linear = linear.arithmetic(emitter, op.name, element, node.children, _shape(op))
    emitter.define(op.results[0], node)


@operation(*_MATH)
def function(emitter, op):
    name, cost = _MATH[op.name]
    element = op.results[0].type.element
    emitter.define(op.results[0], define(emitter, op, _in_wide(name, element), cost))


def _in_wide(name, element):
    kind = c_type(element)
    return lambda *a: f"({kind})f_{name}({', '.join(f'(Wide<{kind}>){x}' for x in a)})"


@operation("arith.negf")
def negate(emitter, op):
    kind = c_type(op.results[0].type.element)
    emitter.define(op.results[0], define(emitter, op, lambda a: f"({kind})(-{a})"))


@operation("arith.mului_extended", "arith.mulsi_extended")
def multiply_extended(emitter, op):
    high = "high_unsigned" if "ui_" in op.name else "high_signed"
    element = op.results[0].type.element
    children = operands_of(emitter, op)
    writes = (lambda a, b: _cast(element, f"{a} * {b}"), lambda a, b: f"{high}({a}, {b})")
    for result, write in zip(op.results, writes, strict=False):
        emitter.define(result, Apply(element, write, children, 3))


@operation("arith.cmpf")
def compare_floats(emitter, op):
    predicate = op.text.split(",")[0].strip()
    if predicate in _ORDERED:
        write = lambda a, b: f"({a} {_ORDERED[predicate]} {b})"  # noqa: E731
    elif predicate in _UNORDERED:
        write = lambda a, b: f"(!({a} {_UNORDERED[predicate]} {b}))"  # noqa: E731
    else:
        write = {
            "one": lambda a, b: f"({a} < {b} || {a} > {b})",
            "ueq": lambda a, b: f"(!({a} < {b} || {a} > {b}))",
            "ord": lambda a, b: f"ordered({a}, {b})",
            "uno": lambda a, b: f"(!ordered({a}, {b}))",
            "true": lambda a, b: "true",
            "false": lambda a, b: "false",
        }[predicate]
    emitter.define(op.results[0], define(emitter, op, write))


@operation("arith.cmpi")
def compare_integers(emitter, op):
    predicate = op.text.split(",")[0].strip()
    if predicate in _SIGNED:
        write = lambda a, b: f"({a} {_SIGNED[predicate]} {b})"  # noqa: E731
    else:
        write = lambda a, b: f"(unsign({a}) {_UNSIGNED[predicate]} unsign({b}))"  # noqa: E731
    node = define(emitter, op, write)
    if op.results[0].type.is_tensor:
        node.bounds = linear.bounds(emitter, predicate, node.children, len(_shape(op)))
    emitter.define(op.results[0], node)


@operation("arith.select")
def select(emitter, op):
    kind = c_type(op.results[0].type.element)
    write = lambda c, a, b: f"({c} ? ({kind}){a} : ({kind}){b})"  # noqa: E731
    emitter.define(op.results[0], define(emitter, op, write))


@operation("tt.clampf")
def clamp(emitter, op):
    low, high = ("maximum", "minimum") if "all" in op.text else ("maxnum", "minnum")
    emitter.define(
        op.results[0], define(emitter, op, lambda x, a, b: f"{high}({low}({x}, {a}), {b})", 4)
    )


def _conversion(name, source, target):
    """The C++ of a conversion between two elements' types."""
    kind = c_type(target)
    if name in ("arith.bitcast", "tt.bitcast"):
        if target.startswith("*"):
            return lambda a: f"({kind}){a}"
        return lambda a: f"bits<{kind}>({a})"
    if name in ("arith.extui", "arith.uitofp", "arith.index_castui"):
        return lambda a: f"({kind})unsign({a})"
    if name == "arith.fptosi":
        return lambda a: f"to_integer<{kind}>({a})"
    if name == "arith.fptoui":
        return lambda a: f"to_unsigned<{kind}>({a})"
    if target == "i1":
        return lambda a: f"(bool)({a} & 1)"
    if source == "i1" and name in ("arith.extsi", "arith.sitofp"):
        return lambda a: f"({kind})-(int){a}"
    return lambda a: f"({kind})({a})"


@operation(
    *[
        "arith.extf",
        "arith.truncf",
        "arith.extsi",
        "arith.trunci",
        "arith.sitofp",
        "arith.fptosi",
        "arith.bitcast",
    ],
    *["arith.extui", "arith.uitofp", "arith.fptoui", "arith.index_cast", "arith.index_castui"],
    *["tt.bitcast", "tt.fp_to_fp"],
)
def convert(emitter, op):
    source, target = op.operands[0].type.element, op.results[0].type.element
    cost = 8 if source.startswith("f8") or target.startswith("f8") else 1
    write = _conversion(op.name, source, target)
    if op.name == "tt.fp_to_fp" and "rtz" in op.text:
        if source == "f64" or target not in ("f16", "bf16", "f8E5M2", "f8E4M3FN"):
            raise NotImplementedError(f"tt.fp_to_fp of {source} to {target} towards zero")
        write, cost = lambda a: f"towards_zero<{c_type(target)}>((float){a})", cost + 4
    node = define(emitter, op, write, cost)
    form = node.children[0].linear
    if form is not None and op.results[0].type.is_tensor:
        if op.name in ("arith.extsi", "arith.index_cast") and source in ("i32", "index"):
            node.linear = linear.used(form, source)
        elif (op.name == "arith.trunci" and target == "i32") or (
            target.startswith("*") and size_of(source[1:]) == size_of(target[1:])
        ):
            node.linear = form
    emitter.define(op.results[0], node)


@operation("tt.extern_elementwise")
def libdevice(emitter, op):
    write = counterpart(op.string("symbol"), op.results[0].type.element)
    emitter.define(op.results[0], define(emitter, op, write, 12))


@operation("arith.constant")
def constant(emitter, op):
    kind = op.results[0].type
    body = re.sub(r"^dense<(.*)>$", r"\1", op.text)
    if body.startswith(("[", '"')):
        raise NotImplementedError("a constant tensor of different elements")
    scalar = Scalar(kind.element, _literal(body, kind.element))
    rank = len(kind.shape or ())
    if is_integer(kind.element) and kind.element != "i1":
        scalar.linear = Linear(int(body, 0), (0,) * rank)
    if kind.element == "i1" and body in ("true", "1", "-1"):
        scalar.bounds = (Linear(-1, (0,) * rank),)
    emitter.values[op.results[0]] = scalar


@operation("ub.poison")
def poison(emitter, op):
    """The result of a function that ends without `return`. Any value is right, so it is zero."""
    kind = op.results[0].type
    zero = f"({c_type(kind.element)})0" if kind.element[0] == "*" else _literal("0", kind.element)
    make = Scalar if kind.is_tensor else emitter.scalar
    emitter.values[op.results[0]] = make(kind.element, zero)


def _literal(body, element):
    kind = c_type(element)
    if is_float(element):
        if body.startswith("0x"):
            width = {1: "uint8_t", 2: "uint16_t", 4: "uint32_t", 8: "uint64_t"}
            size = (len(body) - 2) // 2
            return f"bits<{kind}>(({width[size]}){body}u)"
        return f"({kind}){float(body)!r}" + ("f" if element != "f64" else "")
    if element == "i1":
        return "true" if body in ("true", "1", "-1") else "false"
    number = int(body, 0)
    return "INT64_MIN" if number == -(2**63) else f"({kind}){number}ll"


@operation("tt.get_program_id", "tt.get_num_programs")
def program(emitter, op):
    axis = "xyz".index(op.text.split()[0])
    name = f"{'program' if op.name == 'tt.get_program_id' else 'programs'}[{axis}]"
    emitter.define(op.results[0], Apply("i32", lambda: name, ()))


@operation("tt.make_range")
def make_range(emitter, op):
    start = int(op.attributes["start"])
    node = Range("i32", start, (1,))
    node.linear = Linear(start, (1,))
    emitter.values[op.results[0]] = node
