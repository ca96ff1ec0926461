"""What the tests of the sanitizer share: each is watched, and its programs have two forms."""

import warnings

import pytest
import torch

openreg = torch.openreg
sanitizer = openreg.sanitizer
DEVICE = "openreg"


@pytest.fixture(autouse=True)
def watching():
    """Reports are kept and said nothing of, unless the test enables another mode."""
    before = sanitizer.is_enabled()
    for index in range(openreg.device_count()):
        openreg.synchronize(index)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sanitizer.enable("warn")
        yield
        sanitizer.disable()
        sanitizer.clear()
        if before:
            sanitizer.enable("warn")


def found(function, *arguments):
    """The reports that a function makes, as "later operator / earlier operator"."""
    sanitizer.clear()
    function(*arguments)
    return [f"{r.later.operator} / {r.earlier.operator}" for r in sanitizer.reports()]


def both_forms(function, *operators):
    """`function(orders)` is reported without the order, with these operators, and not with it."""
    reports = found(function, True)
    assert not reports, reports
    openreg.synchronize()
    reports = found(function, False)
    assert reports, "nothing was reported"
    for name in operators:
        assert any(name in report for report in reports), reports


def stream_pair():
    return openreg.current_stream(), openreg.Stream()
