"""Bytes of one rank: what lives where, when, and how much of it the kernel counts.

A rank's resident memory on a CPU is made of

    process        the interpreter, torch and the libraries: there before the model
    the heap       shards, optimizer state, activations, gradients of units in flight; it only grows
    mappings       reduced gradients, one mapping a unit; the model as it was given; with tiers on a disk,
                   every large tensor, units read from the disk, and the buffers of the update
    shared memory  unsharded parameters and reduction slots, shared by the ranks of a host, counted in each that has
                   touched them

:func:`replay_events` plays the events of a traced step through that, three windows long, since the
first one has no optimizer state yet and the second one begins with it.  glibc gives little of a heap back: it is as
large as the most that was ever alive in it, times a factor.  On a device the peak is that of what is alive, and the
holes that torch's caching allocator leaves, played block by block, come on top.

What rests on the disk (and, of a GPU's states, on the host) is added up beside it.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from thalweg.device import LARGE_BLOCK_BYTES
from thalweg.optim.offload.step_in_backward import BUFFER_BYTES, MAX_PENDING_UPDATES
from thalweg.plan.memory.gradient_buffers import GradientBuffers
from thalweg.plan.memory.param_paging import StreamedUpdate, make_pager, plan_streamed_update
from thalweg.plan.memory.rank_memory import MemoryBreakdown, MemorySample, RankMemory
from thalweg.plan.spec.run_spec import RunSpec
from thalweg.plan.trace.alloc_recorder import TraceEvent
from thalweg.plan.trace.step import MAX_TRACED_MICRO_BATCHES, StepTrace, shard_bytes
from thalweg.storage_io.allocator import round_up
from thalweg.zero.storage.base import ParamSpec
from thalweg.zero.storage.nvme import WRITE_CHUNK_BYTES

# glibc gives blocks from this size on a mapping of their own, until `retain_freed_memory` stops that.
_MMAP_THRESHOLD = 128 * 1024
# `activation_checkpointing/offload.py: NvmeActivationOffloader` allocates disk space in segments of this size.
_SWAP_SEGMENT_BYTES = 2**28
# How large glibc's heap is against the most that was ever alive in it, and what a first step adds to a process that has
# imported everything (code that is read for the first time, Python's arenas, threads' stacks): fitted to 71 runs, mean
# error of the peak 4.0% (docs/decisions/2026-11-22-the-heap-of-the-plan.md).
HEAP_FACTOR, FIRST_STEP_BYTES = 1.18, 117 * 2**20
_NUM_WINDOWS = 3


@dataclass
class ReplayResult:
    """The result: the peak, and how a step gets there.

    ``segments``: the peak between one mark of the run and the next; ``double_counted_bytes``: bytes that the ranks of
    a host share, as often as they are counted too many; ``tiers``: bytes that a GPU's rank holds on the ``host``, its
    swap file (``disk``), and what one step reads and writes there (``disk_read``, ``disk_written``).
    """

    peak: MemoryBreakdown
    timeline: list[MemorySample]
    segments: dict[str, MemoryBreakdown]
    double_counted_bytes: int
    tiers: dict[str, int]


def replay_events(
    trace: StepTrace,
    run_spec: RunSpec,
    *,
    process_bytes: int = 0,
    initial_param_bytes: Iterable[int] = (),
    disk_keeps_up: bool = False,
) -> ReplayResult:
    """Play some windows of the trace on one rank.

    ``process_bytes``: resident before the model is there; ``initial_param_bytes``: sizes of the
    parameters of the model that is handed to ``initialize`` (none for one on meta); ``disk_keeps_up``: the disk
    is faster than the backward pass, so that hardly any gradient waits for its update.
    """
    if run_spec.on_cpu:
        mmap_threshold = LARGE_BLOCK_BYTES if run_spec.low_memory else None
        rank_memory = RankMemory(process_bytes + FIRST_STEP_BYTES, HEAP_FACTOR, mmap_threshold)
    else:
        rank_memory = RankMemory(process_bytes, None)
    replay = _Replay(rank_memory, trace, run_spec, disk_keeps_up)
    replay.initialize(list(initial_param_bytes))
    for step in range(_NUM_WINDOWS):
        replay.step(first=step == 0, record_timeline=step == _NUM_WINDOWS - 1)
    double_counted = replay.gradient_buffers.double_counted_bytes
    if run_spec.storage_kind == "shared":
        resident = sum(s.unsharded_bytes for name, s in trace.param_specs.items() if name not in replay.disk_params)
        double_counted += (run_spec.shard_topology.ranks_per_node - 1) * resident
    tiers = {"host": replay.host_bytes, "disk": replay.disk_bytes, "disk_read": replay.disk_read_bytes}
    tiers["disk_written"] = replay.streamed_update.written_bytes + replay.disk_grad_bytes
    if run_spec.activation_offload == "nvme":
        num_traced = min(run_spec.accumulation_steps, MAX_TRACED_MICRO_BATCHES)
        offloaded = trace.offloaded_bytes * run_spec.accumulation_steps // num_traced
        tiers["disk"] += round_up(trace.peak_offloaded_bytes, _SWAP_SEGMENT_BYTES)
        tiers["disk_read"] += offloaded
        tiers["disk_written"] += offloaded
    peak = rank_memory.breakdown_at_peak()
    return ReplayResult(peak, rank_memory.timeline, rank_memory.segments, double_counted, tiers)


class _Replay:
    """One rank: what it sets up, and what each step does to it."""

    def __init__(self, rank_memory: RankMemory, trace: StepTrace, run_spec: RunSpec, disk_keeps_up: bool) -> None:
        self.rank_memory, self.trace, self.run_spec = rank_memory, trace, run_spec
        self.gradient_buffers = GradientBuffers(rank_memory, trace.units, run_spec, disk_keeps_up)
        self.disk_params = {key for unit in trace.units if unit.name in trace.paged_units for key in unit.param_names}
        paged = [unit for unit in trace.units if unit.name in trace.paged_units]
        members = {unit.name: [trace.param_specs[key] for key in unit.param_names] for unit in paged}
        # A GPU's units come through the host: they are no part of the device's memory.
        paged_memory = RankMemory(0, None) if run_spec.states_on_host else rank_memory
        self.pager, self.paged_units = make_pager(paged_memory, members, run_spec)
        self.streamed_update = self._plan_streamed_update()
        self.disk_grad_bytes = 0
        if run_spec.optimizer_on_disk and not run_spec.updates_in_backward:
            self.disk_grad_bytes = sum(unit.sharded_grad_bytes for unit in trace.units if unit.is_trainable)
        self.disk_bytes, self.disk_read_bytes = self._compute_disk_bytes(), 0
        self.host_bytes = self._compute_host_bytes()
        self._id_offset = 1 << 40
        self._segment_counts: Counter[str] = Counter()

    def initialize(self, initial_param_bytes: list[int]) -> None:
        """What ``zero.shard`` does: the given model is there, shards are made, full tensors go one by one."""
        rank_memory, trace, run_spec = self.rank_memory, self.trace, self.run_spec
        rank_memory.begin_segment("1\tinitialize\t\t")
        for size in initial_param_bytes:
            if size >= _MMAP_THRESHOLD:
                rank_memory.adjust_mmapped("parameters", size)
        shared, is_distributed = run_spec.storage_kind == "shared", run_spec.topology.world_size > 1
        param_specs = {name: spec for name, spec in trace.param_specs.items() if name not in self.disk_params}
        storage_id = 1
        for param_spec in param_specs.values() if not run_spec.states_on_host else ():
            if (not shared or param_spec.has_copy) and not run_spec.master_on_disk(param_spec):
                rank_memory.allocate(-storage_id, shard_bytes(param_spec), "parameters")
            if run_spec.storage_kind == "private" and param_spec.has_copy:
                rank_memory.allocate(-storage_id - 1, param_spec.unsharded_bytes, "gathered")
            storage_id += 2
        previous = 0
        for index, (name, param_spec) in enumerate(trace.param_specs.items()):
            given = initial_param_bytes[index] if index < len(initial_param_bytes) else None
            size = param_spec.padded_numel * param_spec.master_dtype.itemsize if given is None else given
            if is_distributed:  # the copy that is broadcast; the last one goes when the next is on its way
                rank_memory.allocate(-storage_id, size, "buffers")
                rank_memory.free(previous)
                previous = -storage_id
            if name in self.disk_params or run_spec.master_on_disk(param_spec):
                # Written through two buffers, whose pages go at once.
                writer = min(2 * WRITE_CHUNK_BYTES, shard_bytes(param_spec))
                rank_memory.adjust_mmapped("buffers", writer)
                rank_memory.adjust_mmapped("buffers", -writer)
            elif shared and not param_spec.has_copy:
                rank_memory.adjust_mmapped("parameters", param_spec.unsharded_bytes // param_spec.num_shards)
            if given is not None and size >= _MMAP_THRESHOLD:
                rank_memory.adjust_mmapped("parameters", -size)
            storage_id += 1
        rank_memory.free(previous)
        if shared:
            unsharded_bytes = sum(param_spec.unsharded_bytes for param_spec in param_specs.values())
            local_bytes = sum(s.unsharded_bytes // s.num_shards for s in param_specs.values() if not s.has_copy)
            rank_memory.adjust_mmapped("gathered", unsharded_bytes - local_bytes)
        rank_memory.allocate(-storage_id, trace.whole_bytes, "buffers")

    def step(self, first: bool, record_timeline: bool) -> None:
        """A window and its update."""
        read_before = self._paged_bytes()
        self._replay(self.trace.window_events, record_timeline)
        self.pager.end_pass()
        self.pager.invalidate(None)  # the update follows: nothing that is in memory is true any more
        if first and not self.run_spec.states_on_host:
            touched = self.streamed_update.buffer_bytes + self._heap_left_by_first_update()
            self.rank_memory.adjust_mmapped("buffers", touched)
        self._replay(self._update_events(first), record_timeline)
        self.gradient_buffers.end_window()
        self.disk_read_bytes = self._paged_bytes() - read_before + self.streamed_update.read_bytes

    def _paged_bytes(self) -> int:
        return sum(page.read_bytes for page in self.paged_units.values())

    def _heap_left_by_first_update(self) -> int:
        """What the heap of the updating thread keeps of the state it has made, before that is written."""
        if not (self.run_spec.updates_in_backward and self.run_spec.optimizer_on_disk):
            return 0
        dtypes, units = self.trace.state_dtypes, self._trained_by_unit()
        state_sizes = ([spec.shard_numel * dtype.itemsize for spec in unit for dtype in dtypes] for unit in units)
        return max((sum(size for size in unit if size < LARGE_BLOCK_BYTES) for unit in state_sizes), default=0)

    def _update_events(self, first: bool) -> list[TraceEvent]:
        events = self.trace.first_update_events if first else self.trace.later_update_events
        runs_elsewhere = self.run_spec.states_on_host or self.run_spec.optimizer_on_disk
        if runs_elsewhere and self.run_spec.elementwise_optimizer:  # made, kept and worked on elsewhere
            return [event for event in events if event[0] == 0]
        return events

    def _replay(self, events: list[TraceEvent], record_timeline: bool) -> None:
        rank_memory, highest_id, offset = self.rank_memory, 0, self._id_offset
        for storage_id, num_bytes, label in events:
            if storage_id > 0:
                rank_memory.allocate(offset + storage_id, num_bytes, label)
                highest_id = max(highest_id, storage_id)
            elif storage_id < 0:
                rank_memory.free(offset - storage_id)
            else:
                self._handle_mark(label)
            if record_timeline:
                rank_memory.record_sample()
        self._id_offset = offset + highest_id

    def _handle_mark(self, label: str) -> None:
        verb, _, name = label.partition(" ")
        if verb not in ("open", "close", "prefetch", "gather"):
            key = f"{self.rank_memory.phase}\t{verb}\t{name}"
            self._segment_counts[key] += 1
            self.rank_memory.begin_segment(f"{self._segment_counts[key]}\t{key}")
        if verb in ("enter", "accumulated"):
            return
        if verb in ("reduce", "last"):
            if not self.run_spec.states_on_host:
                self.gradient_buffers.reduce(name, verb == "last")
            if verb == "last" and self.run_spec.updates_in_backward and name in self.paged_units:
                self.pager.invalidate([name])  # updated within the backward pass
        elif verb == "gather":
            self.gradient_buffers.gather(name)
        elif verb in ("open", "close", "prefetch"):
            {"open": self.pager.acquire, "close": self.pager.release, "prefetch": self.pager.prefetch}[verb](name)
        else:
            self.rank_memory.phase = label
            if label == "forward":
                self.gradient_buffers.begin_forward()
                self.pager.end_pass()

    # What rests on a disk

    def _trained_by_unit(self) -> list[list[ParamSpec]]:
        """The trained parameters, unit by unit."""
        trained = [unit for unit in self.trace.units if unit.is_trainable]
        members = ([self.trace.param_specs[name] for name in unit.param_names] for unit in trained)
        return [[param_spec for param_spec in specs if param_spec.requires_grad] for specs in members]

    def _plan_streamed_update(self) -> StreamedUpdate:
        run_spec = self.run_spec
        if not run_spec.elementwise_optimizer or not (run_spec.optimizer_on_disk or self.disk_params):
            return StreamedUpdate()
        updates = self._trained_by_unit()
        if not run_spec.updates_in_backward:
            updates = [[param_spec for members in updates for param_spec in members]]
        return plan_streamed_update(updates, self.disk_params, self.trace.state_dtypes, run_spec)

    def _compute_disk_bytes(self) -> int:
        total = 0
        for name, param_spec in self.trace.param_specs.items():
            numel, paged = param_spec.shard_numel, name in self.disk_params
            if paged:
                total += round_up(numel * param_spec.compute_dtype.itemsize)
            if self.run_spec.master_on_disk(param_spec) or (paged and param_spec.has_copy):
                total += round_up(numel * param_spec.master_dtype.itemsize)
        if self.run_spec.optimizer_on_disk:
            for param_spec in (spec for members in self._trained_by_unit() for spec in members):
                sizes = [param_spec.master_dtype.itemsize, *(dtype.itemsize for dtype in self.trace.state_dtypes)]
                total += sum(round_up(param_spec.shard_numel * size) for size in sizes)
            if self.run_spec.updates_in_backward:  # second places for all that an update writes
                total += self.streamed_update.written_bytes
        return total

    def _compute_host_bytes(self) -> int:
        """What a GPU's rank keeps on the host: masters (and what crosses of them), gradients (and as they came), state,
        units that come from a disk."""
        offloaded = self.trace.peak_offloaded_bytes if self.run_spec.activation_offload == "cpu" else 0
        if not self.run_spec.states_on_host:
            return offloaded
        resident = [spec for name, spec in self.trace.param_specs.items() if name not in self.disk_params]
        total = offloaded + sum(map(shard_bytes, resident))
        total += sum(spec.shard_numel * spec.compute_dtype.itemsize for spec in resident if spec.is_mixed)
        grads = sorted((unit.sharded_grad_bytes for unit in self.trace.units if unit.is_trainable), reverse=True)
        if self.run_spec.updates_in_backward:  # a unit's is reduced while those before it wait for the disk
            grads = grads[: 1 + MAX_PENDING_UPDATES]
        elif self.run_spec.optimizer_on_disk:
            grads = [*grads[:1], *(min(3 * BUFFER_BYTES, largest) for largest in grads[:1])]
        sent = self.run_spec.sent_share_of_grads
        total += int(sum(grads) * (1 + sent % 1))
        if not self.run_spec.optimizer_on_disk:
            sizes = sum(dtype.itemsize for dtype in self.trace.state_dtypes)
            total += sizes * sum(s.shard_numel for members in self._trained_by_unit() for s in members)
        packed_sizes = sorted((page.packed_bytes for page in self.paged_units.values()), reverse=True)
        largest = packed_sizes[: self.run_spec.zero.offload_param.buffer_count]
        return total + sum(largest) + self.streamed_update.buffer_bytes
