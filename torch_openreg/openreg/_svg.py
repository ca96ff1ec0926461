"""SVG for pictures of races and of graphs: light and dark, on screen and on paper."""

import html
import re
from string import Template

# Every pair of ink on ground has a contrast of at least 4.5.
LIGHT = {
    "page": "#ffffff",
    "ground": "#f3f5f8",
    "border": "#8c959f",
    "ink": "#1f2328",
    "dim": "#57606a",
    "bad": "#b3261e",
    "good": "#116329",
    "event": "#8a5500",
    "link": "#0550ae",
    "kernel": "#dbe9f6",
    "call": "#f6dcdc",
    "copy": "#e0f0d8",
    "set": "#fcf0d0",
}
DARK = {
    "page": "#0d1117",
    "ground": "#161b22",
    "border": "#6e7681",
    "ink": "#e6edf3",
    "dim": "#9ea7b1",
    "bad": "#ff8a80",
    "good": "#56d37a",
    "event": "#e0a83a",
    "link": "#79b8ff",
    "kernel": "#12345a",
    "call": "#4a1f1f",
    "copy": "#10381d",
    "set": "#4a3305",
}
_RULES = Template("""\
.drawing{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12px}
.drawing text{fill:$ink}.drawing .dim{fill:$dim}.drawing .bad{fill:$bad}
.drawing .title{font-weight:bold;font-size:13px}
.drawing .page{fill:$page}.drawing .row{stroke:$border}
.drawing .box{fill:$ground;stroke:$border}.drawing .access{fill:$call;stroke:$bad;stroke-width:1.5}
.drawing .kernel{fill:$kernel}.drawing .call{fill:$call}
.drawing .copy{fill:$copy}.drawing .set{fill:$set}
.drawing .point{fill:$page;stroke:$event;stroke-width:1.5}
.drawing path{fill:none;stroke:$dim;marker-end:url(#end)}
.drawing path.event{stroke:$event;stroke-width:1.5;marker-end:url(#event)}
.drawing path.missing{stroke:$bad;stroke-width:2;stroke-dasharray:7 4;marker-end:url(#missing)}
.drawing .note{visibility:hidden}.drawing .hint{font-style:italic}
.drawing :is(a,.wait):is(:hover,:focus-visible) .note{visibility:visible}
#end polygon{fill:$dim}#event polygon{fill:$event}#missing polygon{fill:$bad}
""")
STYLE = (
    _RULES.substitute(LIGHT)
    + "@media screen and (prefers-color-scheme:dark){\n"
    + _RULES.substitute(DARK)
    + "}"
)
_NOT_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
HEADS = "".join(
    f'<marker id="{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerUnits="userSpaceOnUse" '
    f'markerWidth="9" markerHeight="9" orient="auto"><polygon points="0,0 8,4 0,8"/></marker>'
    for kind in ("end", "event", "missing")
)
"""The arrows' heads."""


def escape(text):
    """Text as markup; characters that XML does not have are replaced."""
    return html.escape(_NOT_TEXT.sub("\ufffd", text))


def element(name, *content, **attributes):
    """An element, as markup. `content` is markup, and attributes are text: ``class_`` and
    ``text_anchor`` are ``class`` and ``text-anchor``."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
    )
    return f"<{name}{given}>{''.join(content)}</{name}>"


def text(x, y, content, **attributes):
    return element("text", escape(content), x=x, y=y, **attributes)


def cut(content, width, left=False):
    """Shortens text to a number of characters, at its right or left end."""
    if len(content) <= width:
        return content
    return f"...{content[3 - width :]}" if left else f"{content[: width - 3]}..."


def drawing(width, height, title, description, parts, inline=False):
    """A whole document, or inline, a part of a page that has STYLE and HEADS."""
    head = element("title", escape(title)) + element("desc", escape(description))
    if not inline:
        head += element("style", STYLE) + element("defs", HEADS)
    kind = {"xmlns": "http://www.w3.org/2000/svg", "role": "group" if inline else "img"}
    head += element("rect", class_="page", width="100%", height="100%")
    box = f"0 0 {width} {height}"
    size = {"width": width, "height": height, "viewBox": box, "aria_label": title}
    return element("svg", head, "\n", "\n".join(parts), "\n", class_="drawing", **kind, **size)
