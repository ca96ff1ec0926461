"""Sphinx: the site of the documentation, which `make docs` builds into build/docs.

Its sources are the tree's own pages, under the paths that they have there, so that their links lead
to the same places on the site as where the tree is browsed. Only the reference is the site's alone.
"""

import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]  # pytest_openreg, c_header
HEADER = (ROOT / "csrc/openreg/include/openreg.h").read_text()

project = "torch_openreg"
copyright = "the torch_openreg authors"
version = release = ".".join(
    re.findall(r"#define OPENREG_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", HEADER)
)

root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "docs/**.rst"]
exclude_patterns = ["build", ".*", "torch_openreg", "csrc", "tests", "benchmarks"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "c_header"]
myst_heading_anchors = 4  # the anchors that Git hosts give to headings
nitpicky = True
nitpick_ignore_regex = [
    # What is documented elsewhere.
    (r"c:identifier", r"u?int\d+_t|size_t|orPluginInit"),  # the last is a plugin's
    (r"py:.*", r"torch\.(?!openreg)[\w.]*|(builtins|pytorch_pfn_extras|lightning)\.[\w.]*"),
    (r"py:class", r"optional|int|str|bool|float|Frame|Access|Report"),
]
autodoc_member_order = "bysource"
autodoc_typehints = "none"

html_theme = "pydata_sphinx_theme"
html_title = f"torch_openreg {version}"
html_show_sourcelink = False
html_theme_options = {
    "navigation_with_keys": False,
    "navbar_align": "left",
    "secondary_sidebar_items": ["page-toc"],
    "footer_end": [],
}

# README shows no table of contents where the tree is browsed.
CONTENTS = """

```{toctree}
:hidden:

docs/reference/guides
docs/reference/index
CONTRIBUTING
CHANGELOG
```
"""


def add_contents(app, name, source):
    if name == root_doc:
        source[0] += CONTENTS


class Page(HTMLParser):
    """The anchors of a page, and where its links lead."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links = {""}, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors.update(filter(None, (attributes.get("id"), attributes.get("name"))))
        self.links += filter(None, (attributes.get("href"), attributes.get("src")))


def broken_links(folder):
    """(page, link) of every link inside the site that leads nowhere."""
    files = (path for path in folder.rglob("*.html") if "_static" not in path.parts)
    pages = {path: Page(path.read_text()) for path in files}
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchors = pages[target].anchors if target in pages else None
            if not target.exists() or (anchors and unquote(parts.fragment) not in anchors):
                yield path.relative_to(folder), link


def finish(app, error):
    if error or app.builder.name != "html":
        return
    out = Path(app.outdir)
    shutil.copy(out / f"{root_doc}.html", out / "index.html")
    broken = [f"{page}: {link}" for page, link in broken_links(out)]
    if broken:
        raise RuntimeError("links that lead nowhere:\n" + "\n".join(broken))


def setup(app):
    # For autodoc: it makes torch.openreg.
    import torch_openreg  # noqa: F401

    app.connect("source-read", add_contents)
    app.connect("build-finished", finish)
