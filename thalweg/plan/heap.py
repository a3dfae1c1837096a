"""glibc's heap in miniature: how far it grows under a given order of mallocs and frees.

Freed blocks stay with the process (``device.keep_freed_memory``), so resident memory is
the highest address that the heap has reached, holes included, and not the sum of what is
alive.  What matters of ``malloc`` for blocks of tensor size, and is done here: best fit
by size, lowest address first; neighbours coalesce; the rest of a block is split off; the
top grows when nothing fits; torch asks for 64-byte alignment, for which glibc takes some
bytes more and frees the head and the tail again.  Small objects of Python and C++ live in
the same heap; they are not modelled one by one, but for what they do to these heads and tails:
the objects of the autograd graph settle there and stay until the graph is gone.  A hole left
by a tensor is then a few bytes too small for the next tensor of the same size, which is most
of the fragmentation (see :meth:`Heap.settle`).  Where units are checkpointed, fewer objects stay
(:attr:`Heap.share`).
"""

from __future__ import annotations

from bisect import bisect_left, insort

_ALIGN, _UNIT, _HEADER, _LEAST = 64, 16, 8, 32
_SMALL = 256  # a head or tail that a small object takes


class Heap:
    """Addresses begin at 0; ``top`` is the highest one used so far; ``share``: of the heads and tails, how
    many a small object takes."""

    def __init__(self) -> None:
        self.top = 0
        self.share, self._due = 1.0, 0.0
        self._end = 0  # where the untouched or coalesced rest begins
        self._by_size: list[tuple[int, int]] = []
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._taken: list[tuple[int, int]] = []

    def malloc(self, num_bytes: int) -> tuple[int, int]:
        """Take a block; returns (start, size) for :meth:`free`."""
        size = max(_LEAST, -(-(num_bytes + _HEADER) // _UNIT) * _UNIT)
        asked = size + _ALIGN + _LEAST
        found = bisect_left(self._by_size, (asked, 0))
        if found < len(self._by_size):
            length, start = self._by_size[found]
            self._remove(start, length)
        else:
            start, length = self._end, asked
            self._end = start + asked
            self.top = max(self.top, self._end)
        aligned = -(-(start + 2 * _HEADER) // _ALIGN) * _ALIGN - 2 * _HEADER
        if 0 < aligned - start < _LEAST:
            aligned += _ALIGN
        if aligned > start:
            self._put_aside(start, aligned - start)
        rest = start + length - (aligned + size)
        if rest >= _LEAST:
            self._put_aside(aligned + size, rest)
        else:
            size += rest
        return aligned, size

    def has_room(self, num_bytes: int) -> bool:
        """Whether a block of this size would fit without the heap growing."""
        asked = max(_LEAST, -(-(num_bytes + _HEADER) // _UNIT) * _UNIT) + _ALIGN + _LEAST
        return self.top - self._end >= asked or (bool(self._by_size) and self._by_size[-1][0] >= asked)

    def free(self, block: tuple[int, int]) -> None:
        """Give a block back."""
        self._give(*block)

    def settle(self) -> None:
        """The graph of a window is gone, and with it what had settled in heads and tails."""
        for start, size in self._taken:
            self._give(start, size)
        self._taken.clear()

    def settle_since(self, count: int) -> None:
        """What has settled since :attr:`num_settled` was ``count`` is gone."""
        for start, size in self._taken[count:]:
            self._give(start, size)
        del self._taken[count:]

    @property
    def num_settled(self) -> int:
        """Heads and tails that small objects hold now."""
        return len(self._taken)

    def seal(self, below: int) -> None:
        """Holes of fewer bytes that are there now are lost: long-lived small objects settle in them."""
        lost = bisect_left(self._by_size, (below, 0))
        for size, start in self._by_size[:lost]:
            del self._starts[start], self._ends[start + size]
        del self._by_size[:lost]
        self._taken.clear()

    @property
    def free_bytes(self) -> int:
        """Bytes in holes below the rest at the top."""
        return sum(size for size, _ in self._by_size)

    def _put_aside(self, start: int, size: int) -> None:
        self._due += self.share if size <= _SMALL else 0.0
        if size <= _SMALL and self._due >= 1.0:
            self._due -= 1.0
            self._taken.append((start, size))
        else:
            self._give(start, size)

    def _give(self, start: int, size: int) -> None:
        before = self._ends.get(start)
        if before is not None:
            self._remove(before, start - before)
            start, size = before, size + start - before
        after = self._starts.get(start + size)
        if after is not None:
            self._remove(start + size, after)
            size += after
        if start + size == self._end:
            self._end = start
            return
        insort(self._by_size, (size, start))
        self._starts[start] = size
        self._ends[start + size] = start

    def _remove(self, start: int, size: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, start))]
        del self._starts[start]
        del self._ends[start + size]
