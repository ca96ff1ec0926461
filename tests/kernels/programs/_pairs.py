"""What all families use: the list of pairs, and tensors of a size."""

import inspect
from typing import NamedTuple

import torch

DEVICE = "openreg"
SIZE = 1000  # no multiple of a block
_pairs = []


class Pair(NamedTuple):
    """A program with a planted bug, and the same without it. `function(right)` returns what it
    computed and what eager PyTorch computes."""

    name: str
    kind: str  # of what is found, a key of KINDS in test_kernel_catalogue.py
    line: str  # a part of the source line that a report has to name
    function: object


def pair(kind, line):
    """Puts `function(right)` into the catalogue. Its docstring is "kind of kernel: mistake."."""

    def put(function):
        text = inspect.getdoc(function)
        assert ": " in text and text.endswith("."), function.__name__
        assert function.__name__ not in [known.name for known in _pairs], function.__name__
        _pairs.append(Pair(function.__name__, kind, line, function))
        return function

    return put


def registered(module):
    """The pairs of a family."""
    return [known for known in _pairs if known.function.__module__ == module.__name__]


def here():
    return torch.openreg.current_stream()


def numbers(*shape, dtype=torch.float32, device=DEVICE):
    """Values that differ from each other, and small enough for exact sums."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 61).to(dtype).view(shape).to(device)


def integers(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype).to(DEVICE)


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype, device=DEVICE)
