"""Pictures of a race: streams as rows, time to the right, existing waits and the missing one."""

import linecache
import os
import textwrap
from typing import NamedTuple

from .. import _messages, _svg


class Edge(NamedTuple):
    """A wait: the work given to `source` until the moment `recorded` is over before the work given
    to `target` from `waited` on. A stream is its ``native_handle``; 0 is the host as a target, and
    a whole device as a source."""

    source: int
    target: int
    recorded: int
    waited: int


class Order(NamedTuple):
    """Moments of the two accesses, in the order of the calls, and the waits around them."""

    earlier: int = 0
    later: int = 0
    edges: tuple[Edge, ...] = ()
    names: tuple[tuple[int, str], ...] = ()
    """The streams of the waits."""


class _Row(NamedTuple):
    stream: int
    label: str


class _Picture:
    """Rows and columns, shared by the text and the drawing."""

    def __init__(self, report):
        self.sides = {"A": report.earlier, "B": report.later}
        self.edges = [edge for edge in report.order.edges if edge.source]
        self.rows = self._make_rows(report)
        self.index = {row.stream: i for i, row in enumerate(self.rows)}
        order = report.order
        moments = {order.earlier, order.later}
        for edge in self.edges:
            moments |= {edge.recorded, edge.waited}
        self.column = {moment: i for i, moment in enumerate(sorted(moments))}
        self.at = {
            "A": (self.index[report.earlier.stream or 0], self.column[order.earlier]),
            "B": (self.index[report.later.stream or 0], self.column[order.later]),
        }

    def _make_rows(self, report):
        labels = {side.stream or 0: side.who for side in self.sides.values()}
        names = dict(report.order.names)
        for edge in self.edges:
            for stream in (edge.source, edge.target):
                labels.setdefault(stream, names.get(stream, "the host"))
        return [_Row(stream, label) for stream, label in labels.items()]

    def points(self):
        """The ends of the waits: (row, column, number of the wait, whether it waits)."""
        for number, edge in enumerate(self.edges, 1):
            yield self.index[edge.source], self.column[edge.recorded], number, False
            yield self.index[edge.target], self.column[edge.waited], number, True


def _place(side):
    return _messages.place(*side.line[:2]) if side.line else "a line not recorded"


def _says(report, side):
    """What an access does, in a few words."""
    some = "some of " if side.some else ""
    return f"{side.does} {some}{report.subject.name or 'the memory'}"


def _legend(report, picture):
    """A line for each letter."""
    for letter, side in picture.sides.items():
        yield f"{letter}: {side.who} {_says(report, side)} ({_place(side)})"
    yield f"A ..> B is missing: {report.remedy}"


def text(report):
    """Returns the picture as text."""
    picture = _Picture(report)
    marks = {at: letter for letter, at in picture.at.items()}
    for row, column, number, waits in picture.points():
        marks[row, column] = f">{number}" if waits else f"{number}>"
    width = max(len(row.label) for row in picture.rows)
    lines = []
    for i, row in enumerate(picture.rows):
        cells = (marks.get((i, column), "") for column in range(len(picture.column)))
        lines.append(f"{row.label:<{width}}  {''.join(f'{cell:-^6}' for cell in cells)}")
    if picture.edges:
        lines.append("1> is recorded, >1 waits for it")
    for line in _legend(report, picture):
        lines += _messages.wrap(line, "", "  ")
    return "\n".join(lines)


# ---- the drawing ----

_LEFT, _BOX, _POINT = 220, 210, 46  # widths: of the streams' names, an access, an end of a wait
_TALL, _DOWN = 46, 100  # heights: of an access, and from row to row
_LINE = 16  # the height of a line of text
_LETTER, _BOLD = 7.3, 7.9  # the width of a letter
_HINT = "Point at an access or a wait, or reach it with Tab, for more."


def _source(side):
    """The line of the program, as the file has it now."""
    return linecache.getline(side.line.filename, side.line.line).strip() if side.line else ""


def _wrapped(content, width):
    return textwrap.wrap(content, int(width / _LETTER), break_on_hyphens=False)


