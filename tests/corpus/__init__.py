"""Bugs of real projects, each as a short function in two forms: wrong, and right.

The functions are written for this catalogue, from knowledge of how such programs go wrong; no code
is any project's. A module is a family. `python -m corpus --page ../docs/catalogue.md`, in the
folder above, measures which tool finds which.
"""

from . import (
    allocator,
    checkpoints,
    fresh,
    host,
    loaders,
    offloading,
    peers,
    serving,
    sharded,
    steps,
    streams,
    unseen,
)
from ._base import registered

FAMILIES = (
    loaders,
    host,
    offloading,
    serving,
    checkpoints,
    streams,
    steps,
    peers,
    allocator,
    sharded,
    fresh,
    unseen,
)

BUGS = {bug.name: bug for family in FAMILIES for bug in registered(family)}  # by name

__all__ = ["BUGS", "FAMILIES"]
