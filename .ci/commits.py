"""Checks the subjects of the commits that came after this file: `area: imperative`, 60 characters.

A merge has the subject that git gives it. Where there is no history, nothing is checked.
"""

import re
import subprocess
import sys
from pathlib import Path

SUBJECT = re.compile(r"[a-z_.]+(, [a-z_.]+)*: \S.*[^.]")


def git(*arguments):
    command = ["git", "-C", Path(__file__).parent, *arguments]
    return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()


def faults(subjects):
    return [s for s in subjects if len(s) > 60 or not SUBJECT.fullmatch(s)]


def main():
    added = git("log", "--format=%H", "--diff-filter=A", "--", Path(__file__).name)
    if not added:
        print("commits.py: no history here, no subject checked")
        return 0
    found = faults(git("log", "--no-merges", "--format=%s", f"{added[-1]}..HEAD"))
    for subject in found:
        print(f"a subject is not `area: imperative` within 60 characters: {subject}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
