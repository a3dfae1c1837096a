"""Where the bytes of a mapping lie in its file: each at its own offset, until ranges are exchanged.

An exchange moves no byte.  Two ranges of addresses change places in the file, so a writer can prepare new
values beside the old ones and then make them appear at the old address, all at once or not at all.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple


class Extent(NamedTuple):
    """``nbytes`` from ``start`` of the mapping lie at ``file_offset`` of the file."""

    start: int
    file_offset: int
    nbytes: int


class RemapTable:
    """A piecewise constant shift from offsets of the mapping to offsets of the file."""

    def __init__(self) -> None:
        # Where runs of one shift begin, ascending, and the shift of each.
        self._starts, self._shifts = [0], [0]

    def __len__(self) -> int:
        return len(self._starts)

    def lookup(self, start: int, nbytes: int) -> list[Extent]:
        """The range in pieces that each lie in one run of the file."""
        extents, stop = [], start + nbytes
        index = bisect_right(self._starts, start) - 1
        while start < stop:
            end = self._starts[index + 1] if index + 1 < len(self._starts) else stop
            end = min(end, stop)
            extents.append(Extent(start, start + self._shifts[index], end - start))
            start, index = end, index + 1
        return extents

    def swap_ranges(self, first: int, second: int, nbytes: int) -> None:
        """Let two ranges that do not overlap change places in the file."""
        assert abs(first - second) >= nbytes, (first, second, nbytes)
        first_extents, second_extents = self.lookup(first, nbytes), self.lookup(second, nbytes)
        self._map_range(first, second, second_extents)
        self._map_range(second, first, first_extents)

    def _map_range(self, start: int, origin: int, extents: list[Extent]) -> None:
        """Let the range at ``start`` lie where ``extents``, which begin at ``origin``, lie."""
        last = extents[-1]
        self._split_at(start)
        stop = start + last.start + last.nbytes - origin
        self._split_at(stop)
        begin, end = (bisect_right(self._starts, at) - 1 for at in (start, stop))
        starts = [start + extent.start - origin for extent in extents]
        shifts = [extent.file_offset - at for extent, at in zip(extents, starts, strict=True)]
        self._starts[begin:end], self._shifts[begin:end] = starts, shifts
        self._merge_runs(begin, begin + len(starts))

    def _split_at(self, offset: int) -> None:
        index = bisect_right(self._starts, offset) - 1
        if self._starts[index] != offset:
            self._starts.insert(index + 1, offset)
            self._shifts.insert(index + 1, self._shifts[index])

    def _merge_runs(self, begin: int, end: int) -> None:
        """Make one run of neighbours with the same shift."""
        for index in range(min(end, len(self._starts) - 1), max(begin, 1) - 1, -1):
            if self._shifts[index] == self._shifts[index - 1]:
                del self._starts[index], self._shifts[index]
