"""Memory that reductions touch and keep: slots of shared memory, and the blocks of reduced gradients.

Where gradients stay for the step, each unit has a block of its own (``comm/collectives/reducer.py: ReusableBuffer``),
and a second one if a later backward of the window adds to it.  Where they leave (updates within the backward pass,
gradients that rest on a disk) all units share a pool, and as many blocks exist as are in use at once.  On a device
they are blocks of torch's allocator from a unit's reduction to the end of the update.
"""

from collections import Counter
from dataclasses import dataclass

from thalweg.optim.offload.step_in_backward import BUFFER_BYTES, MAX_PENDING_UPDATES
from thalweg.plan.memory.rank_memory import RankMemory
from thalweg.plan.spec.run_spec import RunSpec
from thalweg.plan.trace.fsdp_events import UnitInfo
from thalweg.zero.collectives import NUM_REDUCE_SLOTS, NUM_REPLICATED_REDUCE_SLOTS


@dataclass
class _FakeBuffer:
    num_bytes: int
    in_use: bool = True


class _FakeBufferPool:
    """``comm's buffer pool``, its mappings counted and not made."""

    def __init__(self, rank_memory: RankMemory, label: str) -> None:
        self._rank_memory, self._label = rank_memory, label
        self.buffers: list[_FakeBuffer] = []

    def acquire(self, num_bytes: int) -> _FakeBuffer:
        fitting = [block for block in self.buffers if not block.in_use and block.num_bytes >= num_bytes]
        if not fitting:
            self.release_memory()
            fitting = [_FakeBuffer(num_bytes)]
            self.buffers += fitting
            self._rank_memory.adjust_mmapped(self._label, num_bytes)
        best_fit = min(fitting, key=lambda block: block.num_bytes)
        best_fit.in_use = True
        return best_fit

    def release_memory(self) -> None:
        """As the pool's: a forward pass begins."""
        for block in [block for block in self.buffers if not block.in_use]:
            self._rank_memory.adjust_mmapped(self._label, -block.num_bytes)
            self.buffers.remove(block)


