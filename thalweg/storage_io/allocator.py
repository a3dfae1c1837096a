"""Which bytes of a file or mapping are taken: first fit over a sorted list of gaps."""

from __future__ import annotations

import mmap
from bisect import bisect_left

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

    def free(self, offset: int) -> int:
        """Give the range that begins at ``offset`` back; returns its size."""
        size = self._allocated.pop(offset)
        start, stop = offset, offset + size
        i = bisect_left(self._free_ranges, (start, stop))
        if i < len(self._free_ranges) and self._free_ranges[i][0] == stop:
            stop = self._free_ranges.pop(i)[1]
        if i > 0 and self._free_ranges[i - 1][1] == start:
            i -= 1
            start = self._free_ranges.pop(i)[0]
        self._free_ranges.insert(i, (start, stop))
        return size

    def extend(self, num_bytes: int) -> None:
        """Add ``num_bytes`` (a multiple of ``align``) at the end."""
        self.num_bytes += num_bytes
        start = (
            self._free_ranges.pop()[0]
            if self._free_ranges and self._free_ranges[-1][1] == self.num_bytes - num_bytes
            else None
        )
        self._free_ranges.append((self.num_bytes - num_bytes if start is None else start, self.num_bytes))

    @property
    def free_bytes(self) -> int:
        """Bytes in all gaps."""
        return sum(stop - start for start, stop in self._free_ranges)

    @property
    def largest_gap(self) -> int:
        """Bytes of the largest range that could be had now."""
        return max((stop - start for start, stop in self._free_ranges), default=0)
