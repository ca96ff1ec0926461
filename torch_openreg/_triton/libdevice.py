"""Functions of libdevice in C++."""

import re

from .types import c_type

# Functions of one operand that Triton's own language has, too.
UNARY = (
    "exp",
    "exp2",
    "log",
    "log2",
    "log10",
    "log1p",
    "expm1",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "asinh",
    "acosh",
    "atanh",
    "tanh",
    "erf",
    "erfc",
    "cbrt",
)
_SAME = {
    *UNARY,
    "exp10",
    "sqrt",
    "rsqrt",
    "floor",
    "ceil",
    "trunc",
    "round",
    "rint",
    "fabs",
    "lgamma",
    "tgamma",
    "pow",
    "atan2",
    "fmod",
    "copysign",
    "nextafter",
    "fdim",
    "hypot",
    "remainder",
    "fma",
    "j0",
    "j1",
    "y0",
    "y1",
    "logb",
    "sinpi",
    "cospi",
}
_FLOAT_ALIASES = {
    "nearbyint": "rint",
    "fast_exp": "exp",
    "fast_exp10": "exp10",
    "fast_log": "log",
    "fast_log2": "log2",
    "fast_log10": "log10",
    "fast_sin": "sin",
    "fast_cos": "cos",
    "fast_tan": "tan",
    "fast_tanh": "tanh",
    "fast_pow": "pow",
}
_ROUNDED = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_OTHERS = {
    "fast_fdivide": "({0} / {1})",
    "mul24": "(({0} << 8 >> 8) * ({1} << 8 >> 8))",  # of the low 24 bits
    "umul24": "((unsign({0}) & 0xffffff) * (unsign({1}) & 0xffffff))",
    "hadd": "(((int64_t){0} + {1}) >> 1)",
    "rhadd": "(((int64_t){0} + {1} + 1) >> 1)",
    "uhadd": "(((int64_t)unsign({0}) + unsign({1})) >> 1)",
    "urhadd": "(((int64_t)unsign({0}) + unsign({1}) + 1) >> 1)",
    "norm3d": "f_hypot(f_hypot({0}, {1}), {2})",  # squares would overflow
    "norm4d": "f_hypot(f_hypot({0}, {1}), f_hypot({2}, {3}))",
    "rnorm3d": "(1 / f_hypot(f_hypot({0}, {1}), {2}))",
    "rnorm4d": "(1 / f_hypot(f_hypot({0}, {1}), f_hypot({2}, {3})))",
    "isnan": "({0} != {0})",
    "isinf": "(bool)__builtin_isinf({0})",
    "finite": "(bool)__builtin_isfinite({0})",
    "isfinited": "(bool)__builtin_isfinite({0})",
    "signbit": "(bool)__builtin_signbit({0})",
    "saturate": "minnum(maxnum({0}, 0.0f), 1.0f)",
    "fmax": "maxnum({0}, {1})",
    "fmin": "minnum({0}, {1})",
    "ldexp": "__builtin_ldexp({0}, {1})",
    "scalbn": "__builtin_ldexp({0}, {1})",
    "ilogb": "__builtin_ilogb({0})",
    "powi": "__builtin_powi({0}, {1})",
    "exp10": "__builtin_exp10({0})",
    "normcdf": "(0.5 * f_erfc({0} * -0.70710678118654752440))",
    "rcbrt": "(1 / f_cbrt({0}))",
    "rhypot": "(1 / f_hypot({0}, {1}))",
    "abs": "absolute({0})",
    "llabs": "absolute({0})",
    "max": "larger({0}, {1})",
    "min": "smaller({0}, {1})",
    "llmax": "larger({0}, {1})",
    "llmin": "smaller({0}, {1})",
    "umax": "larger_unsigned({0}, {1})",
    "umin": "smaller_unsigned({0}, {1})",
    "mulhi": "high_signed({0}, {1})",
    "umulhi": "high_unsigned({0}, {1})",
    "mul64hi": "high_signed({0}, {1})",
    "umul64hi": "high_unsigned({0}, {1})",
    "ffs": "__builtin_ffs({0})",
    "ffsll": "__builtin_ffsll({0})",
    "clz": "({0} ? __builtin_clz({0}) : 32)",
    "clzll": "({0} ? __builtin_clzll({0}) : 64)",
    "popc": "__builtin_popcount({0})",
    "popcll": "__builtin_popcountll({0})",
    "brev": "reversed({0})",
    "brevll": "reversed({0})",
    "llrint": "to_integer<int64_t>(__builtin_rint({0}))",
    "llround": "to_integer<int64_t>(__builtin_round({0}))",
    "float_as_int": "bits<int32_t>({0})",
    "float_as_uint": "bits<int32_t>({0})",
    "int_as_float": "bits<float>({0})",
    "uint_as_float": "bits<float>({0})",
    "double_as_longlong": "bits<int64_t>({0})",
    "longlong_as_double": "bits<double>({0})",
}
_ROUNDINGS = {"rn": "rint", "rz": "trunc", "rd": "floor", "ru": "ceil"}
_TYPES = {"int": "int32_t", "uint": "int32_t", "ll": "int64_t", "ull": "int64_t"}


def counterpart(symbol, element):
    """What writes the C++ of a call: a function of the operands' texts."""
    name, kind = re.sub(r"^__nv_", "", symbol), c_type(element)
    rounding = re.fullmatch(r"[fd]?(add|sub|mul|div|sqrt|rsqrt|rcp|fma)f?_rn", name)
    if rounding and rounding[1] in _ROUNDED:
        return lambda a, b: f"({a} {_ROUNDED[rounding[1]]} {b})"
    if rounding and rounding[1] == "rcp":
        return lambda a: f"(1 / {a})"
    if rounding:
        return lambda *a: f"f_{rounding[1]}({', '.join(a)})"
    whole = re.fullmatch(r"(?:float|double)2(u?int|u?ll)_(rn|rz|rd|ru)", name)
    if whole:
        to = "unsigned" if whole[1].startswith("u") else "integer"
        return lambda a: f"to_{to}<{_TYPES[whole[1]]}>(f_{_ROUNDINGS[whole[2]]}({a}))"
    if re.fullmatch(r"(int|ll)2(float|double)_rn|int2double(_rn)?|double2float_rn", name):
        return lambda a: f"({kind}){a}"
    if re.fullmatch(r"(uint|ull)2(float|double)_rn|uint2double", name):
        return lambda a: f"({kind})unsign({a})"
    for base in (name, name[:-1] if name.endswith(("f", "d")) else name):
        if base in _OTHERS:
            return lambda *a: f"({kind}){_OTHERS[base].format(*a)}"
        if base in _SAME or base in _FLOAT_ALIASES:
            function = _FLOAT_ALIASES.get(base, base)
            return lambda *a: f"f_{function}({', '.join(a)})"
    raise NotImplementedError(f"function {symbol} of libdevice, which has no counterpart here")
