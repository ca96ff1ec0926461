"""The mistakes of docs/graphs.md: each is shown, and its right form is quiet."""

import sys
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).resolve().parents[2] / "docs"
sys.path.insert(0, str(DOCS / "examples"))
from graph_mistakes import MISTAKES, is_shown, outcome  # noqa: E402


@pytest.fixture(autouse=True)
def watching():
    with torch.openreg.sanitizer.enable():
        yield
    torch.openreg.synchronize()


@pytest.mark.racy
@pytest.mark.parametrize("name", MISTAKES)
def test_graph_mistake_is_shown(name):
    assert is_shown(MISTAKES[name])


@pytest.mark.parametrize("name", MISTAKES)
def test_graph_mistakes_right_form_is_quiet(name):
    result = outcome(MISTAKES[name].right)
    assert not isinstance(result, str), result
    assert not torch.openreg.sanitizer.reports()


def test_graph_mistakes_are_those_of_the_page():
    table = (DOCS / "graphs.md").read_text().split("| mistake |")[1].split("\n\n")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(MISTAKES)
    for row, mistake in zip(rows, MISTAKES.values(), strict=True):
        assert mistake.what in row
