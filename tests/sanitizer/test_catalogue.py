"""docs/catalogue.md: each bug is found by what its table says, and its right form by nothing."""

import ast
import itertools
import linecache
import re
from pathlib import Path

import pytest
from corpus import BUGS, FAMILIES, measure, sharded

from torch_openreg.openreg.sanitizer import _advice

CORPUS = Path(__file__).resolve().parents[1] / "corpus"
DOCS = Path(__file__).resolve().parents[2] / "docs"

pytestmark = pytest.mark.usefixtures("watching")
TABLES = (DOCS / "catalogue.md").read_text().split("<!-- made by python -m corpus -->")[1]
ROW = re.compile(r"^\| `(\w+)` \| (\D.*) \|$", re.MULTILINE)
ROWS = {name: row.split(" | ") for name, row in ROW.findall(TABLES)}
MISTAKE, PLAINLY, SANITIZER, TAPE, SEEDS, INITCHECK = range(6)
EACH = pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)


@pytest.fixture(scope="module", autouse=True)
def groups_end():
    yield
    sharded.pair.cache_clear()


def test_catalogue_page_lists_the_bugs():
    assert list(ROWS) == list(BUGS)
    for name, bug in BUGS.items():
        assert ROWS[name][MISTAKE] == f"{bug.project}: {bug.mistake.rstrip('.')}"
        assert bug.family in {family.__name__.rpartition(".")[2] for family in FAMILIES}


def test_catalogue_has_fifty_bugs_found_by_sanitizer_and_tape():
    found = [
        row for row in ROWS.values() if row[SANITIZER] == "yes" and row[TAPE] not in ("no", "-")
    ]
    assert len(found) >= 50


def faults(report):
    """What is wrong with a report's text, but for its lines of source."""
    places = {side.line[:2] for side in (report.earlier, report.later)}
    sources = [linecache.getline(*place).split() for place in places]
    codes = [line.strip() for help in report.help for line in help.code.splitlines()]
    said = [line for line in str(report).splitlines()
            if line.split()[1:] not in sources and line.strip() not in codes]  # fmt: skip
    checks = {
        "a line is too long": not any(len(line) > 100 and len(line.split()) > 1 for line in said),
        "a hexadecimal number": not re.search(r"\b0x[0-9a-f]", "\n".join(said)),
        "an operator's overload": "aten::" not in "\n".join(said),
        "its memory has no name": report.subject.name is not None or report.earlier.node,
        "its size or dtype is not there": report.subject.size > 0,
        "no place of the user's": report.place and Path(report.place[0]).parent == CORPUS,
        "no help": report.help or _advice.words(report),
        "its help has names of other lines": not foreign_names(report),
        "a summary of more lines": "\n" not in report.summary(),
    }
    return [fault for fault, holds in checks.items() if not holds]


def names_in(nodes):
    """The names that these nodes use and bind."""
    for node in itertools.chain.from_iterable(map(ast.walk, nodes)):
        if isinstance(node, ast.Name | ast.arg | ast.FunctionDef | ast.ClassDef | ast.alias):
            yield getattr(node, "id", None) or getattr(node, "arg", None) or node.name


def known_names(help):
    """Those of the functions around the line of a help, and of its module."""
    tree = ast.parse(Path(help.filename).read_text())
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    around = [n for n in functions if n.lineno <= help.line <= n.end_lineno]
    outside = [ast.Name(n.name) if isinstance(n, ast.FunctionDef) else n for n in tree.body]
    return set(names_in(around + outside))


def foreign_names(report):
    """The names in lines to paste that mean nothing there, such as those of another function."""
    for group in report.helps:
        made = {}  # by its own lines, of a function
        for help in group:
            known, code = known_names(help), ast.parse(help.code)
            bound = {n.id for n in ast.walk(code) if isinstance(getattr(n, "ctx", 0), ast.Store)
                     and isinstance(n, ast.Name)}  # fmt: skip
            made |= dict.fromkeys(bound, known)
            for name in set(names_in([code])) - known - bound - {"torch"}:
                if made.get(name) != known:
                    return name
    return None


@EACH
def test_catalogue_bug_is_reported_as_its_row_has_it(bug):
    """`initcheck` reports what it reports without it, too."""
    reports = measure.found(bug.wrong, initcheck=True)
    wrong = {report.kind == "uninitialized" for report in reports}
    for report in reports:
        assert faults(report) == [], str(report)
    if not bug.luck:
        assert (False in wrong) == (ROWS[bug.name][SANITIZER] == "yes")
    assert (True in wrong) == (ROWS[bug.name][INITCHECK] == "yes")
    assert measure.reports(bug.right, initcheck=True) == []


def test_catalogue_bug_that_ends_in_an_error_is_reported():
    """`emptied_cache` does, where its side stream comes after the memory has gone."""

    def ends(function):
        function()
        raise RuntimeError("not within one allocation")

    bug = BUGS["side_work_not_ordered"]
    assert measure.reports(lambda: ends(bug.wrong)) == measure.reports(bug.wrong) != []
    with pytest.raises(RuntimeError, match="not within"):
        measure.reports(lambda: ends(bug.right))


@pytest.mark.slow
@EACH
def test_catalogue_bug_is_shown_by_the_tape_of_its_row(bug):
    if bug.outside:
        assert ROWS[bug.name][TAPE] == "-"
        return
    shown = measure.tape(bug.wrong)
    text = f"{shown.preemptions}, run {shown.runs}" if shown else "no"
    assert text == ROWS[bug.name][TAPE]
    assert shown is None or measure.replays(bug.wrong, shown.tape)


@pytest.mark.slow
@EACH
def test_catalogue_right_form_has_one_result(bug):
    if not bug.outside:
        assert measure.disagreement(bug.right) == ""
