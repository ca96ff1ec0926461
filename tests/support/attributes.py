"""Describes the attributes of PyTorch's modules and classes in text that two processes can compare.

    python attributes.py FILE [MODULES] [STEP ...]

writes {name: description} as JSON. MODULES is a file with names of modules to import first, or "-".
A step is done before: `use` imports what asks about devices, and uses one; `as_cuda` calls that.
"""

import contextlib
import functools
import importlib
import json
import sys
import types
import warnings

ASKING = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch._inductor.cudagraph_trees",
    "torch.distributed.tensor",
    "torch.nn.attention.flex_attention",
    "torch.testing._internal.common_device_type",
    "torch.utils._runtime_estimation",
    "torch.utils._triton",
    "torch.utils.cpp_extension",
)
PACKAGE = "torch_openreg"
OURS = (PACKAGE, "torch.openreg")
# Of each class or module, and of what is only what has been imported or asked for so far.
UNINTERESTING = {"__doc__", "__dict__", "__weakref__", "__annotations__", "__builtins__"}
UNINTERESTING |= {"__cached__", "__loader__", "__spec__", "__warningregistry__", "_abc_impl"}
BUILTIN = (
    types.BuiltinFunctionType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
)


def is_of_package(value):
    if isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, types.FunctionType):
        return f"/{PACKAGE}/" in value.__code__.co_filename
    kind = value if isinstance(value, type) else type(value)
    return str(kind.__module__).startswith(OURS)


def tables(value):
    if isinstance(value, dict):
        yield from ([*value.keys()], [*value.values()])
    elif isinstance(value, list | tuple | set | frozenset):
        yield list(value)


def entries(value):
    """Descriptions of what this package has put into a table, or into a table of an object."""
    found = [*tables(value)]
    if not found:
        with contextlib.suppress(Exception):
            found = [table for part in list(vars(value).values()) for table in tables(part)]
    return sorted({describe(entry) for table in found for entry in table if is_of_package(entry)})


def describe(value):
    if isinstance(value, classmethod | staticmethod | types.MethodType):
        return describe(value.__func__)
    if isinstance(value, types.FunctionType):
        code = value.__code__
        return f"{value.__qualname__} of {code.co_filename}:{code.co_firstlineno}"
    if isinstance(value, functools.partial):
        return f"partial {describe(value.func)}"
    if isinstance(value, property):
        return f"property {describe(value.fget)}"
    if isinstance(value, type):
        return f"class {value.__module__}.{value.__qualname__}"
    if isinstance(value, types.ModuleType):
        return "module"
    if isinstance(value, BUILTIN):
        return f"{type(value).__name__} {value.__qualname__}"
    if value is None or isinstance(value, bool) or hasattr(type(value), "__members__"):
        return repr(value)
    return " ".join([type(value).__qualname__, *([] if is_of_package(value) else entries(value))])


def members(cls, seen):
    module = str(cls.__module__)
    if cls in seen or module.startswith(OURS) or not f"{module}.".startswith("torch."):
        return
    seen.add(cls)
    for name, value in list(vars(cls).items()):
        if name not in UNINTERESTING:
            yield f"{cls.__module__}.{cls.__qualname__}.{name}", describe(value)
        if isinstance(value, type):
            yield from members(value, seen)


def attributes(modules):
    seen = set()
    for module in modules:
        for name, value in list(vars(sys.modules[module]).items()):
            if name not in UNINTERESTING:
                yield f"{module}.{name}", describe(value)
            if isinstance(value, type):
                yield from members(value, seen)


def imported():
    """PyTorch's modules, but for those whose attributes are what programs have asked for."""
    for name, module in sorted(sys.modules.items()):
        top, _, rest = name.partition(".")
        own = top == "torch" and rest.partition(".")[0] not in ("openreg", "ops", "_ops", "classes")
        if own and isinstance(module, types.ModuleType):
            yield name


def set_up(steps):
    import torch

    package = hasattr(torch, "openreg")
    if "as_cuda" in steps and package:
        importlib.import_module(PACKAGE).as_cuda()
    if "use" in steps:
        for name in ASKING:
            importlib.import_module(name)
        torch.ones(1, device="openreg" if package else "cpu")
        if package:
            importlib.import_module(f"{PACKAGE}._compile.inductor")


def main(out, known="-", *steps):
    warnings.simplefilter("ignore")  # of names that are deprecated
    set_up(steps)
    if known != "-":
        with open(known) as file:
            for name in json.load(file)["modules"]:
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
    modules = list(imported())
    with open(out, "w") as file:
        json.dump({"modules": modules, "attributes": dict(attributes(modules))}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
