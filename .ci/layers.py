"""Checks that the core's files use only what is in their own layer or below it.

layers.py LAYERS OBJECT...: LAYERS lists the layers, the lowest first, and the files of each.
"""

import subprocess
import sys
from pathlib import Path


def read_layers(path):
    """The layer's number and name by file."""
    lines = [line for line in Path(path).read_text().splitlines() if line and line[0] != "#"]
    layers = [line.split(":") for line in lines]
    return {
        file: (number, name)
        for number, (name, files) in enumerate(layers)
        for file in files.split()
    }


def symbols(object_file):
    """What an object defines for others, and what it uses of others."""
    shown = subprocess.run(
        ["nm", "--extern-only", "--format=posix", object_file],
        check=True,
        capture_output=True,
        text=True,
    )
    kinds = [line.split()[:2] for line in shown.stdout.splitlines()]
    return {name for name, kind in kinds if kind != "U"}, {
        name for name, kind in kinds if kind == "U"
    }


def faults(layers, objects):
    found = {Path(path).stem: symbols(path) for path in objects}
    owner = {name: file for file, (defined, _) in found.items() for name in defined}
    for file in sorted(found.keys() ^ layers.keys()):
        yield f"{file}.c is in no layer" if file in found else f"there is no {file}.c"
    for file, (_, used) in sorted(found.items()):
        for name in sorted(used & owner.keys()):
            above = owner[name]
            if file in layers and above in layers and layers[above][0] > layers[file][0]:
                yield (
                    f"{file}.c ({layers[file][1]}) uses {name} of {above}.c ({layers[above][1]}), "
                    "which is in a higher layer"
                )


if __name__ == "__main__":
    found = list(faults(read_layers(sys.argv[1]), sys.argv[2:]))
    for fault in found:
        print(f"{sys.argv[1]}: {fault}", file=sys.stderr)
    sys.exit(bool(found))
