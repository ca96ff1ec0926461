"""What the tests of the sanitizer share, beside conftest's `watching`: programs in two forms."""

import torch

openreg = torch.openreg
sanitizer = openreg.sanitizer
DEVICE = "openreg"


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