class _Drawing:
    """`anchor` is None for a document; in a page, places of this report begin with it, and what can
    be pointed at shows a note, in two lines below the rows."""

    def __init__(self, report, anchor):
        self.report, self.anchor = report, anchor
        self.picture = _Picture(report)
        accesses = {column for _, column in self.picture.at.values()}
        self.x, x = [], _LEFT
        for column in range(len(self.picture.column)):
            width = _BOX + 30 if column in accesses else _POINT
            self.x.append(x + width / 2)
            x += width
        self.width = max(x + 10, 720)
        self.heading = [] if anchor else _wrapped(report.title, self.width - 20)
        arc = 30 if self.picture.at["A"][0] == self.picture.at["B"][0] else 0
        self.top = _LINE * len(self.heading) + 40 + arc
        self.below = self.top + _DOWN * (len(self.picture.rows) - 0.4)
        self.footing = [] if anchor else list(self._foot())
        self.height = self.below + _LINE * (len(self.footing) or 2) + 14

    def _foot(self):
        for letter, side in self.picture.sides.items():
            yield f"{letter}: {_place(side)}  {_source(side)}".rstrip()
        yield from _wrapped(f"Missing: {self.report.remedy}", self.width - 20)

    def _at(self, place):
        row, column = place
        return self.x[column], self.top + _DOWN * row

    def _rows(self):
        for i, row in enumerate(self.picture.rows):
            y = self.top + _DOWN * i
            yield _svg.element("line", class_="row", x1=_LEFT, x2=self.width - 8, y1=y, y2=y)
            label = _wrapped(row.label, _LEFT - 16)[:4]
            for j, line in enumerate(label):
                down = 4 + _LINE * (j - (len(label) - 1) / 2)
                yield _svg.text(8, y + down, line, class_="dim" if j else "title")

    def _note(self, x, *lines):
        """What is shown of a thing that is pointed at, or that has the focus."""
        if not self.anchor:
            return ""
        width = max(map(len, lines)) * _LETTER + 16
        left, top = max(4, min(x - width / 2, self.width - width - 4)), self.below
        height = 2 * _LINE + 12
        box = _svg.element("rect", class_="page", x=0, y=top, width=self.width, height=height)
        frame = _svg.element("rect", class_="box", x=left, y=top, width=width, height=height, rx=4)
        texts = (_svg.text(left + 8, top + _LINE * (i + 1), line) for i, line in enumerate(lines))
        return _svg.element("g", box, frame, *texts, class_="note")

    def _waits(self):
        names = [row.label for row in self.picture.rows]
        points = list(self.picture.points())
        for start, end in zip(points[::2], points[1::2], strict=True):
            (x1, y1), (x2, y2) = self._at(start[:2]), self._at(end[:2])
            middle, tip = (y1 + y2) / 2, y2 + (10 if y2 < y1 else -10)
            lines = (
                f"wait {start[2]}: {names[end[0]]}",
                f"waits for what was given before to {names[start[0]]}",
            )
            parts = [
                _svg.element("title", _svg.escape(" ".join(lines))),
                _svg.element(
                    "path", class_="event", d=f"M{x1} {y1}C{x1} {middle} {x2} {middle} {x2} {tip}"
                ),
            ]
            for x, y in ((x1, y1), (x2, y2)):
                parts.append(_svg.element("circle", class_="point", cx=x, cy=y, r=9))
                parts.append(_svg.text(x, y + 4, str(start[2]), text_anchor="middle"))
            parts.append(self._note(x2, *lines))
            focus = {"tabindex": 0, "role": "img", "aria_label": " ".join(lines)}
            yield _svg.element("g", *parts, class_="wait", **focus if self.anchor else {})

    def _missing(self):
        (x1, y1), (x2, y2) = (self._at(self.picture.at[letter]) for letter in "AB")
        if y1 == y2:
            top = y1 - _TALL / 2
            line = f"M{x1} {top}C{x1} {top - 40} {x2} {top - 40} {x2} {top - 2}"
            y = top - 26
        else:
            y1, y2 = y1 + _TALL / 2, y2 - _TALL / 2 - 2
            y = (y1 + y2) / 2
            line = f"M{x1} {y1}C{x1} {y} {x2} {y} {x2} {y2}"
        yield _svg.element(
            "g",
            _svg.element("title", _svg.escape(f"Missing: {self.report.remedy}")),
            _svg.element("path", class_="missing", d=line),
        )
        says = "nothing writes it" if self.report.kind == "uninitialized" else "nothing orders them"
        middle = (x1 + x2) / 2
        width = len(says) * _LETTER + 12
        yield _svg.element(
            "rect", class_="page", x=middle - width / 2, y=y - 9, width=width, height=18
        )
        yield _svg.text(middle, y + 4, says, class_="bad", text_anchor="middle")

    def _access(self, letter):
        side = self.picture.sides[letter]
        x, y = self._at(self.picture.at[letter])
        left, top = x - _BOX / 2, y - _TALL / 2
        says, shown = f"{letter} {_says(self.report, side)}", int(_BOX / _BOLD) - 1
        lines = (
            f"{letter}: {side.who} {_says(self.report, side)} ({side.operator})",
            f"{_place(side)}  {_source(side)}".rstrip(),
        )
        parts = [
            _svg.element("title", _svg.escape(" ".join(lines))),
            _svg.element("rect", class_="access", x=left, y=top, width=_BOX, height=_TALL, rx=4),
            _svg.text(left + 9, top + 18, _svg.cut(says, shown), class_="title"),
            _svg.text(left + 9, top + 36, _svg.cut(_place(side), shown, left=True)),
            self._note(x, *lines),
        ]
        if not self.anchor:
            return _svg.element("g", *parts)
        return _svg.element("a", *parts, class_=f"access-{letter}", href=f"#{self.anchor}{letter}")

    def parts(self):
        for i, line in enumerate(self.heading, 1):
            yield _svg.text(8, _LINE * i + 4, line, class_="title")
        if self.anchor:
            yield _svg.text(8, self.below + _LINE, _HINT, class_="dim hint")
        yield from self._rows()
        yield from self._waits()
        yield from self._missing()
        for letter in self.picture.at:
            yield self._access(letter)
        for i, line in enumerate(self.footing, 1):
            yield _svg.text(8, self.below + _LINE * i, line)


def drawing(report, anchor=None):
    """Returns the picture as SVG: a document, or with an anchor a part of a page."""
    made = _Drawing(report, anchor)
    description = (
        "A row for each stream and for the host, time to the right. "
        f"Accesses: {' '.join(_legend(report, made.picture))}. Waits: {len(made.picture.edges)}."
    )
    return _svg.drawing(
        made.width, made.height, report.title, description, made.parts(), inline=bool(anchor)
    )


def save(report, path):
    """Writes the picture to a file, in the format of its ending."""
    ending = os.path.splitext(path)[1]
    if ending not in (".svg", ".txt"):
        raise ValueError(f"a report's file ends in .html, .svg or .txt, not {ending!r} ({path!r})")
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write((drawing(report) if ending == ".svg" else text(report)) + "\n")
