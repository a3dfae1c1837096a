"""Which bytes of a file or mapping are taken, and where the bytes of a mapping lie in its file.

:class:`RangeAllocator`: first fit over a sorted list of gaps.

:class:`RemapTable`: each byte at its own offset, until ranges are exchanged.
An exchange moves no byte.  Two ranges of addresses change places in the file, so a writer can prepare new
values beside the old ones and then make them appear at the old address, all at once or not at all.
"""

import mmap
from bisect import bisect_left, bisect_right
from typing import NamedTuple

PAGE = max(4096, mmap.PAGESIZE)


def round_up(value: int, multiple: int = PAGE) -> int:
    """The least multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


class RangeAllocator:
    """Ranges of ``[0, num_bytes)``, each from an ``align`` boundary to another; they never overlap."""

    def __init__(self, num_bytes: int, align: int = PAGE) -> None:
        self.num_bytes, self.align = num_bytes, align
        self._free_ranges: list[tuple[int, int]] = [(0, num_bytes)] if num_bytes else []
        self._allocated: dict[int, int] = {}

    def allocate(self, nbytes: int) -> int | None:
        """The offset of a fresh range of at least ``nbytes``, or None if no gap is large enough."""
        size = max(round_up(nbytes, self.align), self.align)
        for i, (start, stop) in enumerate(self._free_ranges):
            if stop - start >= size:
                remainder = (start + size, stop)
                self._free_ranges[i : i + 1] = [remainder] if remainder[0] < remainder[1] else []
                self._allocated[start] = size
                return start
        return None

    def free(self, offset: int) -> None:
        """Give the range that begins at ``offset`` back."""
        start, stop = offset, offset + self._allocated.pop(offset)
        i = bisect_left(self._free_ranges, (start, stop))
        if i < len(self._free_ranges) and self._free_ranges[i][0] == stop:
            stop = self._free_ranges.pop(i)[1]
        if i > 0 and self._free_ranges[i - 1][1] == start:
            i -= 1
            start = self._free_ranges.pop(i)[0]
        self._free_ranges.insert(i, (start, stop))

    def extend(self, num_bytes: int) -> None:
        """Add ``num_bytes`` (a multiple of ``align``) at the end."""
        start, self.num_bytes = self.num_bytes, self.num_bytes + num_bytes
        if self._free_ranges and self._free_ranges[-1][1] == start:
            start = self._free_ranges.pop()[0]
        self._free_ranges.append((start, self.num_bytes))

    @property
    def largest_gap(self) -> int:
        """Bytes of the largest range that could be had now."""
        return max((stop - start for start, stop in self._free_ranges), default=0)


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
        end = begin + len(starts)
        for index in range(min(end, len(self._starts) - 1), max(begin, 1) - 1, -1):
            if self._shifts[index] == self._shifts[index - 1]:  # neighbours with the same shift are one run
                del self._starts[index], self._shifts[index]

    def _split_at(self, offset: int) -> None:
        index = bisect_right(self._starts, offset) - 1
        if self._starts[index] != offset:
            self._starts.insert(index + 1, offset)
            self._shifts.insert(index + 1, self._shifts[index])
