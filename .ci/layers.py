"""Checks that each file of the core uses only its own layer and the layers below it.

layers.py SOURCES OBJECT...: a layer is a folder of SOURCES, and each of its C files has an object
LAYER/NAME.o. `#include` lines and the objects' symbols are read. No files may use each other in a
circle, but for those of CIRCLES.
"""

import re
import subprocess
import sys
from pathlib import Path

LAYERS = ("base", "device", "stream", "cache", "tools", "sanitizer")  # the lowest first
# Files that may use each other in a circle: the engine, and the caching allocator.
ENGINE = ("capture", "context", "event", "failure", "stream", "task", "worker")
ALLOCATOR = ("cache", "history", "ipc", "private_pool", "segment")
CIRCLES = ({f"stream/{name}.c" for name in ENGINE}, {f"cache/{name}.c" for name in ALLOCATOR})


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


def includes(sources):
    """(file, included file), of headers in layers."""
    for path in sorted(sources.glob("*/*.[ch]")):
        for name in re.findall(r'^#include "(\w+/\w+\.h)"', path.read_text(), re.MULTILINE):
            yield str(path.relative_to(sources)), name


def uses(objects):
    """(file, file that it uses a symbol of) -> the first such symbol."""
    found = {f"{path.parent.name}/{path.stem}.c": symbols(path) for path in objects}
    owner = {name: file for file, (defined, _) in found.items() for name in defined}
    return {
        (file, owner[name]): name
        for file, (_, used) in sorted(found.items())
        for name in sorted(used & owner.keys(), reverse=True)
        if owner[name] != file
    }


def name_of(file):
    """All files of one of CIRCLES count as one."""
    return next((min(files) for files in CIRCLES if file in files), file)


def circle(edges):
    """Files that use each other, each the next one; or nothing."""
    below = {}
    for file, other in sorted(edges):
        if file != other:
            below.setdefault(file, []).append(other)
    done = set()

    def visit(file, path):
        if file in path:
            return [*path[path.index(file) :], file]
        if file in done:
            return []
        found = next(filter(None, (visit(o, [*path, file]) for o in below.get(file, ()))), [])
        done.add(file)
        return found

    return next(filter(None, (visit(file, []) for file in below)), [])


def faults(sources, objects):
    files = {str(path.relative_to(sources)) for path in sources.rglob("*.c")}
    built = {f"{path.parent.name}/{path.stem}.c" for path in objects}
    for file in sorted(files ^ built):
        yield f"{file} has no object" if file in files else f"there is no {file}"
    level = {layer: number for number, layer in enumerate(LAYERS)}
    for file in sorted(files):
        if file.partition("/")[0] not in level:
            yield f"{file} is in no layer"
    symbols_used = uses(objects)
    arrows = [(file, other, f"includes {other}") for file, other in includes(sources)]
    arrows += [(f, other, f"uses {name} of {other}") for (f, other), name in symbols_used.items()]
    for file, other, text in arrows:
        layer, above = (level.get(name.partition("/")[0], -1) for name in (file, other))
        if 0 <= layer < above:
            yield f"{file} {text}, which is in a higher layer"
    if files := circle({(name_of(file), name_of(other)) for file, other in symbols_used}):
        yield f"files use each other: {' -> '.join(files)}"


if __name__ == "__main__":
    found = list(faults(Path(sys.argv[1]), [Path(path) for path in sys.argv[2:]]))
    for fault in found:
        print(f"{sys.argv[1]}: {fault}", file=sys.stderr)
    sys.exit(bool(found))
