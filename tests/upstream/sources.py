"""Which tests there are: a tree of PyTorch's, its files, and a list of their tests that is kept."""

import collections
import fnmatch
import glob
import hashlib
import json
import os
import random
import subprocess
import sys

from .pool import Share

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.path.join(ROOT, "build", "upstream")
ARCHIVE = os.path.join(os.path.dirname(ROOT), "shared", "upstream", "pytorch-2.6-tests.tar.xz")
HOW = """\
There are no tests of PyTorch's to run. Get a source tree and name it:
  git clone --depth 1 --branch v2.6.0 https://github.com/pytorch/pytorch build/pytorch
  make upstream PYTORCH_SOURCE=build/pytorch"""
MADE_BY = ("\ninstantiate_device_type_tests(", "copy_tests(")  # of a file with tests for devices
# A compiler's tests take hours: they run where they are asked for.
LEFT_OUT = ("inductor/*", "dynamo/*")


def find_tree(named):
    """The folder `test`; None if there is no tree."""
    if named:
        tree = os.path.join(os.path.abspath(named), "test")
        if not os.path.isdir(tree):
            sys.exit(f"PYTORCH_SOURCE={named}: there is no folder `test` in it")
        return tree
    if not os.path.exists(ARCHIVE):
        return None
    place = os.path.join(BUILD, os.path.basename(ARCHIVE).removesuffix(".tar.xz"))
    if not os.path.isdir(place):
        os.makedirs(place + ".part", exist_ok=True)
        subprocess.run(["tar", "xf", ARCHIVE, "-C", place + ".part"], check=True)
        os.rename(place + ".part", place)
    return os.path.join(place, "test")


def files_of(tree, patterns):
    """Those that make classes for devices; without patterns all but LEFT_OUT."""
    found = []
    for path in sorted(glob.glob(os.path.join(tree, "**", "test_*.py"), recursive=True)):
        with open(path, encoding="utf-8") as file:
            text = file.read()
            if any(mark in text for mark in MADE_BY):
                found.append(os.path.relpath(path, tree))
    if not patterns:
        return [f for f in found if not any(fnmatch.fnmatch(f, p) for p in LEFT_OUT)]
    for pattern in patterns:
        if not fnmatch.filter(found, pattern):
            sys.exit(f"FILES={pattern}: no such file with tests for devices in {tree}")
    return [f for f in found if any(fnmatch.fnmatch(f, p) for p in patterns)]


def _digest(*paths):
    digest = hashlib.sha1()
    for path in paths:
        with open(path, "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()[:12]


def build_of_package():
    """Changes with every change of what is tested."""
    package = os.path.join(ROOT, "torch_openreg")
    paths = glob.glob(os.path.join(package, "**", "*"), recursive=True)
    return _digest(*sorted(p for p in paths if p.endswith((".py", ".so", ".so.0"))))


def catalogue(tree, files, pool, place):
    """{file: {test: function}} of all that is known, and {file: why it cannot be imported}."""
    here = os.path.dirname(os.path.abspath(__file__))
    stamps = {f: _digest(os.path.join(tree, f), os.path.join(here, "shims.py")) for f in files}
    known = {}
    if os.path.exists(place):
        with open(place) as file:
            known = json.load(file)
    lost = {}
    for file in files:
        if known.get(file, {}).get("stamp") != stamps[file]:
            known.pop(file, None)
            pool.submit(Share("list", file))
    for share, (what, *rest) in pool.events():
        if what == "list":
            known[share.file] = {"stamp": stamps[share.file], "tests": rest[0]}
        elif what == "lost":
            lost[share.file] = rest[0]
    with open(place, "w") as file:
        json.dump(known, file)
    return {file: entry["tests"] for file, entry in sorted(known.items())}, lost


def sample(tests, count, seed):
    """Each function once before any twice, as one may have a thousand times another's tests, and
    spread evenly over the files. A greater sample of the same seed contains the smaller."""
    order = []
    for file in sorted(tests):
        names = sorted(tests[file])
        random.Random(f"{seed} {file}").shuffle(names)
        seen = collections.Counter()
        turns = {}  # of each test among those of its function
        for name in names:
            turns[name] = seen[tests[file][name]]
            seen[tests[file][name]] += 1
        ordered = enumerate(sorted(names, key=turns.get))
        order += [(turns[name], place, file, name) for place, name in ordered]
    chosen = {file: {} for file in tests}
    for _, _, file, name in sorted(order)[:count]:
        chosen[file][name] = tests[file][name]
    return {file: names for file, names in chosen.items() if names}


def key(tree, version):
    """Names what is kept of this tree under this PyTorch."""
    folder = os.path.basename(os.path.dirname(tree))
    return f"{folder}-{version}-{hashlib.sha1(tree.encode()).hexdigest()[:6]}"
