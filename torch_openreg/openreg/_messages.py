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
import re
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
    """The lines of a paragraph, whose own indentation they have, too. A word longer than a line
    stays whole."""
    own = text[: len(text) - len(text.lstrip())]
    more = indent + own if more is None else more
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=more,
        break_long_words=False,
        break_on_hyphens=False,
    )


_CLAUSE = re.compile(r"[;:.,] ")


def sentence(text, beside=0):
    """The text of an error in lines, which end where a clause does, if one fits.

    Args:
        beside: the room that the first line leaves for what stands before it.
    """
    lines, indent = [], ""
    for line in text.split("\n"):
        while len(indent) + len(line) > WIDTH - beside:
            room = WIDTH - beside - len(indent)
            ends = [match.end() for match in _CLAUSE.finditer(line, room // 2, room + 1)]
            end = ends[-1] if ends else line.rfind(" ", 1, room + 1) + 1 or line.find(" ") + 1
            if not end:
                break
            lines.append(indent + line[:end].rstrip())
            line, indent, beside = line[end:].lstrip(), "  ", 0
        lines.append(indent + line)
        indent, beside = "", 0
    return "\n".join(lines)


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

    def lines(self, width=0):
        """`width` is that of the labels."""
        width = max(width, len(self.label))
        beside = width <= _BESIDE
        indent = " " * (width + 5 if beside else 6)
        source = self._source(len(indent))
        head = f"  {self.label.ljust(width if beside else 0)}"
        if beside and source:
            head += f"   {source.pop(0)}"
        yield head.rstrip()
        for line in source:
            yield f"{indent}{line}"
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


_LABEL = re.compile(r"^  (\S+:\d+|\(line not recorded\))(?=   |$)", re.MULTILINE)
_UNDERLINE = re.compile(r"^( +)(\^+)$", re.MULTILINE)
_TITLE = re.compile(r"^(\w+: )(.*)")


def paint(text):
    """A message with a terminal's codes for colours."""
    text = _LABEL.sub(rf"  {_CYAN}\1{_END}", text)
    text = _UNDERLINE.sub(rf"\1{_RED}\2{_END}", text)
    return _TITLE.sub(rf"{_RED}\1{_END}{_BOLD}\2{_END}", text)


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
    lines = wrap(head + title, "", "    ")
    if places:
        lines.append("")
    width = max((len(at.label) for at in places), default=0)
    for at in places:
        lines += at.lines(width)
    if paragraphs or helps:
        lines.append("")
    for paragraph in paragraphs:
        lines += wrap(paragraph)
    lines += help_text(helps)
    text = "\n".join(lines)
    return paint(text) if colour else text
