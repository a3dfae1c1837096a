"""Memory that reductions touch and keep: slots of the arena, and the blocks of reduced gradients.

Where gradients stay for the step, each unit has a block of its own (``comm/buffer.py: Lender``), and a second
one if a later backward of the window adds to it.  Where they leave (updates within the backward pass,
gradients that rest on a disk) all units share a pool, and as many blocks exist as are in use at once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from thalweg.optim.leaving import PENDING
from thalweg.optim.spill import BUFFER_BYTES
from thalweg.plan.process import Process
from thalweg.plan.setting import Setting
from thalweg.plan.stage import UnitSize


@dataclass
class _Block:
    num_bytes: int
    is_held: bool = True


class _Pool:
    """``comm/buffer.py: Pool``, its mappings counted and not made."""

    def __init__(self, process: Process, label: str) -> None:
        self._process, self._label = process, label
        self.blocks: list[_Block] = []

    def take(self, num_bytes: int) -> _Block:
        free = [block for block in self.blocks if not block.is_held]
        fitting = [block for block in free if block.num_bytes >= num_bytes]
        if fitting:
            found = min(fitting, key=lambda block: block.num_bytes)
            found.is_held = True
            return found
        for block in free:
            self._process.map(self._label, -block.num_bytes)
            self.blocks.remove(block)
        self.blocks.append(block := _Block(num_bytes))
        self._process.map(self._label, num_bytes)
        return block


class Reductions:
    """What :meth:`reduce` touches stays touched; blocks of gradients are free again when they have left.

    ``keeps_up``: an update on a disk is done before the next unit's gradients are there.
    """

    def __init__(
        self, process: Process, units: list[UnitSize], setting: Setting, keeps_up: bool = False
    ) -> None:
        self._process, self._setting = process, setting
        self._waiting = 0 if keeps_up else PENDING
        self._units = {unit.name: unit for unit in units}
        self._touched = [0] * setting.num_reduction_slots
        self._read: list[set[tuple[int, int]]] = [set() for _ in self._touched]
        self._gathers = [0] * 4
        self._sequence = self._gather_sequence = 0
        self._blocks: Counter[str] = Counter()
        self._held: set[str] = set()
        self._outputs, self._inputs = _Pool(process, "gradients"), _Pool(process, "buffers")
        self._input: _Block | None = None
        self._pending: list[_Block] = []

    @property
    def leaves(self) -> bool:
        """Whether gradients go before the step."""
        return self._setting.updates_early or self._setting.spills

    def reduce(self, name: str, last: bool) -> None:
        """One reduction of a unit's gradients, the ``last`` of its window or not."""
        unit = self._units[name]
        if self._setting.in_arena:
            self._fill_slot(unit)
        elif self.leaves:
            if self._input is not None:
                self._input.is_held = False
            self._input = self._inputs.take(unit.reduce_bytes)
        if self.leaves:
            self._pass_on(unit, last)
            return
        needed = 2 if name in self._held else 1
        if needed > self._blocks[name]:
            self._process.map("gradients", unit.sharded_grad_bytes)
            self._blocks[name] = needed
        self._held.add(name)

    def gather(self, name: str) -> None:
        """A unit gathered into slots that the ranks of a host fill together."""
        place = self._gather_sequence % len(self._gathers)
        more = max(0, self._units[name].gather_bytes - self._gathers[place])
        self._gathers[place] += more
        self._process.map("gathered", more)
        self._gather_sequence += 1

    def end_of_window(self) -> None:
        """Gradients are forgotten; the blocks stay."""
        self._held.clear()
        self._pending.clear()
        for block in self._outputs.blocks + self._inputs.blocks:
            block.is_held = False

    @property
    def counted_again(self) -> int:
        """What the slots that the ranks of a host see add up to, less what they are."""
        local = self._setting.span.per_node
        read = sum(_covered(rows) for rows in self._read) * (local - 1)
        return read * local + sum(self._gathers) * (local - 1)

    def _fill_slot(self, unit: UnitSize) -> None:
        """This rank writes its whole slot and reads its rows of the others'.

        Rows of a large unit lie elsewhere in a slot than those of a small one, but for the first rank's: the
        last rank touches the most.
        """
        local = self._setting.span.per_node
        place = self._sequence % len(self._touched)
        more = max(0, unit.reduce_bytes - self._touched[place])
        self._touched[place] += more
        row = unit.reduce_bytes // local
        first, num_bytes = (0, unit.reduce_bytes) if self._setting.replicates else (row * (local - 1), row)
        before = _covered(self._read[place])
        self._read[place].add((first, first + num_bytes))
        read = _covered(self._read[place]) - before
        self._process.map("buffers", more + read * (local - 1))
        self._sequence += 1

    def _pass_on(self, unit: UnitSize, last: bool) -> None:
        setting = self._setting
        block = self._outputs.take(unit.sharded_grad_bytes)
        if setting.updates_early and last:
            if setting.states.device == "cpu":  # the update is done before the backward pass goes on
                block.is_held = False
                return
            self._pending.append(block)
            while len(self._pending) > self._waiting:
                self._pending.pop(0).is_held = False
        elif setting.spills:
            ring = min(3 * BUFFER_BYTES, unit.sharded_grad_bytes)
            self._process.map("buffers", ring)
            self._process.map("buffers", -ring)
            block.is_held = False
        elif unit.name in self._held:  # added to what is there
            block.is_held = False
        self._held.add(unit.name)


def _covered(ranges: set[tuple[int, int]]) -> int:
    """Bytes of the union of (start, stop) ranges."""
    total = end = 0
    for start, stop in sorted(ranges):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total
