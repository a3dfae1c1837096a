"""Bytes of one rank: what lives where, when, and how much of it the kernel counts.

A rank's resident memory on a CPU is made of

    process        the interpreter, torch and the libraries: there before the model
    the heap       shards, optimizer state, activations, gradients of units in flight; it only grows
    blocks apart   reduced gradients, one mapping a unit; the model as it was given
    the arena      homes and reduction slots, shared by the ranks of a host, counted in each that has
                   touched them

:func:`simulate` plays the events of a rehearsal through that, three windows long, since the
first one has no optimizer state yet and the second one meets a heap with holes.  On a GPU the
caching allocator has no such history: there the peak is the peak of what is alive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from thalweg.plan.heap import Heap
from thalweg.plan.rehearsal import Rehearsal, UnitSize, shard_bytes
from thalweg.plan.setting import Setting
from thalweg.plan.tape import Event

# glibc maps blocks from this size on apart, until `keep_freed_memory` stops that.
_MAP_THRESHOLD = 128 * 1024
# What a first step adds to a process that has imported everything: pages of torch's own code that
# are read for the first time, threads, Python's and autograd's objects.
FIRST_STEP_BYTES = 68 * 2**20


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


@dataclass
class Memory:
    """The result: the peak, and how a step gets there."""

    peak: PerRank
    timeline: list[Moment] = field(default_factory=list)
    counted_again: int = 0  # bytes that the ranks of a host share, as often as they are counted too many


class _Process:
    """The memory of one rank while events are played."""

    def __init__(self, process_bytes: int, heap: Heap | None) -> None:
        self.heap, self.process_bytes = heap, process_bytes
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

    def add(self, number: int, num_bytes: int, label: str) -> None:
        """A block of the heap."""
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

    def _look(self) -> None:
        """Remember what was alive when the heap last grew, and when the whole was largest."""
        top = self.heap.top if self.heap is not None else self._live
        if top > self._highest:
            self._highest, self._at_highest = top, dict(self.alive)
        if self.resident > self.peak:
            self.peak = self.resident
            self._apart_at_peak, self._heap_at_peak = dict(self.apart), (top, self._at_highest)

    def at_peak(self) -> PerRank:
        """The peak by what it is for; holes are what the heap holds beyond what is alive at its highest."""
        top, alive = self._heap_at_peak
        parts = Counter(alive) + Counter(self._apart_at_peak)
        named = {item.name: parts.pop(item.name, 0) for item in fields(PerRank)}
        named["activations"] += sum(parts.values())
        named["fragmentation"] = top - sum(alive.values())
        named["process"] = self.process_bytes
        return PerRank(**named)

    def note(self) -> None:
        """An entry of the timeline."""
        parts = self.alive + self.apart
        self.timeline.append(Moment(self.phase, dict(parts), self.resident))


def simulate(
    found: Rehearsal,
    setting: Setting,
    *,
    process_bytes: int = 0,
    given_bytes: Iterable[int] = (),
    steps: int = 3,
) -> Memory:
    """Play ``steps`` windows of the rehearsal on one rank.

    ``process_bytes``: resident before the model is there; ``given_bytes``: sizes of the
    parameters of the model that is handed to ``initialize`` (none for one on meta).
    """
    on_cpu = setting.ranks.device == "cpu"
    process = _Process(process_bytes + (FIRST_STEP_BYTES if on_cpu else 0), Heap() if on_cpu else None)
    _initialize(process, found, setting, list(given_bytes))
    slots = _Slots(process, found, setting)
    offset = 1 << 40
    for step in range(steps):
        offset = _play(process, found.window, offset, slots, watch=step == steps - 1)
        update = found.first_update if step == 0 else found.later_update
        offset = _play(process, update, offset, slots, watch=step == steps - 1)
        slots.end_of_window()
        if process.heap is not None:
            process.heap.settle()
    again = slots.counted_again
    if setting.placement == "shared":
        again += (setting.ranks.per_node - 1) * sum(slot.home_bytes for slot in found.slots.values())
    return Memory(process.at_peak(), process.timeline, again)


def _initialize(process: _Process, found: Rehearsal, setting: Setting, given: list[int]) -> None:
    """What ``zero.shard`` does: the given model is there, shards are made, full tensors go one by one."""
    number = 1
    for size in given:
        if size >= _MAP_THRESHOLD:
            process.map("parameters", size)
    shared, wide = setting.placement == "shared", setting.ranks.world_size > 1
    for slot in found.slots.values():
        if not shared or slot.master != slot.compute:
            process.add(-number, shard_bytes(slot), "parameters")
        if setting.placement == "private" and slot.master != slot.compute:
            process.add(-number - 1, slot.home_bytes, "gathered")
        number += 2
    before = 0
    for index, slot in enumerate(found.slots.values()):
        size = given[index] if index < len(given) else slot.padded_numel * slot.master.itemsize
        if wide:  # the copy that is broadcast; the last one goes when the next is on its way
            process.add(-number, size, "buffers")
            process.drop(before)
            before = -number
        if shared and slot.master == slot.compute:
            process.map("parameters", slot.home_bytes // slot.num_shards)
        if index < len(given) and size >= _MAP_THRESHOLD:
            process.map("parameters", -size)
        number += 1
    process.drop(before)
    if process.heap is not None:
        process.heap.seal()
    if shared:
        whole = sum(slot.home_bytes for slot in found.slots.values())
        own = sum(s.home_bytes // s.num_shards for s in found.slots.values() if s.master == s.compute)
        process.map("gathered", whole - own)
    process.add(-number, found.buffer_bytes + found.loose_bytes, "buffers")


class _Slots:
    """Memory that reductions touch and keep: slots of the arena, and the blocks of reduced gradients."""

    def __init__(self, process: _Process, found: Rehearsal, setting: Setting) -> None:
        self._process, self._setting = process, setting
        self._units: dict[str, UnitSize] = {unit.name: unit for unit in found.units}
        self._touched = [0, 0]
        self._sequence = 0
        self._blocks: Counter[str] = Counter()
        self._held: set[str] = set()

    def reduce(self, name: str) -> None:
        """One reduction of a unit's gradients."""
        unit, world = self._units[name], self._setting.ranks.world_size
        in_arena = world > 1 and self._setting.placement != "wire"
        if in_arena:
            place = self._sequence % 2
            more = max(0, unit.reduce_bytes - self._touched[place])
            self._touched[place] += more
            seen = world if self._setting.replicates else 1 + (world - 1) / world
            self._process.map("buffers", int(more * seen))
            self._sequence += 1
        needed = 2 if name in self._held else 1
        if needed > self._blocks[name]:
            self._process.map("gradients", unit.sharded_grad_bytes)
            self._blocks[name] = needed
        self._held.add(name)

    @property
    def counted_again(self) -> int:
        """What the slots of all ranks of the host add up to, less what they are."""
        world = self._setting.ranks.world_size
        return sum(self._touched) * (world - 1) * (world if self._setting.replicates else 1)

    def end_of_window(self) -> None:
        """Gradients are forgotten; the blocks stay."""
        self._held.clear()


def _play(process: _Process, events: list[Event], offset: int, slots: _Slots, watch: bool) -> int:
    highest = 0
    for number, num_bytes, label in events:
        if number > 0:
            process.add(offset + number, num_bytes, label)
            highest = max(highest, number)
        elif number < 0:
            process.drop(offset - number)
        elif label.startswith("reduce "):
            slots.reduce(label.removeprefix("reduce "))
        else:
            process.phase = label
            if label == "forward" and process.heap is not None:
                process.heap.settle()  # the graph of the micro-batch before is gone
        if watch:
            process.note()
    return offset + highest
