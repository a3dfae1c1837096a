"""One rank's memory while events are played: a heap, separate mappings, and the peak."""

import bisect
from collections import Counter
from dataclasses import dataclass, fields, replace

_MemoryState = tuple[int, dict[str, int], dict[str, int]]  # bytes of the heap; alive in it, and mapped, by label


@dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes of one rank at its peak, by what they are for."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    buffers: int = 0
    activations: int = 0
    logits: int = 0
    fragmentation: int = 0
    process: int = 0

    @property
    def total(self) -> int:
        """The sum: what VmHWM (or the device's allocator) shows."""
        return sum(getattr(self, item.name) for item in fields(self))


_MIB = 2**20


class CachingAllocator:
    """Where torch's caching allocator puts blocks on a device, and so how many bytes it cannot give back.

    The rules of ``c10/cuda/CUDACachingAllocator.cpp`` for one stream, without expandable segments: blocks of up to 1
    MiB share segments of 2 MiB, those below 10 MiB segments of 20 MiB, larger ones have one of their own, rounded up to
    2 MiB; the smallest free block that is large enough is taken, and split where what is left is worth it; neighbours
    join when they are freed.  Segments that are wholly free do not count: they go back before memory runs out.
    """

    _SMALL, _SMALL_SEGMENT, _LARGE, _LARGE_SEGMENT, _ROUND = _MIB, 2 * _MIB, 10 * _MIB, 20 * _MIB, 2 * _MIB

    def __init__(self) -> None:
        self.held_bytes = 0
        # Free blocks by size: (bytes, segment, begin), of segments of small blocks and of others.
        self._free: tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]] = ([], [])
        self._segments: list[tuple[int, dict[int, int], dict[int, int]]] = []  # bytes; free blocks by begin, by end
        self._used: dict[int, tuple[int, int, int, bool]] = {}

    def allocate(self, storage_id: int, num_bytes: int) -> None:
        """A block of this many bytes."""
        size = max(512, -(-num_bytes // 512) * 512)
        small = size <= self._SMALL
        free = self._free[small]
        index = bisect.bisect_left(free, (size, 0, 0))
        if index == len(free):
            whole = self._LARGE_SEGMENT if size < self._LARGE else -(-size // self._ROUND) * self._ROUND
            whole = self._SMALL_SEGMENT if small else whole
            self._segments.append((whole, {}, {}))
            self._add_free(small, len(self._segments) - 1, 0, whole)
            index = bisect.bisect_left(free, (size, 0, 0))
        found, segment, begin = free[index]
        self._take_free(small, segment, begin, found)
        if found == self._segments[segment][0]:
            self.held_bytes += found
        if found - size >= 512 if small else found - size > self._SMALL:
            self._add_free(small, segment, begin + size, found - size)
            found = size
        self._used[storage_id] = (segment, begin, found, small)

    def free(self, storage_id: int) -> None:
        """The block is free again; one that is not known is let be."""
        if storage_id not in self._used:
            return
        segment, begin, size, small = self._used.pop(storage_id)
        whole, by_begin, by_end = self._segments[segment]
        if (after := by_begin.get(begin + size)) is not None:
            self._take_free(small, segment, begin + size, after)
            size += after
        if (before := by_end.get(begin)) is not None:
            self._take_free(small, segment, begin - before, before)
            begin, size = begin - before, size + before
        self._add_free(small, segment, begin, size)
        if size == whole:
            self.held_bytes -= whole

    def _add_free(self, small: bool, segment: int, begin: int, size: int) -> None:
        bisect.insort(self._free[small], (size, segment, begin))
        _, by_begin, by_end = self._segments[segment]
        by_begin[begin] = by_end[begin + size] = size

    def _take_free(self, small: bool, segment: int, begin: int, size: int) -> None:
        free = self._free[small]
        del free[bisect.bisect_left(free, (size, segment, begin))]
        _, by_begin, by_end = self._segments[segment]
        del by_begin[begin], by_end[begin + size]


@dataclass
class MemorySample:
    """The timeline's entry: where the step is, what is alive by label, what is resident."""

    phase: str
    live_bytes: dict[str, int]
    resident_bytes: int


class RankMemory:
    """The memory of one rank while events are played.

    ``heap_factor``: how large a heap is against the most that was ever alive in it, as glibc gives little back; None
    for a device, where memory that is free is given to others, but for the holes that its allocator leaves.
    """

    def __init__(self, process_bytes: int, heap_factor: float | None, mmap_threshold: int | None = None) -> None:
        self.process_bytes, self._heap_factor, self._mmap_threshold = process_bytes, heap_factor, mmap_threshold
        self._device, self._peak_held_bytes = CachingAllocator() if heap_factor is None else None, 0
        self.live_bytes: Counter[str] = Counter()
        self.mmapped_bytes: Counter[str] = Counter()
        self._segment = ""
        # By segment of the run, what was resident at its peak, and of what.
        self._peaks: dict[str, tuple[int, _MemoryState]] = {"": (0, (0, {}, {}))}
        self.timeline: list[MemorySample] = []
        self._allocations: dict[int, tuple[int, str, bool]] = {}
        self._num_live_bytes = self._highest_live_bytes = 0
        self._live_at_highest: dict[str, int] = {}
        self.phase = "initialize"

    def allocate(self, storage_id: int, num_bytes: int, label: str) -> None:
        """A block of the heap; a large one is a mapping of its own, but where it fits into what is free."""
        fits = self._num_live_bytes + num_bytes <= self._highest_live_bytes
        is_mapping = self._mmap_threshold is not None and num_bytes >= self._mmap_threshold and not fits
        self._allocations[storage_id] = (num_bytes, label, is_mapping)
        if self._device is not None:
            self._device.allocate(storage_id, num_bytes)
        self._adjust(num_bytes, label, is_mapping)

    def free(self, storage_id: int) -> None:
        """The block is free again."""
        if storage_id in self._allocations:
            num_bytes, label, is_mapping = self._allocations.pop(storage_id)
            if self._device is not None:
                self._device.free(storage_id)
            self._adjust(-num_bytes, label, is_mapping)

    def adjust_mmapped(self, label: str, num_bytes: int) -> None:
        """Memory mapped outside the heap (negative: given back to the kernel)."""
        self._adjust(num_bytes, label, True)

    def _adjust(self, num_bytes: int, label: str, is_mapping: bool) -> None:
        if is_mapping:
            self.mmapped_bytes[label] += num_bytes
        else:
            self.live_bytes[label] += num_bytes
            self._num_live_bytes += num_bytes
            if self._num_live_bytes > self._highest_live_bytes:
                self._highest_live_bytes, self._live_at_highest = self._num_live_bytes, dict(self.live_bytes)
        if num_bytes > 0:
            self._update_peak()
            if self._device is not None:
                mapped_bytes = sum(self.mmapped_bytes.values())
                self._peak_held_bytes = max(self._peak_held_bytes, self._device.held_bytes + mapped_bytes)

    @property
    def _heap_bytes(self) -> int:
        factor = self._heap_factor
        return self._num_live_bytes if factor is None else round(factor * self._highest_live_bytes)

    @property
    def resident_bytes(self) -> int:
        """What the kernel counts now."""
        return self.process_bytes + self._heap_bytes + sum(self.mmapped_bytes.values())

    def begin_segment(self, segment: str) -> None:
        """A segment of the run begins: its own peak goes to :attr:`segments`."""
        self._segment = segment
        self._update_peak()

    def _update_peak(self) -> None:
        """Remember what was alive when the heap was largest, and what was mapped when the total was."""
        resident_bytes = self.resident_bytes
        if self._segment in self._peaks and resident_bytes <= self._peaks[self._segment][0]:
            return
        alive = dict(self.live_bytes) if self._device is not None else self._live_at_highest
        self._peaks[self._segment] = resident_bytes, (self._heap_bytes, alive, dict(self.mmapped_bytes))

    @property
    def segments(self) -> dict[str, MemoryBreakdown]:
        """The peak of each segment by what it is for."""
        return {name: self._make_breakdown(*state) for name, (_, state) in self._peaks.items() if name}

    def breakdown_at_peak(self) -> MemoryBreakdown:
        """The peak by what it is for; holes are what the heap, or a device's allocator, holds at its highest beyond
        what is alive at its highest."""
        peak_bytes, state = max(self._peaks.values(), key=lambda peak: peak[0])
        parts = self._make_breakdown(*state)
        if self._device is None:
            return parts
        holes = self.process_bytes + self._peak_held_bytes - peak_bytes
        return replace(parts, fragmentation=max(0, holes))

    def _make_breakdown(self, top: int, live_bytes: dict[str, int], mmapped_bytes: dict[str, int]) -> MemoryBreakdown:
        by_label = Counter(live_bytes) + Counter(mmapped_bytes)
        named = {item.name: by_label.pop(item.name, 0) for item in fields(MemoryBreakdown)}
        named["activations"] += sum(by_label.values())
        named["fragmentation"] = top - sum(live_bytes.values())
        named["process"] = self.process_bytes
        return MemoryBreakdown(**named)

    def record_sample(self) -> None:
        """An entry of the timeline."""
        by_label = self.live_bytes + self.mmapped_bytes
        self.timeline.append(MemorySample(self.phase, dict(by_label), self.resident_bytes))
