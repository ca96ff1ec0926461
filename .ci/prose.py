"""Checks that the prose of Markdown files has at most 100 columns.

prose.py [--fix] FILE...: --fix wraps the paragraphs that are too wide. Tables, fenced blocks,
headings, images and lines of one word (an address) are exempt.
"""

import re
import sys
from pathlib import Path

COLUMNS = 100
LEAD = re.compile(r"\s*(?:(?:[-*+]|\d+\.) +)?")  # indentation, and the sign of a list's item
EXEMPT = re.compile(r"\s*(?:[|#<]|!\[|$)")
NO_BEGIN = re.compile(r"[-+*>=|#]+|\d+\.")  # at the begin of a line they would be signs


def paragraphs(lines):
    """(begin, end) of each, in numbers of lines."""
    fence, begin = False, None
    for i, line in enumerate([*lines, ""]):
        mark = line.lstrip().startswith("```")
        other = fence or mark or EXEMPT.match(line)
        if begin is not None and (other or LEAD.match(line)[0].strip()):
            yield begin, i
            begin = None
        if begin is None and not other:
            begin = i
        fence ^= mark


def too_wide(line):
    return len(line) > COLUMNS and " " in line[len(LEAD.match(line)[0]) :].strip()


def words(text):
    """Of a text; code between backquotes is one word."""
    open_code, found = False, []
    for word in text.split():
        if found and (open_code or NO_BEGIN.fullmatch(word)):
            found[-1] += f" {word}"
        else:
            found.append(word)
        open_code ^= word.count("`") % 2
    return found


def wrapped(lines):
    lead = LEAD.match(lines[0])[0]
    text = " ".join([lines[0][len(lead) :], *lines[1:]])
    line = lead
    for word in words(text):
        if line.strip() and line != lead and len(line) + 1 + len(word) > COLUMNS:
            yield line
            line = " " * len(lead)
        line += word if not line.strip() or line == lead else f" {word}"
    yield line


def main(fix, paths):
    status = 0
    for path in map(Path, paths):
        lines = path.read_text().splitlines()
        for begin, end in reversed([*paragraphs(lines)]):
            if any(map(too_wide, lines[begin:end])):
                if fix:
                    lines[begin:end] = wrapped(lines[begin:end])
                else:
                    status = 1
                    print(f"{path}:{begin + 1}: over {COLUMNS} columns (make format wraps it)")
        if fix:
            path.write_text("\n".join(lines) + "\n")
    return status


if __name__ == "__main__":
    arguments = sys.argv[1:]
    fix = arguments[:1] == ["--fix"]
    sys.exit(main(fix, arguments[fix:]))
