"""Draws a graph: reads the core's DOT and writes SVG.

A node's column is one more than the highest of those that it comes after, so time goes to the
right. A picture is `_BAND` columns wide: later columns continue below, in a band with a row for
each stream that has a node there. An edge between two bands is not a line but a text in the later
box, because lines across a long picture cannot be followed.
"""

import os
import re
from typing import NamedTuple
from xml.sax.saxutils import escape

_BAND = 8  # columns
_LEFT, _TOP, _WIDTH, _HEIGHT, _BETWEEN = 76, 40, 168, 40, 20  # pixels
_ACROSS, _DOWN = _WIDTH + 32, _HEIGHT + 16
_FITS, _SQUEEZED = 25, 36  # characters in a box, and the most that stay readable

_STREAM = re.compile(r'    label="stream (\d+)";')
_NODE = re.compile(r'    n(\d+) \[label="\d+ (.*)\\n([^\\"]*)", fillcolor="(.*)"\];')
_EDGE = re.compile(r"  n(\d+) -> n(\d+);")
_HEAD = """\
<style>path{fill:none;stroke:#555;marker-end:url(#end)}path.event{stroke:#c40}rect{stroke:#888}</style>
<defs><marker id="end" markerWidth="7" markerHeight="6" refX="7" refY="3" orient="auto">\
<polygon points="0,0 7,3 0,6" fill="#555"/></marker></defs>
<rect width="100%" height="100%" fill="#fff"/>"""


class _Box(NamedTuple):
    number: int
    stream: int
    name: str
    detail: str
    colour: str
    after: list  # of boxes


def _read(dot):
    """Returns the device, the number of streams, and the boxes."""
    boxes, streams = {}, 0
    for line in dot.splitlines():
        if match := _STREAM.fullmatch(line):
            streams += 1
            stream = int(match[1])
        elif match := _NODE.fullmatch(line):
            name = re.sub(r"\\(.)", r"\1", match[2])
            boxes[int(match[1])] = _Box(int(match[1]), stream, name, match[3], match[4], [])
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
                yield f'<path class="{kind}" d="M{x0} {y0}C{x0 + 30} {y0} {x - 30} {y} {x} {y}"/>'
            elif kind == "order":  # out of the right margin, in from the left one
                yield f'<path class="order" d="M{_LEFT - 14} {y}H{x}"/>'

    def far(self, box):
        """The boxes of other streams that it comes after and has no line to."""
        far = [o for o in box.after if o.stream != box.stream and self.band(o) != self.band(box)]
        return f"after {' '.join(str(other.number) for other in far)}" if far else ""


def _line(x, y, text):
    """Squeezes the text to the box where it is wider."""
    wide = f' textLength="{_WIDTH - 10}" lengthAdjust="spacingAndGlyphs"' * (len(text) > _FITS)
    if len(text) > _SQUEEZED:
        text = text[: _SQUEEZED - 3] + "..."
    return f'<text x="{x + 5}" y="{y}"{wide}>{escape(text)}</text>'


def _drawn(picture, box):
    x, y = picture.at(box)
    yield f"<g><title>{box.number} {escape(box.name)}, {box.detail}</title>"
    yield f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="3" fill="{box.colour}"/>'
    for down, text in ((13, box.name), (25, box.detail), (36, picture.far(box))):
        if text:
            yield _line(x, y + down, text)
    place = f'x="{x + _WIDTH - 5}" y="{y + 36}"'
    yield f'<text {place} text-anchor="end">{box.number}</text></g>'


def _svg(dot):
    device, streams, boxes = _read(dot)
    picture = _Picture(boxes)
    size = f'width="{picture.width}" height="{picture.height}"'
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {picture.width} '
        f'{picture.height}" font-family="monospace" font-size="10">'
    )
    yield _HEAD
    yield (
        f'<text x="8" y="20" font-size="12">graph of device {device}: nodes {len(boxes)}, streams '
        f"{streams}, of which 0 is the one it is launched on</text>"
    )
    for (_, stream), top in picture.top.items():
        yield f'<text x="8" y="{top + _HEIGHT // 2 + 3}">stream {stream}</text>'
    for box in boxes:
        yield from picture.edges(box)
    for box in boxes:
        yield from _drawn(picture, box)
    yield "</svg>\n"


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
        file.write("\n".join(_svg(dot)))
