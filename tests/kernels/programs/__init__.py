"""Triton kernels as libraries write them, each with a planted bug and without it.

The kernels are written for this catalogue, from knowledge of how such kernels go wrong; none is any
library's. A module is a family.
"""

from . import addresses, bounds, grids, host, streams, unwritten
from ._pairs import registered

FAMILIES = (streams, grids, bounds, unwritten, addresses, host)
PAIRS = [known for family in FAMILIES for known in registered(family)]

__all__ = ["FAMILIES", "PAIRS"]
