"""Checks that each file of the shim includes only headers of its own folder and of lower ones.

includes.py CSRC: prints each include that is refused, and each base name that two sources share
(gdb finds a static variable by the base name of its file).
"""

import os.path
import re
import sys
from pathlib import Path

# By folder: the folders below it.
BELOW = {
    "torch": [],
    "task": ["torch"],
    "aten": ["torch", "task", "../torch_openreg/_triton"],  # what generated C++ includes, too
    "aten/ops": ["torch", "task", "aten"],
    "distributed": ["torch", "task"],
}


def includes(path):
    """The quoted includes of a file, relative to its folder."""
    return re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)


def faults(csrc):
    for folder, below in BELOW.items():
        for path in sorted(path for path in (csrc / folder).iterdir() if path.is_file()):
            for included in includes(path):
                header = os.path.normpath(f"{folder}/{included}")
                if not (csrc / header).is_file():
                    yield f"{folder}/{path.name} includes {included}, which does not exist"
                elif os.path.dirname(header) not in [folder, *below]:
                    yield f"{folder}/{path.name} includes {header}, which is not below it"
    seen = {}
    for path in sorted([*csrc.rglob("*.cpp"), *csrc.rglob("*.c")]):
        other = seen.setdefault(path.name, path)
        if other != path:
            yield f"{path.relative_to(csrc)} has the name of {other.relative_to(csrc)}"


if __name__ == "__main__":
    found = list(faults(Path(sys.argv[1])))
    for fault in found:
        print(f"{sys.argv[1]}/{fault}", file=sys.stderr)
    sys.exit(bool(found))
