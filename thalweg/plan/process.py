"""One rank's memory while events are played: a heap, mappings apart from it, and its highest."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields

from thalweg.plan.heap import Heap

_APART = (-1, -1)


@dataclass(frozen=True)
class PerRank:
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
class Moment:
    """The timeline's entry: where the step is, what is alive by label, what is resident."""

    phase: str
    alive: dict[str, int]
    resident: int


class Process:
    """The memory of one rank while events are played."""

    def __init__(self, process_bytes: int, heap: Heap | None, large: int | None = None) -> None:
        self.heap, self.process_bytes, self._large = heap, process_bytes, large
        self.alive: Counter[str] = Counter()
        self.apart: Counter[str] = Counter()
        self.peak, self._highest = 0, 0
        self._at_highest: dict[str, int] = {}
        self._apart_at_peak: dict[str, int] = {}
        self._heap_at_peak: tuple[int, dict[str, int]] = (0, {})
        self.timeline: list[Moment] = []
        self._blocks: dict[int, tuple[tuple[int, int], int, str]] = {}
        self._live = 0
        self.phase = "initialize"
        self.stretches: dict[str, PerRank] = {}
        self._stretch = ""
        self._stretch_peak, self._at_stretch = 0, (0, {}, {})

    def add(self, number: int, num_bytes: int, label: str) -> None:
        """A block of the heap."""
        fits = self.heap is not None and self.heap.has_room(num_bytes)  # glibc looks there first
        if self._large is not None and num_bytes >= self._large and not fits:  # a mapping of its own
            self._blocks[number] = (_APART, num_bytes, label)
            self.map(label, num_bytes)
            return
        block = self.heap.malloc(num_bytes) if self.heap is not None and num_bytes else (0, 0)
        self._blocks[number] = (block, num_bytes, label)
        self.alive[label] += num_bytes
        self._live += num_bytes
        self._look()

    def drop(self, number: int) -> None:
        """The block is free again."""
        if number not in self._blocks:
            return
        block, num_bytes, label = self._blocks.pop(number)
        if block is _APART:
            self.map(label, -num_bytes)
            return
        if self.heap is not None and num_bytes:
            self.heap.free(block)
        self.alive[label] -= num_bytes
        self._live -= num_bytes

    def map(self, label: str, num_bytes: int) -> None:
        """Memory apart from the heap (negative: given back to the kernel)."""
        self.apart[label] += num_bytes
        self._look()

    @property
    def resident(self) -> int:
        """What the kernel counts now."""
        own = self.heap.top if self.heap is not None else self._live
        return self.process_bytes + own + sum(self.apart.values())

    def begin(self, stretch: str) -> None:
        """A stretch of the run begins: its peak is kept apart in :attr:`stretches`."""
        self.end_stretch()
        self._stretch, self._stretch_peak = stretch, 0
        self._look()

    def end_stretch(self) -> None:
        """The stretch that began last is over."""
        if self._stretch:
            self.stretches[self._stretch] = self._parts(*self._at_stretch)
            self._stretch = ""

    def _look(self) -> None:
        """Remember what was alive when the heap last grew, and when the whole was largest."""
        top = self.heap.top if self.heap is not None else self._live
        if top > self._highest:
            self._highest, self._at_highest = top, dict(self.alive)
        resident = self.resident
        if resident > self.peak:
            self.peak = resident
            self._apart_at_peak, self._heap_at_peak = dict(self.apart), (top, self._at_highest)
        if self._stretch and resident > self._stretch_peak:
            alive = self._at_highest if self.heap is not None else dict(self.alive)
            self._stretch_peak, self._at_stretch = resident, (top, alive, dict(self.apart))

    def at_peak(self) -> PerRank:
        """The peak by what it is for; holes are what the heap holds beyond what is alive at its highest."""
        return self._parts(*self._heap_at_peak, self._apart_at_peak)

    def _parts(self, top: int, alive: dict[str, int], apart: dict[str, int]) -> PerRank:
        parts = Counter(alive) + Counter(apart)
        named = {item.name: parts.pop(item.name, 0) for item in fields(PerRank)}
        named["activations"] += sum(parts.values())
        named["fragmentation"] = top - sum(alive.values())
        named["process"] = self.process_bytes
        return PerRank(**named)

    def note(self) -> None:
        """An entry of the timeline."""
        parts = self.alive + self.apart
        self.timeline.append(Moment(self.phase, dict(parts), self.resident))
