"""Kernels with planted bugs: each is found, with its line, and its right twin by nothing."""

import linecache
import os
import re
import traceback
import warnings

import pytest
import torch

import torch_openreg

pytest.importorskip("triton")
torch_openreg.triton()
from programs import FAMILIES, PAIRS  # noqa: E402

sanitizer = torch.openreg.sanitizer
PLACE = re.compile(r"(\S+\.py):(\d+)")
KINDS = {  # kind: what the first line of its text has
    "race": "data race on",
    "grid": "programs",
    "bounds": "out of bounds",
    "unwritten": "memory that nothing has written",
    "error": "raised by triton::",
    "device": "openreg:0.*openreg:1|openreg:1.*openreg:0",
    "autotune": "autotune",
    "graph": "graph",
}
EACH = pytest.mark.parametrize("pair", PAIRS, ids=[pair.name for pair in PAIRS])


def places(error):
    """Of an error: those that its text names, and the lines on which it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    return [(frame.filename, frame.lineno) for frame in frames]


def run(function, right):
    """What was found, as (text, places), and what the function returned."""
    found, returned = [], None
    with warnings.catch_warnings(record=True) as said, sanitizer.enable("warn", initcheck=True):
        warnings.simplefilter("always")
        sanitizer.clear()
        try:
            returned = function(right)
            torch.openreg.synchronize()
        except Exception as error:
            found.append((str(error), places(error)))
        found += [(str(report), []) for report in sanitizer.reports()]
        found += [(str(one.message), []) for one in said if one.category is UserWarning]
        sanitizer.clear()
    return found, returned


def lines(text, others):
    """The source lines that a finding names."""
    named = [(os.path.abspath(file), int(number)) for file, number in PLACE.findall(text)]
    return [linecache.getline(*place) for place in named + others]


def test_catalogue_has_forty_pairs_of_each_kind():
    assert len(PAIRS) >= 40
    assert {pair.kind for pair in PAIRS} == set(KINDS)
    assert all(family.__doc__ for family in FAMILIES)


@EACH
def test_planted_bug_is_found_with_its_line(pair):
    found, _ = run(pair.function, False)
    assert found, "nothing was found"
    kinds = [text for text, _ in found if re.search(KINDS[pair.kind], text.partition("\n\n")[0])]
    assert kinds, found
    assert any(pair.line in line for text, others in found for line in lines(text, others)), found


@EACH
def test_right_twin_is_quiet_and_right(pair):
    found, returned = run(pair.function, True)
    assert not found, found
    torch.testing.assert_close(*returned)
