"""Every public name has a docstring, which says what its arguments mean, what it raises and whether
it waits; and the reference has it."""

import ast
import inspect
import re
import textwrap
from pathlib import Path

import pytest
import torch

import torch_openreg
import torch_openreg.ppe

REFERENCE = Path(__file__).resolve().parents[2] / "docs/reference/python.rst"
MODULES = {
    "torch.openreg": torch.openreg,
    **{f"torch.openreg.{name}": getattr(torch.openreg, name) for name in torch.openreg.SUBMODULES},
    "torch_openreg.ppe": torch_openreg.ppe,
}
# Of those without a list of their own; what else is public there is in torch.openreg's.
LISTED = {
    "torch.openreg.testing": ["Exploration", "explore", "gate", "inject", "run_ranks", "schedule"],
    "torch.openreg.comm": [],  # PyTorch's own
    "torch.openreg.random": [],
    "torch.openreg.streams": [],
}
# What may keep the host waiting for a device.
WAITS = {
    "torch.openreg.synchronize",
    "torch.openreg.reset",
    "torch.openreg.empty_cache",
    "torch.openreg.Event",  # its synchronize() is PyTorch's
    "torch.openreg.testing.schedule",
    "torch.openreg.testing.explore",
    "torch_openreg.ppe.OpenRegRuntime.move_tensor",
    "torch_openreg.ppe.OpenRegRuntime.train_epoch_end",
    "torch_openreg.ppe.OpenRegRuntime.train_validation_end",
}


def members(owner, path):
    """Of a class: its own public methods and properties."""
    for name, value in vars(owner).items():
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
            yield f"{path}.{name}", value


def public():
    for path, module in MODULES.items():
        for name in LISTED.get(path, getattr(module, "__all__", ())):
            value = getattr(module, name)
            if inspect.ismodule(value):
                continue
            yield f"{path}.{name}", value
            if inspect.isclass(value):
                yield from members(value, f"{path}.{name}")


PUBLIC = dict(public())
CALLABLE = {path: v for path, v in PUBLIC.items() if inspect.isclass(v) or inspect.isfunction(v)}


def docstring(value):
    """Not one that is inherited from PyTorch."""
    return vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__


def parameters(value):
    """What it is called with; a class by its own constructor."""
    if inspect.isclass(value):
        own = vars(value).get("__new__") or vars(value).get("__init__")
        if not own or "_fields" in vars(value):  # of a named tuple, each with its docstring
            return []
        value = getattr(own, "__func__", own)
    return [name for name in inspect.signature(value).parameters if name not in ("self", "cls")]


def raised(value):
    """Exceptions that its own code raises by name."""
    if inspect.isclass(value):
        value = vars(value).get("__new__") or vars(value).get("__init__")
        value = getattr(value, "__func__", value)
    if not hasattr(value, "__code__") or value.__code__.co_filename.startswith("<"):
        return set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(value))))
    calls = (node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise))
    return {call.func.id for call in calls if isinstance(call, ast.Call)}


def test_public_names_are_found():
    assert len(PUBLIC) > 130 and PUBLIC.keys() >= WAITS


@pytest.mark.parametrize("path", PUBLIC)
def test_public_name_has_a_docstring(path):
    text = docstring(PUBLIC[path])
    assert text and text.strip()[-1] in ".`:)", path
    assert path not in WAITS or re.search(r"\b[Ww]ait|synchronis|does\.", text), text


@pytest.mark.parametrize("path", CALLABLE)
def test_docstring_describes_arguments_and_exceptions(path):
    value = CALLABLE[path]
    text = docstring(value)
    owner = PUBLIC.get(path.rpartition(".")[0])
    inherited = owner and any(hasattr(base, value.__name__) for base in owner.__mro__[1:])
    for name in [] if inherited and path.startswith("torch_openreg.") else parameters(value):
        assert re.search(rf"`{name}`|^\s+{name}: ", text, re.MULTILINE), f"{path}: {name}"
    for name in raised(value):
        assert name in text, f"{path}: {name}"


def test_reference_has_every_public_name():
    text = REFERENCE.read_text()
    module, described = None, set()
    for kind, name in re.findall(r"^ *\.\. (currentmodule|auto\w+):: ([\w.]+)", text, re.MULTILINE):
        if kind in ("currentmodule", "automodule"):
            module = name
        if kind == "automodule":
            described |= {path for path in PUBLIC if path.startswith(f"{name}.")}
        else:
            described.add(f"{module}.{name}")
    names, described = (
        {re.sub(r"\.(memory|graphs)\.", ".", path) for path in paths}
        for paths in (PUBLIC, described)
    )
    assert {name for name in names if name.rpartition(".")[0] in MODULES} - described == set()
