"""One rank's memory while events are played: a heap, separate mappings, and the peak."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields

from thalweg.plan.memory.malloc_model import MallocModel

_MMAPPED = (-1, -1)


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


@dataclass
class MemorySample:
    """The timeline's entry: where the step is, what is alive by label, what is resident."""

    phase: str
    live_bytes: dict[str, int]
    resident_bytes: int


class RankMemory:
    """The memory of one rank while events are played."""

    def __init__(self, process_bytes: int, heap: MallocModel | None, mmap_threshold: int | None = None) -> None:
        self.heap, self.process_bytes, self._mmap_threshold = heap, process_bytes, mmap_threshold
        self.live_bytes: Counter[str] = Counter()
        self.mmapped_bytes: Counter[str] = Counter()
        self.peak_bytes, self._heap_peak = 0, 0
        self._live_at_heap_peak: dict[str, int] = {}
        self._mmapped_at_peak: dict[str, int] = {}
        self._heap_at_peak: tuple[int, dict[str, int]] = (0, {})
        self.timeline: list[MemorySample] = []
        self._allocations: dict[int, tuple[tuple[int, int], int, str]] = {}
        self._total_live_bytes = 0
        self.phase = "initialize"
        self.segments: dict[str, MemoryBreakdown] = {}
        self._segment = ""
        self._segment_peak, self._state_at_segment_peak = 0, (0, {}, {})

    def allocate(self, storage_id: int, num_bytes: int, label: str) -> None:
        """A block of the heap."""
        fits_in_hole = self.heap is not None and self.heap.fits_without_growth(num_bytes)  # glibc looks there first
        if (
            self._mmap_threshold is not None and num_bytes >= self._mmap_threshold and not fits_in_hole
        ):  # a mapping of its own
            self._allocations[storage_id] = (_MMAPPED, num_bytes, label)
            self.adjust_mmapped(label, num_bytes)
            return
        block = self.heap.malloc(num_bytes) if self.heap is not None and num_bytes else (0, 0)
        self._allocations[storage_id] = (block, num_bytes, label)
        self.live_bytes[label] += num_bytes
        self._total_live_bytes += num_bytes
        self._update_peak()

    def free(self, storage_id: int) -> None:
        """The block is free again."""
        if storage_id not in self._allocations:
            return
        block, num_bytes, label = self._allocations.pop(storage_id)
        if block is _MMAPPED:
            self.adjust_mmapped(label, -num_bytes)
            return
        if self.heap is not None and num_bytes:
            self.heap.free(block)
        self.live_bytes[label] -= num_bytes
        self._total_live_bytes -= num_bytes

    def adjust_mmapped(self, label: str, num_bytes: int) -> None:
        """Memory mapped outside the heap (negative: given back to the kernel)."""
        self.mmapped_bytes[label] += num_bytes
        self._update_peak()

    @property
    def resident_bytes(self) -> int:
        """What the kernel counts now."""
        heap_bytes = self.heap.high_water_mark if self.heap is not None else self._total_live_bytes
        return self.process_bytes + heap_bytes + sum(self.mmapped_bytes.values())

    def begin_segment(self, segment: str) -> None:
        """A segment of the run begins: its own peak goes to :attr:`segments`."""
        self.end_segment()
        self._segment, self._segment_peak = segment, 0
        self._update_peak()

    def end_segment(self) -> None:
        """The segment that began last is over."""
        if self._segment:
            self.segments[self._segment] = self._make_breakdown(*self._state_at_segment_peak)
            self._segment = ""

    def _update_peak(self) -> None:
        """Remember what was alive when the heap last grew, and when the total was largest."""
        top = self.heap.high_water_mark if self.heap is not None else self._total_live_bytes
        if top > self._heap_peak:
            self._heap_peak, self._live_at_heap_peak = top, dict(self.live_bytes)
        resident_bytes = self.resident_bytes
        if resident_bytes > self.peak_bytes:
            self.peak_bytes = resident_bytes
            self._mmapped_at_peak, self._heap_at_peak = (dict(self.mmapped_bytes), (top, self._live_at_heap_peak))
        if self._segment and resident_bytes > self._segment_peak:
            alive = self._live_at_heap_peak if self.heap is not None else dict(self.live_bytes)
            self._segment_peak, self._state_at_segment_peak = (resident_bytes, (top, alive, dict(self.mmapped_bytes)))

    def breakdown_at_peak(self) -> MemoryBreakdown:
        """The peak by what it is for; holes are what the heap holds beyond what is alive at its highest."""
        return self._make_breakdown(*self._heap_at_peak, self._mmapped_at_peak)

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
