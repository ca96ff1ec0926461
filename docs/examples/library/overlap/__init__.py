"""Copies and sums that overlap with computing."""

from .graphed import Graphed
from .mean import Mean
from .offload import Offloader
from .prefetch import Prefetcher

__all__ = ["Graphed", "Mean", "Offloader", "Prefetcher"]