class GradientBuffers:
    """What :meth:`reduce` touches stays touched; blocks of gradients are free again when they have left.

    ``disk_keeps_up``: an update on a disk is done before the next unit's gradients are there.
    """

    def __init__(
        self, rank_memory: RankMemory, units: list[UnitInfo], run_spec: RunSpec, disk_keeps_up: bool = False
    ) -> None:
        self._rank_memory, self._run_spec = rank_memory, run_spec
        self._max_pending = 0 if disk_keeps_up else MAX_PENDING_UPDATES
        self._units = {unit.name: unit for unit in units}
        self._device_ids = {unit.name: -(1 << 40) - index for index, unit in enumerate(units, start=1)}
        num_slots = NUM_REPLICATED_REDUCE_SLOTS if run_spec.replicates_states else NUM_REDUCE_SLOTS
        self._touched_bytes = [0] * num_slots
        self._read_ranges: list[set[tuple[int, int]]] = [set() for _ in self._touched_bytes]
        self._gather_slot_bytes = [0] * 4
        self._num_slot_uses = self._num_gathers = 0
        self._num_blocks: Counter[str] = Counter()
        self._units_with_grads: set[str] = set()
        self._output_pool = _FakeBufferPool(rank_memory, "gradients")
        self._input_pool = _FakeBufferPool(rank_memory, "buffers")
        self._current_input: _FakeBuffer | None = None
        self._pending_updates: list[_FakeBuffer] = []

    def reduce(self, name: str, last: bool) -> None:
        """One reduction of a unit's gradients, the ``last`` of its window or not."""
        unit = self._units[name]
        if self._run_spec.uses_shared_memory:
            self._touch_slot(unit)
        elif self._run_spec.grads_leave_early and not self._run_spec.reduces_in_place:
            if self._current_input is not None:
                self._current_input.in_use = False
            self._current_input = self._input_pool.acquire(unit.reduce_bytes)
        if self._run_spec.grads_leave_early:
            self._release_early(unit, last)
            return
        if not self._run_spec.on_cpu:
            self._reduce_on_device(unit)
            return
        needed = 2 if name in self._units_with_grads else 1
        if needed > self._num_blocks[name]:
            self._rank_memory.adjust_mmapped("gradients", unit.sharded_grad_bytes)
            self._num_blocks[name] = needed
        self._units_with_grads.add(name)

    def gather(self, name: str) -> None:
        """A unit gathered into slots that the ranks of a host fill together."""
        index = self._num_gathers % len(self._gather_slot_bytes)
        growth = max(0, self._units[name].gather_bytes - self._gather_slot_bytes[index])
        self._gather_slot_bytes[index] += growth
        self._rank_memory.adjust_mmapped("gathered", growth)
        self._num_gathers += 1

    def begin_forward(self) -> None:
        """Blocks of gradients that have left go."""
        for pool in (self._output_pool, self._input_pool):
            pool.release_memory()

    def end_window(self) -> None:
        """Gradients are forgotten; a unit's own block stays on a processor."""
        for name in self._units_with_grads if not self._run_spec.on_cpu else ():
            self._rank_memory.free(self._device_ids[name])
        self._units_with_grads.clear()
        self._pending_updates.clear()
        for block in self._output_pool.buffers + self._input_pool.buffers:
            block.in_use = False

    @property
    def double_counted_bytes(self) -> int:
        """What the slots that the ranks of a host see add up to, less what they are."""
        local = self._run_spec.shard_topology.ranks_per_node
        read = sum(_union_length(rows) for rows in self._read_ranges) * (local - 1)
        return read * local + sum(self._gather_slot_bytes) * (local - 1)

    def _reduce_on_device(self, unit: UnitInfo) -> None:
        """A block of its own for what is reduced first; what comes later is added to that, and its block free again."""
        is_first = unit.name not in self._units_with_grads
        storage_id = self._device_ids[unit.name] if is_first else -(1 << 40)
        self._rank_memory.allocate(storage_id, unit.sharded_grad_bytes, "gradients")
        if not is_first:
            self._rank_memory.free(storage_id)
        self._units_with_grads.add(unit.name)

    def _touch_slot(self, unit: UnitInfo) -> None:
        """This rank writes its whole slot and reads its rows of the others'.

        Rows of a large unit lie elsewhere in a slot than those of a small one, but for the first rank's: the
        last rank touches the most.
        """
        ranks_per_node = self._run_spec.shard_topology.ranks_per_node
        index = self._num_slot_uses % len(self._touched_bytes)
        growth = max(0, unit.reduce_bytes - self._touched_bytes[index])
        self._touched_bytes[index] += growth
        row = unit.reduce_bytes // ranks_per_node
        last_row = (row * (ranks_per_node - 1), row * ranks_per_node)
        read_before = _union_length(self._read_ranges[index])
        self._read_ranges[index].add((0, unit.reduce_bytes) if self._run_spec.replicates_states else last_row)
        read = _union_length(self._read_ranges[index]) - read_before
        self._rank_memory.adjust_mmapped("buffers", growth + read * (ranks_per_node - 1))
        self._num_slot_uses += 1

    def _release_early(self, unit: UnitInfo, last: bool) -> None:
        run_spec = self._run_spec
        block = self._output_pool.acquire(unit.sharded_grad_bytes)
        if run_spec.updates_in_backward and last:
            if run_spec.zero.offload_optimizer.device == "cpu":  # the update is done before the backward pass goes on
                block.in_use = False
                return
            self._pending_updates.append(block)
            while len(self._pending_updates) > self._max_pending:
                self._pending_updates.pop(0).in_use = False
        elif run_spec.optimizer_on_disk:
            write_buffer_bytes = min(3 * BUFFER_BYTES, unit.sharded_grad_bytes)
            self._rank_memory.adjust_mmapped("buffers", write_buffer_bytes)
            self._rank_memory.adjust_mmapped("buffers", -write_buffer_bytes)
            block.in_use = False
        elif unit.name in self._units_with_grads:  # added to what is there
            block.in_use = False
        self._units_with_grads.add(unit.name)


def _union_length(ranges: set[tuple[int, int]]) -> int:
    """Bytes of the union of (start, stop) ranges."""
    total = end = 0
    for start, stop in sorted(ranges):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total
