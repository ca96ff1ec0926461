"""The syntax trees of source files, and the statements around a line.

A file of thousands of lines takes a second to parse. For the statements around a line, the other
statements of the module, and the other methods of a class, are left out.
"""

import ast
import functools
import itertools
import linecache
import re

_FEW = 300  # lines, which are parsed whole
_CONTINUES = re.compile(r"[\s#)\]}]|(?:else|elif|except|finally)\b|$")
_INDENT = re.compile(r"(\s+)[^\s#]")


def _lines(filename):
    """Empty without source."""
    if filename.startswith("<") and filename not in linecache.cache:
        return []
    return linecache.getlines(filename)


@functools.lru_cache(maxsize=64)
def _parsed(filename, count, parts):
    """The tree of these ranges of a file's `count` lines; None if they are no Python."""
    lines, kept = linecache.getlines(filename), ["\n"] * count
    for first, end in parts:
        kept[first:end] = lines[first:end]
    try:
        return ast.parse("".join(kept))
    except (SyntaxError, ValueError):
        return None


def tree(filename):
    """Of a whole file; None: there is no source."""
    count = len(_lines(filename))
    return _parsed(filename, count, ((0, count),)) if count else None


def _starts(lines, first, end, indent):
    """Where the statements of an indentation begin, those with decorators at the first of these."""
    before = ""
    for i in range(first, end):
        text = lines[i][len(indent) :]
        if lines[i].startswith(indent) and not _CONTINUES.match(text):
            if not before.startswith("@") and not lines[i - 1].endswith("\\\n"):
                yield i
            before = text


def _block(lines, at, first, end, indent):
    """(start, end) of the statement of an indentation that has line `at`; None: none has."""
    starts = [*_starts(lines, first, end, indent), end]
    return next((pair for pair in itertools.pairwise(starts) if pair[0] <= at < pair[1]), None)


def _parts(lines, at, first, end, indent=""):
    """The ranges of lines that show the statements around line `at`, and their classes' heads."""
    block = _block(lines, at, first, end, indent)
    if block is None:
        return ((first, end),)
    heads = (i for i in range(*block) if lines[i].startswith(f"{indent}class "))
    head = next(heads, at)
    body = next((i + 1 for i in range(head, at) if lines[i].rstrip().endswith(":")), at)
    inner = next(filter(None, map(_INDENT.match, lines[body:at])), None)
    if inner is None:
        return (block,)
    return (block[0], body), *_parts(lines, at, body, block[1], inner[1])


def _covers(node, line):
    return node.lineno <= line <= node.end_lineno


def _descend(tree, line):
    path = []
    while tree is not None:
        inside = (n for n in ast.iter_child_nodes(tree) if isinstance(n, ast.stmt))
        handlers = (h for h in ast.iter_child_nodes(tree) if isinstance(h, ast.ExceptHandler))
        cases = (c for c in getattr(tree, "cases", ()))
        bodies = itertools.chain.from_iterable(b.body for b in (*handlers, *cases))
        tree = next((n for n in (*inside, *bodies) if _covers(n, line)), None)
        if tree is not None:
            path.append(tree)
    return path


def _is_in_text(node, line):
    """Whether a string of several lines has the line: it may look like statements, and what follows
    like a string."""
    texts = (part for part in ast.walk(node) if isinstance(part, ast.Constant))
    return any(text.lineno < text.end_lineno and _covers(text, line) for text in texts)


@functools.lru_cache(maxsize=256)
def _path(filename, count, line):
    if count > _FEW and line <= count:
        parts = _parts(linecache.getlines(filename), line - 1, 0, count)
        found = _descend(_parsed(filename, count, parts), line)
        if found and not _is_in_text(found[-1], line):
            return found
    return _descend(tree(filename), line)


def path(filename, line):
    """The statements around a line, the outermost first."""
    return _path(filename, len(_lines(filename)), line)
