"""Pictures of a race: streams as rows, time to the right, existing waits and the missing one."""

import os
from typing import NamedTuple


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


class _Row(NamedTuple):
    stream: int
    label: str


class _Picture:
    """Rows and columns, shared by the text and the drawing."""

    def __init__(self, report, label):
        self.sides = {"A": report.earlier, "B": report.later}
        self.edges = [edge for edge in report.order.edges if edge.source]
        self.rows = self._make_rows(report, label)
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

    def _make_rows(self, report, label):
        labels = {side.stream or 0: side.where for side in (report.earlier, report.later)}
        for edge in self.edges:
            for stream in (edge.source, edge.target):
                labels.setdefault(stream, label(stream))
        return [_Row(stream, label) for stream, label in labels.items()]

    def legend(self, report):
        """A line for each letter."""
        for letter, side in self.sides.items():
            does = "writes" if side.write else "reads"
            if side.operator == "allocation":
                does = "hands out what B reads"
            line = side.line
            place = f" ({os.path.basename(line.filename)}:{line.line})" if line else ""
            yield f"{letter}: {side.operator} {does}{place}"
        yield f"A ..> B is missing: {report.advice}"


def _places(picture):
    """The letters of the waits in their rows: (row, column, letter)."""
    for number, edge in enumerate(picture.edges, 1):
        yield picture.index[edge.source], picture.column[edge.recorded], f"{number}>"
        yield picture.index[edge.target], picture.column[edge.waited], f">{number}"


def text(report, label):
    """Returns the picture as text. `label` maps a stream's handle to its name."""
    picture = _Picture(report, label)
    marks = {at: letter for letter, at in picture.at.items()}
    marks.update({(row, column): mark for row, column, mark in _places(picture)})
    width = max(len(row.label) for row in picture.rows)
    lines = []
    for i, row in enumerate(picture.rows):
        cells = (marks.get((i, column), "") for column in range(len(picture.column)))
        lines.append(f"{row.label:<{width}}  {''.join(f'{cell:-^6}' for cell in cells)}")
    if picture.edges:
        lines.append("1> is recorded, >1 waits for it")
    return "\n".join([*lines, *picture.legend(report)])


_LEFT, _TOP, _STEP, _HEIGHT = 340, 40, 70, 60


def _svg(report, label):
    from xml.sax.saxutils import escape  # takes urllib with it

    picture = _Picture(report, label)
    width = _LEFT + _STEP * (len(picture.column) + 1)
    height = _TOP + _HEIGHT * len(picture.rows) + 90
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="monospace" font-size="12">',
        '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]

    def place(row, column):
        return _LEFT + _STEP * (column + 0.5), _TOP + _HEIGHT * row

    def arrow(start, end, style, title):
        (x1, y1), (x2, y2) = place(*start), place(*end)
        parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" {style} marker-end="url(#head)">'
            f"<title>{escape(title)}</title></line>"
        )

    for i, row in enumerate(picture.rows):
        y = place(i, 0)[1]
        parts.append(f'<text x="8" y="{y + 4}">{escape(row.label)}</text>')
        parts.append(f'<line x1="{_LEFT}" y1="{y}" x2="{width - 8}" y2="{y}" stroke="#bbb"/>')
    for edge in picture.edges:
        start = picture.index[edge.source], picture.column[edge.recorded]
        end = picture.index[edge.target], picture.column[edge.waited]
        arrow(start, end, 'stroke="black"', "a wait")
    missing = 'stroke="red" stroke-width="2" stroke-dasharray="6 4"'
    arrow(picture.at["A"], picture.at["B"], missing, report.advice)
    for letter, at in picture.at.items():
        x, y = place(*at)
        parts.append(f'<circle cx="{x}" cy="{y}" r="10" fill="#fdd" stroke="red"/>')
        parts.append(f'<text x="{x - 4}" y="{y + 4}">{letter}</text>')
    y = _TOP + _HEIGHT * len(picture.rows)
    for i, line in enumerate(picture.legend(report)):
        parts.append(f'<text x="8" y="{y + 20 * i}">{escape(line)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def save(report, path, label):
    """Writes the picture to a file, in the format of its ending."""
    ending = os.path.splitext(path)[1]
    if ending not in (".svg", ".txt"):
        raise ValueError(f"a picture's file ends in .svg or .txt, not {ending!r} ({path!r})")
    with open(path, "w", encoding="utf-8") as file:
        file.write(_svg(report, label) if ending == ".svg" else text(report, label) + "\n")
