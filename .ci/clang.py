"""Checks that clang takes the shim: every C++ file, or as many as fit into the seconds that are
given, beginning with another one each day. Nothing is made.

`make clang` runs it after the C tests. compile_commands.json says how each file is compiled.
"""

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor


def check(entry, compiler):
    """What clang says of a file, or nothing."""
    options = shlex.split(entry["command"])[1:]
    kept = options[: options.index("-MMD")] if "-MMD" in options else options
    command = [compiler, *kept, "-fsyntax-only", entry["file"]]
    done = subprocess.run(command, cwd=entry["directory"], capture_output=True, text=True)
    return done.stderr if done.returncode else ""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiler", default="clang++")
    parser.add_argument("--seconds", type=float, help="no file is begun later; default: all are")
    options = parser.parse_args()
    with open("compile_commands.json") as file:
        entries = [entry for entry in json.load(file) if entry["file"].endswith(".cpp")]
    first = datetime.date.today().toordinal() * 37 % len(entries) if options.seconds else 0
    end = time.monotonic() + options.seconds if options.seconds else float("inf")

    def judge(entry):
        return check(entry, options.compiler) if time.monotonic() < end else None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        said = list(pool.map(judge, entries[first:] + entries[:first]))
    seen = [text for text in said if text is not None]
    print(f"{options.compiler} takes {seen.count('')} of {len(seen)} files; {len(said)} are there")
    sys.exit("\n".join(filter(None, seen)) or 0)


if __name__ == "__main__":
    main()
