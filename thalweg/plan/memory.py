"""Bytes of one rank: what lives where, when, and how much of it the kernel counts.

A rank's resident memory on a CPU is made of

    process        the interpreter, torch and the libraries: there before the model
    the heap       shards, optimizer state, activations, gradients of units in flight; it only grows
    blocks apart   reduced gradients, one mapping a unit; the model as it was given; with tiers on a disk,
                   every large tensor, units read from the disk, and the buffers of the update
    the arena      homes and reduction slots, shared by the ranks of a host, counted in each that has
                   touched them

:func:`simulate` plays the events of a rehearsal through that, three windows long, since the
first one has no optimizer state yet and the second one meets a heap with holes.  On a GPU the
caching allocator has no such history: there the peak is the peak of what is alive.

What rests on the disk (and, of a GPU's states, on the host) is added up beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

from thalweg.device import LARGE_BLOCK
from thalweg.plan.heap import Heap
from thalweg.plan.pages import OnDisk, Pages, Streamed, stream
from thalweg.plan.process import Moment, PerRank, Process
from thalweg.plan.reductions import Reductions
from thalweg.plan.rehearsal import MICROS_TRACED, Rehearsal, shard_bytes
from thalweg.plan.setting import Setting
from thalweg.plan.tape import Event
from thalweg.store.regions import round_up
from thalweg.zero.homes import Slot
from thalweg.zero.offload import CHUNK_BYTES

# glibc maps blocks from this size on apart, until `keep_freed_memory` stops that.
_MAP_THRESHOLD = 128 * 1024
# `remat/offload.py: DiskSaver` takes room on the disk in pieces of this size.
_SEGMENT_BYTES = 2**28
# What a first step adds to a process that has imported everything, by the kind of mapping (smaps before and
# after three steps, nine runs): pages of torch's own code that are read for the first time; Python's own
# arenas and threads' stacks; small objects that stay in the heap.
_CODE_PAGES, _PYTHON_BYTES, _SMALL_OBJECTS = 29 * 2**20, 22 * 2**20, 22 * 2**20
FIRST_STEP_BYTES = _CODE_PAGES + _PYTHON_BYTES + _SMALL_OBJECTS
# Of the objects of a graph, those that stay through the forward pass of checkpointed units: between all and
# none, as the addresses of real tensors show; five runs are met within 6%.
_KEPT_SHARE = 1 / 2
# Larger holes that setting up leaves are there for the steps.
_LOST_BELOW = 4 << 20


@dataclass
class Memory:
    """The result: the peak, and how a step gets there.

    ``counted_again``: bytes that the ranks of a host share, as often as they are counted too many;
    ``host_bytes``: what a GPU's rank holds on the host; ``disk_bytes``: its swap file; ``disk_read``,
    ``disk_written``: bytes of one step; ``stretches``: the peak between one mark of the run and the next.
    """

    peak: PerRank
    timeline: list[Moment] = field(default_factory=list)
    counted_again: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    disk_read: int = 0
    disk_written: int = 0
    stretches: dict[str, PerRank] = field(default_factory=dict)


def simulate(
    found: Rehearsal,
    setting: Setting,
    *,
    process_bytes: int = 0,
    given_bytes: Iterable[int] = (),
    steps: int = 3,
    keeps_up: bool = False,
) -> Memory:
    """Play ``steps`` windows of the rehearsal on one rank.

    ``process_bytes``: resident before the model is there; ``given_bytes``: sizes of the
    parameters of the model that is handed to ``initialize`` (none for one on meta); ``keeps_up``: the disk
    is faster than the backward pass, so that hardly any gradient waits for its update.
    """
    heap = Heap() if setting.on_cpu else None
    large = LARGE_BLOCK if setting.on_cpu and setting.memory_is_short else None
    process = Process(process_bytes + (FIRST_STEP_BYTES if setting.on_cpu else 0), heap, large)
    run = _Run(process, found, setting, keeps_up)
    run.initialize(list(given_bytes))
    for step in range(steps):
        run.step(first=step == 0, watch=step == steps - 1)
    again = run.reductions.counted_again
    if setting.placement == "shared":
        resident = sum(slot.home_bytes for name, slot in found.slots.items() if name not in run.on_disk)
        again += (setting.span.per_node - 1) * resident
    process.end_stretch()
    memory = Memory(process.at_peak(), process.timeline, again, stretches=process.stretches)
    memory.host_bytes, memory.disk_bytes = run.host_bytes, run.disk_bytes
    memory.disk_read, memory.disk_written = run.disk_read, run.streamed.written_bytes + run.spilled
    if setting.inputs_on == "nvme":
        moved = found.put_away_bytes * setting.accumulation // min(setting.accumulation, MICROS_TRACED)
        memory.disk_bytes += round_up(found.away_bytes, _SEGMENT_BYTES)
        memory.disk_read, memory.disk_written = memory.disk_read + moved, memory.disk_written + moved
    return memory


class _Run:
    """One rank: what it sets up, and what each step does to it."""

    def __init__(self, process: Process, found: Rehearsal, setting: Setting, keeps_up: bool) -> None:
        self.process, self.found, self.setting = process, found, setting
        self.reductions = Reductions(process, found.units, setting, keeps_up)
        self.on_disk = {key for unit in found.units if unit.name in found.paged for key in unit.names}
        members = {
            unit.name: [found.slots[key] for key in unit.names]
            for unit in found.units
            if unit.name in found.paged
        }
        # A GPU's units come through the host: they are no part of the device's memory.
        self.pages = Pages(Process(0, None) if setting.states_on_host else process, members, setting)
        self.streamed = self._stream()
        self.spilled = 0
        if setting.spills and not setting.updates_early:
            self.spilled = sum(unit.sharded_grad_bytes for unit in found.units if unit.trains)
        self.disk_bytes, self.disk_read = self._disk_bytes(), 0
        self.host_bytes = self._host_bytes()
        self._offset = 1 << 40
        self._of_graph = 0
        self._begun: Counter[str] = Counter()

    def initialize(self, given: list[int]) -> None:
        """What ``zero.shard`` does: the given model is there, shards are made, full tensors go one by one."""
        process, found, setting = self.process, self.found, self.setting
        process.begin("1\tinitialize\t\t")
        for size in given:
            if size >= _MAP_THRESHOLD:
                process.map("parameters", size)
        shared, wide = setting.placement == "shared", setting.ranks.world_size > 1
        slots = {name: slot for name, slot in found.slots.items() if name not in self.on_disk}
        number = 1
        for slot in slots.values() if not setting.states_on_host else ():
            if (not shared or slot.master != slot.compute) and not setting.master_leaves(slot):
                process.add(-number, shard_bytes(slot), "parameters")
            if setting.placement == "private" and slot.master != slot.compute:
                process.add(-number - 1, slot.home_bytes, "gathered")
            number += 2
        before = 0
        for index, (name, slot) in enumerate(found.slots.items()):
            size = given[index] if index < len(given) else slot.padded_numel * slot.master.itemsize
            if wide:  # the copy that is broadcast; the last one goes when the next is on its way
                process.add(-number, size, "buffers")
                process.drop(before)
                before = -number
            if name in self.on_disk or setting.master_leaves(slot):
                # Written through two buffers, whose pages go at once.
                writer = min(2 * CHUNK_BYTES, shard_bytes(slot))
                process.map("buffers", writer)
                process.map("buffers", -writer)
            elif shared and slot.master == slot.compute:
                process.map("parameters", slot.home_bytes // slot.num_shards)
            if index < len(given) and size >= _MAP_THRESHOLD:
                process.map("parameters", -size)
            number += 1
        process.drop(before)
        if process.heap is not None:
            process.heap.seal(below=_LOST_BELOW)
        if shared:
            whole = sum(slot.home_bytes for slot in slots.values())
            own = sum(s.home_bytes // s.num_shards for s in slots.values() if s.master == s.compute)
            process.map("gathered", whole - own)
        process.add(-number, found.buffer_bytes + found.loose_bytes, "buffers")

    def step(self, first: bool, watch: bool) -> None:
        """A window and its update."""
        read = self.pages.read_bytes
        self._play(self.found.window, watch)
        self.pages.end_of_window()
        if first and not self.setting.states_on_host:
            self.process.map("buffers", self.streamed.buffer_bytes + self._left_by_first_update())
        self._play(self._update(first), watch)
        self.reductions.end_of_window()
        if self.process.heap is not None:
            self.process.heap.settle()
        self.disk_read = self.pages.read_bytes - read + self.streamed.read_bytes

    def _left_by_first_update(self) -> int:
        """What the heap of the updating thread keeps of the state it has made, before that is written."""
        if not (self.setting.updates_early and self.setting.states.device == "nvme"):
            return 0
        dtypes = self.found.state_dtypes
        made = (
            [prod(slot.padded_shape) * dtype.itemsize for _, slot in unit for dtype in dtypes]
            for unit in self._trained()
        )
        return max((sum(size for size in unit if size < LARGE_BLOCK) for unit in made), default=0)

    def _update(self, first: bool) -> list[Event]:
        events = self.found.first_update if first else self.found.later_update
        elsewhere = self.setting.states_on_host or self.setting.states.device == "nvme"
        if elsewhere and self.setting.elementwise:  # made, kept and worked on elsewhere
            return [event for event in events if event[0] == 0]
        return events

    def _play(self, events: list[Event], watch: bool) -> None:
        process, highest, offset = self.process, 0, self._offset
        for number, num_bytes, label in events:
            if number > 0:
                process.add(offset + number, num_bytes, label)
                highest = max(highest, number)
            elif number < 0:
                process.drop(offset - number)
            else:
                self._mark(label)
            if watch:
                process.note()
        self._offset = offset + highest

    def _mark(self, label: str) -> None:
        verb, _, name = label.partition(" ")
        if verb not in ("open", "close", "ahead", "gather"):
            key = f"{self.process.phase}\t{verb}\t{name}"
            self._begun[key] += 1
            self.process.begin(f"{self._begun[key]}\t{key}")
        if verb == "enter":
            return
        if verb == "kept":
            if self.process.heap is not None:
                self.process.heap.settle_since(self._of_graph)
        elif verb in ("reduce", "last"):
            if not self.setting.states_on_host:
                self.reductions.reduce(name, verb == "last")
            if self.process.heap is not None:  # objects of a unit's backward pass go with it
                self.process.heap.settle_since(self._of_graph)
            if verb == "last" and self.setting.updates_early and name in self.pages.pages:
                self.pages.leave(name)
        elif verb == "gather":
            self.reductions.gather(name)
        elif verb in ("open", "close", "ahead"):
            self.pages.follow(verb, name)
        else:
            self.process.phase = label
            heap = self.process.heap
            if label == "forward":
                self.pages.pager.end_pass()
                if heap is not None:
                    heap.settle()  # the graph of the micro-batch before is gone
            if heap is not None:
                checkpointed = label == "forward" and self.setting.remat.policy == "full"
                self._of_graph, heap.share = heap.num_settled, _KEPT_SHARE if checkpointed else 1.0

    # What rests on a disk

    def _where(self, name: str, slot: Slot) -> OnDisk:
        on_disk, paged = self.setting.states.device == "nvme", name in self.on_disk
        master = paged or self.setting.master_leaves(slot)
        return OnDisk(master, on_disk and not self.setting.updates_early, on_disk, copy=paged)

    def _trained(self) -> list[list[tuple[str, Slot]]]:
        """The trained parameters, unit by unit."""
        found = self.found
        return [
            [(key, found.slots[key]) for key in unit.names if key not in found.frozen]
            for unit in found.units
            if unit.trains
        ]

    def _stream(self) -> Streamed:
        setting = self.setting
        if not setting.elementwise or not (setting.states.device == "nvme" or self.on_disk):
            return Streamed()
        updates = [[(slot, self._where(name, slot)) for name, slot in members] for members in self._trained()]
        if not setting.updates_early:
            updates = [[pair for members in updates for pair in members]]
        return stream(updates, self.found.state_dtypes, setting)

    def _disk_bytes(self) -> int:
        total = 0
        for name, slot in self.found.slots.items():
            numel, paged = prod(slot.padded_shape), name in self.on_disk
            if paged:
                total += round_up(numel * slot.compute.itemsize)
            if self.setting.master_leaves(slot) or (paged and slot.master != slot.compute):
                total += round_up(numel * slot.master.itemsize)
        if self.setting.states.device == "nvme":
            for _, slot in (pair for members in self._trained() for pair in members):
                sizes = [slot.master.itemsize, *(dtype.itemsize for dtype in self.found.state_dtypes)]
                total += sum(round_up(prod(slot.padded_shape) * size) for size in sizes)
            if self.setting.updates_early:  # second places for all that an update writes
                total += self.streamed.written_bytes
        return total

    def _host_bytes(self) -> int:
        """What a GPU's rank keeps on the host: masters, gradients, state, units that come from a disk."""
        away = self.found.away_bytes if self.setting.inputs_on == "cpu" else 0
        if not self.setting.states_on_host:
            return away
        total = away + sum(shard_bytes(s) for name, s in self.found.slots.items() if name not in self.on_disk)
        total += sum(unit.sharded_grad_bytes for unit in self.found.units if unit.trains)
        if self.setting.states.device != "nvme":
            sizes = sum(dtype.itemsize for dtype in self.found.state_dtypes)
            total += sizes * sum(prod(s.padded_shape) for members in self._trained() for _, s in members)
        images = sorted((page.image_bytes for page in self.pages.pages.values()), reverse=True)
        largest = images[: self.setting.offload.units_in_memory]
        return total + sum(largest) + self.streamed.buffer_bytes
