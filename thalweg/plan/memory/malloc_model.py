"""glibc's heap in miniature: how far it grows under a given order of mallocs and frees.

Freed blocks stay with the process (``device.retain_freed_memory``), so resident memory is
the highest address that the heap has reached, holes included, and not the sum of what is
alive.  What matters of ``malloc`` for blocks of tensor size, and is done here: best fit
by size, lowest address first; neighbours coalesce; the rest of a block is split off; the
top grows when nothing fits; torch asks for 64-byte alignment, for which glibc takes some
bytes more and frees the head and the tail again.  Small objects of Python and C++ live in
the same heap; they are not modelled one by one, but for what they do to these heads and tails:
the objects of the autograd graph settle there and stay until the graph is gone.  A hole left
by a tensor is then a few bytes too small for the next tensor of the same size, which is most
of the fragmentation (see :meth:`MallocModel.settle`).  Where units are checkpointed, fewer objects stay
(:attr:`MallocModel.share`).
"""

from __future__ import annotations

from bisect import bisect_left, insort

_TENSOR_ALIGN, _MALLOC_ALIGN, _HEADER, _MIN_CHUNK = 64, 16, 8, 32
_MAX_PINNED_BYTES = 256  # a head or tail that a small object takes


class MallocModel:
    """Addresses begin at 0; ``top`` is the highest one used so far; ``share``: of the heads and tails, how
    many a small object takes."""

    def __init__(self) -> None:
        self.high_water_mark = 0
        self.pinned_fraction, self._pin_credit = 1.0, 0.0
        self._top_chunk = 0  # where the untouched or coalesced rest begins
        self._holes_by_size: list[tuple[int, int]] = []
        self._hole_sizes: dict[int, int] = {}
        self._hole_starts: dict[int, int] = {}
        self._pinned: list[tuple[int, int]] = []

    def malloc(self, num_bytes: int) -> tuple[int, int]:
        """Take a block; returns (start, size) for :meth:`free`."""
        size = max(_MIN_CHUNK, -(-(num_bytes + _HEADER) // _MALLOC_ALIGN) * _MALLOC_ALIGN)
        requested = size + _TENSOR_ALIGN + _MIN_CHUNK
        index = bisect_left(self._holes_by_size, (requested, 0))
        if index < len(self._holes_by_size):
            length, start = self._holes_by_size[index]
            self._remove_hole(start, length)
        else:
            start, length = self._top_chunk, requested
            self._top_chunk = start + requested
            self.high_water_mark = max(self.high_water_mark, self._top_chunk)
        aligned = -(-(start + 2 * _HEADER) // _TENSOR_ALIGN) * _TENSOR_ALIGN - 2 * _HEADER
        if 0 < aligned - start < _MIN_CHUNK:
            aligned += _TENSOR_ALIGN
        if aligned > start:
            self._pin_or_free(start, aligned - start)
        remainder = start + length - (aligned + size)
        if remainder >= _MIN_CHUNK:
            self._pin_or_free(aligned + size, remainder)
        else:
            size += remainder
        return aligned, size

    def fits_without_growth(self, num_bytes: int) -> bool:
        """Whether a block of this size would fit without the heap growing."""
        requested = (
            max(_MIN_CHUNK, -(-(num_bytes + _HEADER) // _MALLOC_ALIGN) * _MALLOC_ALIGN) + _TENSOR_ALIGN + _MIN_CHUNK
        )
        return self.high_water_mark - self._top_chunk >= requested or (
            bool(self._holes_by_size) and self._holes_by_size[-1][0] >= requested
        )

    def free(self, block: tuple[int, int]) -> None:
        """Give a block back."""
        self._add_hole(*block)

    def free_pinned(self) -> None:
        """The graph of a window is gone, and with it what had settled in heads and tails."""
        for start, size in self._pinned:
            self._add_hole(start, size)
        self._pinned.clear()

    def free_pinned_since(self, count: int) -> None:
        """What has settled since :attr:`num_pinned` was ``count`` is gone."""
        for start, size in self._pinned[count:]:
            self._add_hole(start, size)
        del self._pinned[count:]

    @property
    def num_pinned(self) -> int:
        """Heads and tails that small objects hold now."""
        return len(self._pinned)

    def drop_small_holes(self, below_bytes: int) -> None:
        """Holes of fewer bytes that are there now are lost: long-lived small objects settle in them."""
        num_dropped = bisect_left(self._holes_by_size, (below_bytes, 0))
        for size, start in self._holes_by_size[:num_dropped]:
            del self._hole_sizes[start], self._hole_starts[start + size]
        del self._holes_by_size[:num_dropped]
        self._pinned.clear()

    @property
    def free_bytes(self) -> int:
        """Bytes in holes below the rest at the top."""
        return sum(size for size, _ in self._holes_by_size)

    def _pin_or_free(self, start: int, size: int) -> None:
        self._pin_credit += self.pinned_fraction if size <= _MAX_PINNED_BYTES else 0.0
        if size <= _MAX_PINNED_BYTES and self._pin_credit >= 1.0:
            self._pin_credit -= 1.0
            self._pinned.append((start, size))
        else:
            self._add_hole(start, size)

    def _add_hole(self, start: int, size: int) -> None:
        before = self._hole_starts.get(start)
        if before is not None:
            self._remove_hole(before, start - before)
            start, size = before, size + start - before
        after = self._hole_sizes.get(start + size)
        if after is not None:
            self._remove_hole(start + size, after)
            size += after
        if start + size == self._top_chunk:
            self._top_chunk = start
            return
        insort(self._holes_by_size, (size, start))
        self._hole_sizes[start] = size
        self._hole_starts[start + size] = start

    def _remove_hole(self, start: int, size: int) -> None:
        del self._holes_by_size[bisect_left(self._holes_by_size, (size, start))]
        del self._hole_sizes[start]
        del self._hole_starts[start + size]
