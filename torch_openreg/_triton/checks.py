"""Answers the sanitizer's questions about a launch, and words what the trace of a kernel has found.

A trace is a second compilation of a kernel that tells its addresses and computes nothing else
(cpp.py). csrc/aten/triton_trace.cpp runs it at the call, before anything is queued.
"""

import functools

from ..openreg import _messages
from ..openreg._utils import OWN_MODULE
from ..openreg.sanitizer import _grid_reports
from . import cpp, library

_KINDS = ("reads", "writes", "updates", "writes")


class OutOfBoundsError(IndexError):
    """A launch of a Triton kernel would read or write outside of a tensor's memory. Nothing has
    been queued."""

    __module__ = f"{OWN_MODULE}.sanitizer"


class Checks:
    """Those of one compiled kernel.

    Args:
        metadata: the compiled kernel's.
    """

    def __init__(self, metadata):
        self._metadata = metadata

    @functools.cached_property
    def _source(self):
        return cpp.generate(self._metadata.ttir)

    @functools.cached_property
    def _pointers(self):
        """The positions of the pointers among the arguments."""
        arguments = self._source.arguments
        return [i for i, argument in enumerate(arguments) if argument.kind == "pointer"]

    @functools.cached_property
    def _address(self):
        name = f"{self._metadata.name}.trace"
        # Libraries are never unloaded, so nothing has to hold this one.
        return library.address(library.load_source(name, self._source.trace), "openreg_trace")

    def entry(self):
        return self._address

    @property
    def sites(self):
        return len(self._source.sites)

    @functools.cached_property
    def peeked(self):
        """The pointers through which the kernel loads what addresses depend on."""
        loads = set().union(*self._source.data_dependent.values())
        positions = set().union(*(self._source.reached[site][0] for site in loads))
        return [i for i, position in enumerate(self._pointers) if position in positions]

    def unknown(self, blind):
        """(pointer, reads, writes) of each argument that accesses may touch whose addresses need a
        load at these sites."""
        reached = set()
        for site, loads in self._source.data_dependent.items():
            if not loads.isdisjoint(blind):
                positions, reads, writes = self._source.reached[site]
                reached |= {(self._pointers.index(at), reads, writes) for at in positions}
        return sorted(reached)

    def _name(self, argument):
        """Of a pointer, as the kernel calls it."""
        if argument >= len(self._pointers):
            return "a pointer from memory"
        return self._source.arguments[self._pointers[argument]].name

    def refuse(self, hit, size):
        """For an access out of bounds: of `size` bytes, those of the tensor's memory."""
        argument, site, kind, offset, program, _ = hit
        does = _KINDS[kind]
        if argument < 0:
            title, where = "memory of no argument", f"{offset:#x}"
        else:
            title = f"{self._name(argument)} out of bounds"
            distance, side = (
                (-offset, "before") if offset < 0 else (offset - size, "behind the end of")
            )
            where = f"{distance} bytes {side} its {size} bytes"
        place = _messages.Place(self._frame(site), f"program {program} {does} {where}")
        title = f"{self._metadata.name} {does} {title}"
        raise OutOfBoundsError(
            _messages.message(title, [place], ["Nothing was launched."], kind="")
        )

    def _frame(self, site):
        return _grid_reports.kernel_frame(*self._source.sites[site])

    def note_race(self, begin, earlier, later):
        """For a race between programs, whose first byte is `begin`."""
        accesses = []
        for argument, site, kind, offset, program, _ in (earlier, later):
            does = f"program {program} {_KINDS[kind]} {self._name(argument)} at byte {offset}"
            accesses.append((self._frame(site), does))
        _grid_reports.note(begin, tuple(accesses))
