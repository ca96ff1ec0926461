"""Draws a graph: reads the core's DOT and writes SVG.

A node's column is one more than the highest of those that it comes after, so time goes to the
right. A picture is `_BAND` columns wide: later columns continue below, in a band with a row for
each stream that has a node there. An edge between two bands is not a line but a text in the later
box, because lines across a long picture cannot be followed.
"""

import os
import re
from typing import NamedTuple

from . import _svg

_BAND = 8  # columns
_LEFT, _TOP, _WIDTH, _HEIGHT, _BETWEEN = 90, 40, 192, 48, 20  # pixels
_ACROSS, _DOWN = _WIDTH + 36, _HEIGHT + 16
_FITS, _SQUEEZED = 25, 36  # characters in a box, and the most that stay readable

_STREAM = re.compile(r'    label="stream (\d+)";')
_NODE = re.compile(r'    n(\d+) \[label="\d+ (.*)\\n([^\\"]*)", fillcolor="(.*)"\];')
_EDGE = re.compile(r"  n(\d+) -> n(\d+);")
# The core's colours are the light ones.
_KINDS = {_svg.LIGHT[kind]: kind for kind in ("kernel", "call", "copy", "set")}


class _Box(NamedTuple):
    number: int
    stream: int
    name: str
    detail: str
    kind: str
    after: list  # of boxes


def _read(dot):
    """Returns the device, the number of streams, and the boxes."""
    boxes, streams = {}, 0
    for line in dot.splitlines():
        if match := _STREAM.fullmatch(line):
            streams += 1
            stream = int(match[1])
        elif match := _NODE.fullmatch(line):
            name, kind = re.sub(r"\\(.)", r"\1", match[2]), _KINDS.get(match[4], "")
            boxes[int(match[1])] = _Box(int(match[1]), stream, name, match[3], kind, [])
        elif match := _EDGE.fullmatch(line):
            boxes[int(match[2])].after.append(boxes[int(match[1])])
    device = re.search(r'^  comment="device (\d+)";$', dot, re.MULTILINE)[1]
    return device, streams, [boxes[number] for number in sorted(boxes)]


class _Picture:
    def __init__(self, boxes):
        self.column = {}
        for box in boxes:  # each is after those that it comes after
            columns = [self.column[other.number] for other in box.after]
            self.column[box.number] = max(columns, default=-1) + 1
        self.columns = max(self.column.values(), default=-1) + 1
        rows = sorted({(self.band(box), box.stream) for box in boxes})
        self.top = {place: _TOP + i * _DOWN + place[0] * _BETWEEN for i, place in enumerate(rows)}
        bands = -(-self.columns // _BAND)
        self.width = _LEFT + min(max(self.columns, 3), _BAND) * _ACROSS
        self.height = _TOP + len(rows) * _DOWN + bands * _BETWEEN

    def band(self, box):
        return self.column[box.number] // _BAND

    def at(self, box):
        left = _LEFT + self.column[box.number] % _BAND * _ACROSS
        return left, self.top[self.band(box), box.stream]

    def edges(self, box):
        x, y = self.at(box)
        y += _HEIGHT // 2
        for other in box.after:
            kind = "order" if other.stream == box.stream else "event"
            if self.band(other) == self.band(box):
                x0, y0 = self.at(other)
                x0, y0 = x0 + _WIDTH, y0 + _HEIGHT // 2
                line = f"M{x0} {y0}C{x0 + 30} {y0} {x - 30} {y} {x} {y}"
            elif kind == "order":  # out of the right margin, in from the left one
                line = f"M{_LEFT - 14} {y}H{x}"
            else:
                continue
            yield _svg.element("path", class_=kind, d=line)

    def far(self, box):
        """The boxes of other streams that it comes after and has no line to."""
        far = [o for o in box.after if o.stream != box.stream and self.band(o) != self.band(box)]
        return f"after {' '.join(str(other.number) for other in far)}" if far else ""


def _line(x, y, text):
    """Squeezes the text to the box where it is wider."""
    squeezed = {"textLength": _WIDTH - 10, "lengthAdjust": "spacingAndGlyphs"}
    wide = squeezed if len(text) > _FITS else {}
    return _svg.text(x + 5, y, _svg.cut(text, _SQUEEZED), **wide)


def _drawn(picture, box):
    x, y = picture.at(box)
    yield f"<g>{_svg.element('title', _svg.escape(f'{box.number} {box.name}, {box.detail}'))}"
    yield _svg.element(
        "rect", class_=f"box {box.kind}", x=x, y=y, width=_WIDTH, height=_HEIGHT, rx=3
    )
    for down, text in ((14, box.name), (28, box.detail), (42, picture.far(box))):
        if text:
            yield _line(x, y + down, text)
    number = _svg.text(x + _WIDTH - 5, y + 42, str(box.number), class_="dim", text_anchor="end")
    yield f"{number}</g>"


def _parts(title, picture, boxes):
    yield _svg.text(8, 20, title)
    for (_, stream), top in picture.top.items():
        yield _svg.text(8, top + _HEIGHT // 2 + 3, f"stream {stream}")
    for box in boxes:
        yield from picture.edges(box)
    for box in boxes:
        yield from _drawn(picture, box)


def _drawing(dot):
    device, streams, boxes = _read(dot)
    picture = _Picture(boxes)
    title = (
        f"graph of device {device}: nodes {len(boxes)}, streams {streams}, of which 0 is the one "
        "it is launched on"
    )
    description = "A row for each stream, time to the right, a box for each node."
    parts = _parts(title, picture, boxes)
    return _svg.drawing(picture.width, picture.height, title, description, parts)


def picture_path(path):
    """The path of a DOT file's picture."""
    svg = os.path.splitext(path)[0] + ".svg"
    if svg == path:
        raise RuntimeError(f'"{path}" is where the picture would be: name the DOT file')
    return svg


def draw(path):
    """Draws a DOT file of the core, into a file beside it."""
    with open(path, encoding="ascii") as file:
        dot = file.read()
    with open(picture_path(path), "w", encoding="ascii") as file:
        file.write(_drawing(dot) + "\n")
