"""What all families use: the list of bugs, and tensors of a size."""

import inspect
from typing import NamedTuple

import torch

SIZE = 64
_bugs = []


class Bug(NamedTuple):
    """One of the catalogue; `function(right)` returns tensors, or numbers, that show it."""

    name: str
    family: str  # its module
    project: str  # the kind of program that has it
    mistake: str
    function: object
    luck: str  # upon what it depends whether the sanitizer reports it; mostly nothing
    outside: str  # who decides the order in place of a schedule; mostly nobody

    def wrong(self):
        return self.function(False)

    def right(self):
        return self.function(True)


def bug(function=None, *, luck="", outside=""):
    """Puts `function(right)` into the catalogue. Its docstring is "kind of project: mistake"."""
    if function is None:
        return lambda function: bug(function, luck=luck, outside=outside)
    text = " ".join(inspect.getdoc(function).split())
    project, _, mistake = text.partition(": ")
    family = function.__module__.rpartition(".")[2]
    name = function.__name__
    assert name not in [known.name for known in _bugs] and mistake.endswith("."), name
    _bugs.append(Bug(name, family, project, mistake, function, luck, outside))
    return function


def registered(module):
    """The bugs of a family."""
    return [known for known in _bugs if known.function.__module__ == module.__name__]


def here(index=0):
    """The stream on which the program computes."""
    return torch.openreg.current_stream(index)


def full(value, size=SIZE, device="openreg"):
    return torch.full((size,), float(value), device=device)


def pinned(value, size=SIZE):
    return torch.full((size,), float(value), pin_memory=True)
