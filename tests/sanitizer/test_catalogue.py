"""docs/catalogue.md: each bug is found by what its table says, and its right form by nothing."""

import re
from pathlib import Path

import pytest
from corpus import BUGS, FAMILIES, measure, sharded

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


@EACH
def test_catalogue_bug_is_reported_as_its_row_has_it(bug):
    """`initcheck` reports what it reports without it, too."""
    wrong = {kind == "uninitialized" for kind, *_ in measure.reports(bug.wrong, initcheck=True)}
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
