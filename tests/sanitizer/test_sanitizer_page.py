"""Reports as pages: what is on them, and how a browser shows them."""

import html
from html.parser import HTMLParser
from types import SimpleNamespace

import browser
import pytest
import torch
from race_pairs import DEVICE, openreg, sanitizer

from torch_openreg.openreg import _svg
from torch_openreg.openreg.sanitizer import _page

pytestmark = [pytest.mark.usefixtures("watching"), pytest.mark.filterwarnings("ignore")]

NAME = "<script>alert(1)</script>&\"'{{ 1 + 1 }}"


def found(*names):
    """Reports of a race for each stream, whose wait comes too early."""
    for name in names:
        side = openreg.Stream(name=name)
        side.wait_stream(openreg.current_stream())
        x = torch.ones(100, device=DEVICE)
        with side:
            x.mul_(2)
    return sanitizer.reports()


class Tags(HTMLParser):
    """Checks that elements are closed in their order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.names = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag == self.open.pop()

    def values(self, name):
        return [value for key, value in self.attributes if key == name]


# ---- what is on a page ----


def test_page_is_one_file_and_escapes_names(tmp_path):
    (report,) = found(NAME)
    report.save(tmp_path / "race.html")
    text = (tmp_path / "race.html").read_text()
    tags = Tags(text)
    assert "<script" not in text and "{{ 1 + 1 }}" in text and html.escape(NAME) in text
    assert not {"script", "img", "iframe", "object"} & set(tags.names)
    addresses = tags.values("href") + tags.values("src")
    assert all(address.startswith(("#", "data:")) for address in addresses)
    ids = tags.values("id")
    assert len(ids) == len(set(ids)) and {a[1:] for a in addresses if a[0] == "#"} <= set(ids)
    assert (
        "url(#" in text and "http-equiv" in text and "https:" not in text and "@import" not in text
    )


@pytest.mark.parametrize("where", ["before", "after", "in place of"])
def test_page_shows_source_with_both_lines_and_the_help(tmp_path, where):
    file = tmp_path / "made.py"
    file.write_text("".join(f"\tline({n})\n" for n in range(1, 31)))
    (report,) = found("side")
    places = [sanitizer.Frame(str(file), n, "f") for n in (10, 12)]
    sides = [
        side._replace(stack=(place,))
        for side, place in zip((report.earlier, report.later), places, strict=True)
    ]
    helps = [("after", 10, "record()"), (where, 12, "wait()")]
    help = tuple(sanitizer.Help(where, str(file), line, code) for where, line, code in helps)
    report = SimpleNamespace(earlier=sides[0], later=sides[1], help=help)
    (excerpt,) = _page.excerpts(report)
    rows = {row.number: row for row in excerpt.rows}
    assert rows[10].letters == "A" and rows[12].letters == "B" and rows[11].letters == ""
    assert (min(filter(None, rows)), max(filter(None, rows))) == (7, 15)
    at = {row.text.strip(): i for i, row in enumerate(excerpt.rows)}
    added = excerpt.rows[at["wait()"]]
    assert (added.text, added.kind) == ("    wait()", "added")
    assert at["record()"] - at["line(10)"] == 1
    assert at["wait()"] - at["line(12)"] == (-1 if where == "before" else 1)
    assert rows[12].kind == ("replaced" if where == "in place of" else "kept")
    # Two files, one of which is not there.
    report.earlier = sides[0]._replace(stack=(sanitizer.Frame("<string>", 3, "f"),))
    assert [(e.filename, len(e.rows)) for e in _page.excerpts(report)] == [
        ("<string>", 0),
        (str(file), 11),
    ]


def test_page_of_many_reports_has_each_mistake_once(tmp_path):
    reports = found("first", "second")
    again = reports[0]._replace(number=3, process="process 7 (other.py)")
    mistakes = _page.Page("a test", (*reports, again)).mistakes()
    assert mistakes == [(reports[0], [reports[1], again])]  # of one line
    other = reports[1]._replace(mistake=("another line",))
    _page.save_reports(tmp_path / "all", [*reports, other])
    index, *pages = sorted((tmp_path / "all").iterdir(), reverse=True)
    assert index.name == "index.html" and len(pages) == 2
    addresses = Tags(index.read_text()).values("href")
    assert set(addresses) == {"data:,", *(page.name for page in pages)}
    assert "causes 1 more\nreport: " in pages[1].read_text()
    sanitizer.save_reports(tmp_path / "all.html")
    assert reports[0].title in (tmp_path / "all.html").read_text()


def test_page_without_reports_does_not_say_that_all_is_well(tmp_path):
    sanitizer.save_reports(tmp_path / "none.html")
    text = (tmp_path / "none.html").read_text()
    Tags(text)
    assert "Nothing was reported" in text


def contrast(one, other):
    def luminance(colour):
        parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("colours", [_svg.LIGHT, _svg.DARK], ids=["light", "dark"])
def test_page_text_has_contrast(colours):
    inks = ("ink", "dim", "bad", "good", "link")
    pairs = [(ink, ground) for ink in inks for ground in ("page", "ground")]
    pairs += [(ink, box) for ink in ("ink", "dim") for box in ("kernel", "call", "copy", "set")]
    pairs += [("bad", "call"), ("good", "call")]
    too_low = {pair: contrast(*(colours[name] for name in pair)) for pair in pairs}
    assert {pair: found for pair, found in too_low.items() if found < 4.5} == {}


# ---- in a browser ----


@pytest.fixture(scope="module")
def chromium():
    if not browser.EXISTS:
        pytest.skip("no chromium with its driver: .ci/packages.txt")
    session = browser.Browser()
    yield session
    session.close()


@pytest.fixture
def opened(chromium, tmp_path):
    """A page with two reports, schedules and a failure, in the browser."""
    outcomes = (
        _page.Outcome("early", "passes", "one\ntwo"),
        _page.Outcome("0, 2", "fails", f"one\n{NAME}", "pytest --openreg-seed=0"),
    )
    first, second = found(NAME, "side")
    second = second._replace(later=second.later._replace(stack=None), mistake=())
    page = _page.Page("a test", (first, second), outcomes, "pytest a", "E assert 1 == 2")
    _page.save(tmp_path / "page.html", [page], "a test")
    chromium.command("Emulation.setEmulatedMedia", features=[])
    list(chromium.requests()), chromium.log("browser")
    chromium.open(tmp_path / "page.html")
    yield chromium
    assert list(chromium.requests()) == [f"file://{tmp_path}/page.html"]
    assert chromium.log("browser") == []


def test_page_is_used_by_keyboard(opened):
    """Tab goes through all accesses and waits in order, and shows a note for each."""
    wanted = opened.find("svg a, svg .wait")
    assert len(wanted) >= 6  # a stream of the pool may have older waits
    reached = []
    while [element := opened.press_tab()] != opened.find("body"):
        reached.append(element)
        assert opened.label(element)
        if element in wanted:
            shown = "[...document.querySelectorAll('.note')].filter(e => "
            shown += "getComputedStyle(e).visibility == 'visible').map(e => e.parentElement)"
            assert opened.run(f"return {shown}.map(e => e == arguments[0])", element) == [True]
    assert [element for element in reached if element in wanted] == wanted
    wide = "return [...document.querySelectorAll('*')].filter(e => e.scrollWidth > e.clientWidth"
    wide += " && getComputedStyle(e).overflowX == 'auto' && e.tabIndex < 0).length"
    assert opened.run(wide) == 0


def test_page_marks_the_lines_of_what_is_pointed_at(opened):
    for letter in "AB":
        (line, *_), (access, *_) = opened.find(f".line-{letter}"), opened.find(f"a.access-{letter}")
        assert opened.style(line, "outline-style") == "none"
        opened.point_at(*opened.find(f"a.access-{letter} .access")[:1])
        assert opened.style(line, "outline-style") == "solid"
        assert NAME in opened.label(access) or letter == "A"
    opened.run("document.querySelector('.access-A').dispatchEvent(new MouseEvent('click'))")
    opened.point_at(*opened.find("h1"))
    marked = [opened.style(*opened.find(f".line-{a}")[:1], "outline-style") for a in "AB"]
    assert marked == ["solid", "none"]
    (differs, *_) = opened.find("mark")
    assert opened.run("return arguments[0].textContent", differs) == NAME


def test_page_is_dark_where_it_is_wanted_and_prints_light(opened):
    colours = "return [getComputedStyle(document.body).backgroundColor,"
    colours += "getComputedStyle(document.querySelector('svg .page')).fill]"
    assert opened.run(colours) == ["rgb(255, 255, 255)"] * 2
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    opened.command("Emulation.setEmulatedMedia", features=dark)
    assert opened.run(colours) == ["rgb(13, 17, 23)"] * 2
    opened.command("Emulation.setEmulatedMedia", media="print", features=dark)
    assert opened.run(colours) == ["rgb(255, 255, 255)"] * 2
    assert len(opened.print()) > 10_000
