"""Reports as pages of HTML: each is one file that needs no other, and no network."""

import functools
import itertools
import linecache
import os
import re
from typing import NamedTuple

import torch

from .. import _messages, _svg
from . import _pictures
from ._advice import notes

_AROUND = 3  # lines of source above and below one that is shown


class Outcome(NamedTuple):
    """What a program or a test does under some schedules."""

    schedules: str
    """``"early"``, ``"0, 2, 9"``."""
    ending: str
    """``"passes"``, ``"exit status 1 (ValueError: ...)"``."""
    output: str = ""
    command: str = ""
    """Repeats it, pasted into a shell."""


class Page(NamedTuple):
    """What was found in a program or in a test."""

    title: str
    reports: tuple = ()  # of Report
    outcomes: tuple[Outcome, ...] = ()
    """The first is what the others are compared with."""
    command: str = ""
    """Repeats it, pasted into a shell."""
    text: str = ""
    """Other output, such as a test's failure."""

    def mistakes(self):
        """Returns the first report of each mistake, with the others: a list of pairs."""
        found = {}
        for report in self.reports:
            found.setdefault(report.mistake, []).append(report)
        return [(first, others) for first, *others in found.values()]


# ---- source ----


class Row(NamedTuple):
    """A line of source; without a number it is a line to add."""

    number: int | None
    text: str
    letters: str = ""
    """The accesses that the line makes: ``"A"`` is the earlier one, ``"B"`` the later one."""
    kind: str = "kept"
    """``"kept"``, ``"replaced"`` or ``"added"``."""


class Excerpt(NamedTuple):
    """Lines of a file."""

    filename: str
    rows: tuple[Row, ...]


def _shown_lines(report):
    """(filename, line) of the accesses and of the help."""
    lines = [side.line[:2] for side in (report.earlier, report.later) if side.line]
    return lines + [(help.filename, help.line) for help in report.help]


def _ranges(lines):
    """Merges lines into ranges with what is around each."""
    ranges = []
    for line in sorted(lines):
        if ranges and line - _AROUND <= ranges[-1].stop:
            ranges[-1] = range(ranges[-1].start, line + _AROUND + 1)
        else:
            ranges.append(range(max(1, line - _AROUND), line + _AROUND + 1))
    return ranges


def _rows(report, filename, number, text):
    """The row of a line, with the lines that the help adds there."""
    sides = (("A", report.earlier), ("B", report.later))
    here = (filename, number)
    letters = "".join(letter for letter, side in sides if side.line and side.line[:2] == here)
    kind, added = "kept", {"before": [], "after": []}
    indent = text[: len(text) - len(text.lstrip())]
    for help in report.help:
        if (help.filename, help.line) == here:
            kind = "replaced" if help.where == "in place of" else kind
            lines = [Row(None, indent + line, kind="added") for line in help.code.splitlines()]
            added["before" if help.where == "before" else "after"] += lines
    return [*added["before"], Row(number, text, letters, kind), *added["after"]]


def excerpts(report):
    """The source around both accesses, with the help in its place: a list of Excerpt."""
    files = {}
    for filename, line in _shown_lines(report):
        files.setdefault(filename, set()).add(line)
    found = []
    for filename, numbers in files.items():
        linecache.checkcache(filename)
        lines = linecache.getlines(filename)
        for shown in _ranges(numbers):
            source = enumerate(lines[shown.start - 1 : shown.stop - 1], shown.start)
            rows = (_rows(report, filename, n, line.rstrip().expandtabs(4)) for n, line in source)
            found.append(Excerpt(filename, tuple(itertools.chain.from_iterable(rows))))
    return found


# ---- pages ----


def _pairs(reports):
    """The operators of reports, each pair once, with how often."""
    names = [f"{report.earlier.operator} and {report.later.operator}" for report in reports]
    return [f"{name} ({names.count(name)} times)" for name in dict.fromkeys(names)]


def _compared(outcome, outcomes):
    """(whether it is not a line of the first outcome, line) of each line of the output."""
    expected = outcomes[0].output.splitlines()
    for line, other in itertools.zip_longest(outcome.output.splitlines(), expected):
        if line is not None:
            yield line != other, line


@functools.cache
def _template():
    import jinja2  # with PyTorch, which needs it for its own

    from ..._build_info import VERSION

    loader = jinja2.FileSystemLoader(os.path.dirname(__file__))
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=loader,
        undefined=jinja2.StrictUndefined,
    )
    markup = jinja2.utils.markupsafe.Markup
    environment.globals.update(
        drawing=lambda report, anchor: markup(_pictures.drawing(report, anchor)),
        excerpts=excerpts,
        notes=notes,
        place=_messages.place,
        shown=_messages.short_path,
        pairs=_pairs,
        compared=_compared,
        variables=lambda colours: ";".join(f"--{k}:{colour}" for k, colour in colours.items()),
        light=_svg.LIGHT,
        dark=_svg.DARK,
        style=markup(_svg.STYLE),
        heads=markup(_svg.HEADS),
        version=VERSION,
        torch_version=torch.__version__,
    )
    return environment.get_template("_page.html")


def _write(path, title, entries, pages):
    page = _template().render(title=title, entries=entries, pages=pages)
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(page + "\n")


def _file_name(number, title):
    words = re.sub(r"[^A-Za-z0-9]+", "-", title).strip("-")
    return f"{number}-{words[:80]}.html"


def save(path, pages, title):
    """Writes pages: to one file whose name ends in ``.html``, or to a folder, each to its own file
    beside an ``index.html``."""
    path = os.fspath(path)
    if path.endswith(".html"):
        _write(path, title, [(f"#page{n}", page) for n, page in enumerate(pages, 1)], pages)
        return
    entries = [(_file_name(n, page.title), page) for n, page in enumerate(pages, 1)]
    save_index(path, title, entries)
    for name, page in entries:
        _write(os.path.join(path, name), page.title, [(name, page)], [page])


def save_index(path, title, entries):
    """Writes the ``index.html`` of a folder, whose files are named by the (name, Page) pairs."""
    os.makedirs(path, exist_ok=True)
    _write(os.path.join(path, "index.html"), title, entries, [])


def save_reports(path, reports):
    """Writes reports, as save() does, each mistake to a page."""
    pages = [Page(first.title, (first, *others)) for first, others in Page("", reports).mistakes()]
    count = len(pages)
    title = pages[0].title if count == 1 else f"{count} mistakes in {len(reports)} reports"
    save(path, pages, title)
