"""TTIR's types of elements in C++."""

C_TYPES = {
    "i1": "bool",
    "i8": "int8_t",
    "i16": "int16_t",
    "i32": "int32_t",
    "i64": "int64_t",
    "index": "int64_t",
    "f16": "f16",
    "bf16": "bf16",
    "f32": "float",
    "f64": "double",
    "f8E4M3FN": "f8e4m3fn",
    "f8E5M2": "f8e5m2",
    "f8E4M3FNUZ": "f8e4m3fnuz",
    "f8E5M2FNUZ": "f8e5m2fnuz",
}
SIZES = {"i1": 1, "i8": 1, "i16": 2, "f16": 2, "bf16": 2, "i32": 4, "f32": 4}


def c_type(element):
    if element.startswith("*"):
        return c_type(element[1:]) + " *"
    if element not in C_TYPES:
        raise NotImplementedError(f"type {element}")
    return C_TYPES[element]


def size_of(element):
    return 1 if element.startswith("f8") else SIZES.get(element, 8)


def is_float(element):
    return element.startswith(("f", "bf"))


def is_integer(element):
    return element.startswith("i")


def literal(text):
    """A string in C++."""
    plain = (
        chr(byte) if 32 <= byte < 127 and byte not in b'\\"' else None for byte in text.encode()
    )
    octal = (f"\\{byte:03o}" for byte in text.encode())
    return '"' + "".join(letter or code for letter, code in zip(plain, octal, strict=False)) + '"'
