"""Checks the models of the core's waits, queue and dispatcher: `make model`.

Each model in tests/model is run as it is, which must find nothing, and once with each fault
that its head lists as "PLANT n: ...", which must be found: a model that cannot fail shows nothing.
Models in Promela need the package spin, those in C++ relacy-dev. What is missing is left out, in a
line.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

MODELS = Path("tests/model")
RELACY = Path("/usr/include/relacy/relacy.hpp")


def plants_of(path):
    """(number, program or "", text) of each fault."""
    form = re.compile(r"^ \* PLANT (\d+)(?: \(PROGRAM (\d+)\))?: (.*)$", re.MULTILINE)
    return form.findall(path.read_text())


def programs_of(path):
    return re.findall(r"^ \* PROGRAM (\d+): ", path.read_text(), re.MULTILINE)


def run(command, **options):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)


def built(command, **options):
    done = run(command, **options)
    if done.returncode:
        sys.exit(f"{shlex.join(map(str, command))}\n{done.stdout.decode()}")


def search(path, folder, program, plant):
    """Whether Spin finds a fault in one program of a model."""
    defines = [f"-DPROGRAM={program}", f"-DPLANT={plant}"]
    built(["spin", "-a", *defines, path.resolve()], cwd=folder)
    compiler = shlex.split(os.environ.get("CC", "cc"))
    # A model that is as it should be is searched in whole, a fault is found at once.
    level = "-O2" if plant == "0" else "-O0"
    built([*compiler, level, "-w", "-DSAFETY", "-o", "pan", "pan.c"], cwd=folder)
    text = run(["./pan", "-m100000"], cwd=folder).stdout.decode()
    errors = re.search(r"errors: (\d+)", text)
    if not errors or "max search depth too small" in text:
        sys.exit(text)
    return errors.group(1) != "0"


def promela(path, folder):
    """A function that returns whether a plant is found, in one program or in any."""

    def found(plant, program):
        programs = [program] if program else programs_of(path)
        return any(search(path, folder, program, plant) for program in programs)

    return found


def relacy(path, folder):
    program = folder / path.stem
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    built([*compiler, "-O1", "-w", path, "-o", program, "-pthread"])

    def found(plant, _):
        done = run([program, plant])
        if done.returncode not in (0, 1):
            sys.exit(done.stdout.decode())
        return done.returncode == 1

    return found


def check(path, kind):
    folder = Path("build/model") / path.name
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    found = kind(path, folder)
    plants = plants_of(path)
    if not plants:
        sys.exit(f"{path} plants no fault")
    if found("0", ""):
        sys.exit(f"{path}: a fault is found; {folder} has the program that shows it")
    for number, program, text in plants:
        if not found(number, program):
            sys.exit(f"{path}: PLANT {number} is not found: {text}")
    seconds = time.monotonic() - started
    print(f"{path}: no fault, and {len(plants)} planted ones found, in {seconds:.0f} s", flush=True)


def main():
    if shutil.which("spin"):
        for path in sorted(MODELS.glob("*.pml")):
            check(path, promela)
    else:
        print("left out: the models in Promela, for want of spin")
    if RELACY.exists():
        for path in sorted(MODELS.glob("*.cpp")):
            check(path, relacy)
    else:
        print("left out: the models in C++, for want of relacy-dev")


if __name__ == "__main__":
    main()
