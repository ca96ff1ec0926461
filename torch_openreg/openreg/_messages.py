"""How messages of more than one line look: a title, places of the program with their source, what
happens there, and what to do.

::

    error: data race on openreg:0 over x, 4000 bytes of float32

      scale.py:3   x = torch.ones(1000, device="openreg")
                   the default stream writes x (fill_)
      scale.py:6   x *= 5
                   stream side, made at scale.py:4, writes x (mul_)

      Nothing orders the second after the first.
      help: before scale.py:5 add
                side.wait_stream(torch.accelerator.current_stream())
"""

import linecache
import os
import textwrap

WIDTH = 100
_PATH = 80  # of a file
_BESIDE = 40  # of a place in front of its source; one that is longer is above it
_BOLD, _RED, _CYAN, _END = "\033[1m", "\033[1;31m", "\033[36m", "\033[0m"


def wants_colour(stream):
    """Whether text for `stream` is coloured: NO_COLOR and FORCE_COLOR decide, else whether it is a
    terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return bool(stream) and stream.isatty() and os.environ.get("TERM") != "dumb"


def short_path(filename, width=_PATH):
    """The path from the current folder if the file is below it; else its last parts."""
    folder = os.getcwd() + os.sep
    path = filename.removeprefix(folder)
    while len(path) > width and os.sep in path.removeprefix("..." + os.sep):
        rest = path.removeprefix("..." + os.sep).partition(os.sep)[2]
        path = f"...{os.sep}{rest}"
    return path


def size(count, unit="B"):
    """``3.906 KiB``; below 1 KiB it has the unit."""
    for name in (unit, "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {name}"
        count /= 1024
    return f"{count:.4g} GiB"


def place(filename, line):
    """``scale.py:3``"""
    return f"{short_path(filename)}:{line}"


def wrap(text, indent="  ", more=None):
    """The lines of a paragraph. A word longer than a line stays whole."""
    more = indent if more is None else more
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=more,
        break_long_words=False,
        break_on_hyphens=False,
    )


class Place:
    """A line of the program, and what happens there.

    Args:
        frame: a Frame, or None where it is not known.
        notes: paragraphs below the line.
    """

    def __init__(self, frame, *notes):
        self.frame = frame
        self.notes = notes
        self.label = place(frame.filename, frame.line) if frame else "(line not recorded)"

    def lines(self, width, colour):
        """`width` is that of the labels."""
        beside = width <= _BESIDE
        indent = " " * (width + 5 if beside else 6)
        source = self._source(len(indent))
        head = f"  {_paint(self.label.ljust(width if beside else 0), _CYAN, colour)}"
        if beside and source:
            head += f"   {source.pop(0)}"
        yield head.rstrip()
        for line in source:
            yield f"{indent}{_paint(line, _RED, colour and set(line) <= set('^ '))}"
        for note in self.notes:
            yield from wrap(note, indent)

    def _source(self, indent):
        """The line, and its underline; or the line in pieces."""
        if self.frame is None:
            return []
        raw = linecache.getline(self.frame.filename, self.frame.line).rstrip()
        source = raw.strip()
        if len(source) + indent > WIDTH:
            return textwrap.wrap(source, WIDTH - indent, break_on_hyphens=False)
        marks = self._underline(raw)
        return [source, marks] if marks else [source]

    def _underline(self, raw):
        """ "" for the whole line."""
        if self.frame.columns is None:
            return ""
        end_line, first, last = self.frame.columns
        # Python counts bytes.
        data = raw.encode()
        start = len(data[:first].decode(errors="ignore"))
        end = len(data[:last].decode(errors="ignore")) if end_line == self.frame.line else len(raw)
        cut = len(raw) - len(raw.lstrip())
        if end <= start or (start <= cut and end == len(raw)):
            return ""
        return " " * (start - cut) + "^" * (end - start)


def _paint(text, code, colour):
    return f"{code}{text}{_END}" if colour else text


def help_text(helps):
    """The paragraphs of lines to paste. Of several, one is enough."""
    for number, group in enumerate(helps):
        for part, help in enumerate(group):
            word = ("help" if number == 0 else "or") if part == 0 else "and"
            verb = "put" if help.where == "in place of" else "add"
            yield f"  {word}: {help.where} {place(help.filename, help.line)} {verb}"
            yield from (f"            {line}" for line in help.code.splitlines())


def message(title, places=(), paragraphs=(), helps=(), kind="error", colour=False):
    """A message's text.

    Args:
        title: what is wrong. `kind`, such as "error", stands before it; "": nothing.
        places: Place each, in the order of time.
        paragraphs: what follows from them.
        helps: groups of Help; each group alone mends the program.
    """
    head = f"{kind}: " if kind else ""
    first, *rest = wrap(head + title, "", "    ")
    if colour and head:
        first = _paint(head, _RED, True) + _paint(first[len(head) :], _BOLD, True)
    lines = [first, *rest]
    if places:
        lines.append("")
    width = max((len(at.label) for at in places), default=0)
    for at in places:
        lines += at.lines(width, colour)
    if paragraphs or helps:
        lines.append("")
    for paragraph in paragraphs:
        lines += wrap(paragraph)
    lines += help_text(helps)
    return "\n".join(lines)
