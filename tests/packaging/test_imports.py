"""No module of the package imports one that imports it, at any place of its code."""

import ast
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPILED = {"torch_openreg._C", "torch_openreg._build_info"}


def modules():
    """{name: (file, the package that its relative imports start from)}"""
    for file in sorted((ROOT / "torch_openreg").rglob("*.py")):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        if file.stem == "__init__":
            yield name.removesuffix(".__init__"), (file, name.removesuffix(".__init__"))
        elif name not in COMPILED:
            yield name, (file, name.rpartition(".")[0])


def imported(file, package, known):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            for name in (f"{base}.{alias.name}" for alias in node.names):
                yield name if name in known else base


def test_modules_import_each_other_in_no_circle():
    known = dict(modules())
    graph = {
        name: {*imported(*found, {*known, *COMPILED})} & known.keys() - {name}
        for name, found in known.items()
    }
    assert len(graph) > 50 and graph["torch_openreg._run_seeds"] >= {"torch_openreg._run"}
    TopologicalSorter(graph).prepare()  # raises CycleError, with the circle
