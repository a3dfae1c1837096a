"""Units that come from a disk, and the update that streams over it: the engine's own pager over stand-ins.

What is in memory when is decided by ``zero/storage/nvme.py: Pager`` itself; a :class:`FakePagedUnit`
takes the place of a unit and counts bytes instead of reading them.  How an update cuts parameters,
gradients and state into buffers is the own doing of ``optim/offload/io_pipeline.py``, over tensors without data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from thalweg.optim.offload.io_pipeline import ParamStep, StepTensor, split_into_chunks
from thalweg.optim.offload.nvme_step import CHUNK_ELEMENTS
from thalweg.optim.offload.policy import buffer_ring_args
from thalweg.plan.memory.rank_memory import RankMemory
from thalweg.plan.spec.run_spec import RunSpec
from thalweg.storage_io.allocator import round_up
from thalweg.storage_io.evictable_memory import HUGE_PAGE
from thalweg.zero.storage.base import ParamSpec
from thalweg.zero.storage.nvme import PagedUnit, Pager, PagingPhase


class FakePagedUnit:
    """Stands in for a :class:`PagedUnit`: bytes that come and go, pages that one unit leaves to another."""

    def __init__(self, rank_memory: RankMemory, name: str, packed_bytes: int, unsharded_bytes: int) -> None:
        self.name, self.phase, self.in_use, self.released_at = name, cast(PagingPhase, "out"), False, -1
        self.last_use, self.read_bytes = 0, 0
        self._rank_memory, self.packed_bytes, self._unsharded_bytes = (rank_memory, packed_bytes, unsharded_bytes)
        self.reserved_bytes = round_up(packed_bytes, HUGE_PAGE)
        self._resident_bytes = 0  # bytes of the image that are in memory

    def start_read(self, page_source: FakePagedUnit | None) -> None:
        """Start reading, into the pages of ``page_source`` if there is one."""
        if page_source is not None and page_source is not self:
            self._resident_bytes, page_source._resident_bytes = page_source._resident_bytes, 0
        self._set_resident(max(self._resident_bytes, self.packed_bytes))
        self.read_bytes += self.packed_bytes
        self.phase = "coming"

    def wait_read(self) -> None:
        """The bytes are there; in shared memory, where that is not the packed image, with those of the peers."""
        if self.phase == "coming":
            if self._unsharded_bytes:
                self._rank_memory.adjust_mmapped("gathered", self._unsharded_bytes)
                self.release_pages()
            self.phase = "in"

    def evict(self) -> bool:
        """Its bytes are not wanted any more; whether it leaves pages behind."""
        leaves_pages = self.phase != "out" and not self._unsharded_bytes
        if self.phase != "out" and self._unsharded_bytes:
            self.release_pages()
            if self.phase == "in":
                self._rank_memory.adjust_mmapped("gathered", -self._unsharded_bytes)
        self.phase = "out"
        return leaves_pages

    def release_pages(self) -> None:
        """The image's pages go back."""
        self._set_resident(0)

    def _set_resident(self, nbytes: int) -> None:
        self._rank_memory.adjust_mmapped("gathered", nbytes - self._resident_bytes)
        self._resident_bytes = nbytes


def make_pager(
    rank_memory: RankMemory, specs_by_unit: dict[str, list[ParamSpec]], run_spec: RunSpec
) -> tuple[Pager, dict[str, FakePagedUnit]]:
    """The engine's pager over stand-ins for the units of ``specs_by_unit``, and those by name."""
    shared = run_spec.storage_kind == "shared"
    units = {}
    for name, members in specs_by_unit.items():
        packed_bytes = sum(round_up(spec.shard_numel * spec.compute_dtype.itemsize) for spec in members)
        unsharded_bytes = sum(param_spec.unsharded_bytes for param_spec in members) if shared else 0
        units[name] = FakePagedUnit(rank_memory, name, packed_bytes, unsharded_bytes)
    barrier: Any = (lambda name: None) if shared else None  # all ranks are here
    return Pager(cast(list[PagedUnit], list(units.values())), run_spec.zero.offload_param.buffer_count, barrier), units


@dataclass
class StreamedUpdate:
    """One streamed update on one rank: bytes of buffers it touches, bytes read and written."""

    buffer_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


def plan_streamed_update(
    updates: Sequence[Sequence[ParamSpec]], paged: set[str], state_dtypes: Sequence[torch.dtype], run_spec: RunSpec
) -> StreamedUpdate:
    """What the updates of a step (each a list of parameters) move through the ring of buffers; ``paged``: those whose
    units come from the disk."""
    depth, size = buffer_ring_args(run_spec.zero.offload_optimizer)
    touched_bytes, result = [0] * depth, StreamedUpdate()
    for members in updates:
        items = [_make_param_step(spec, spec.name in paged, state_dtypes, run_spec) for spec in members]
        for chunk_index, chunk in enumerate(split_into_chunks(items, size, CHUNK_ELEMENTS)):
            spans = [*chunk.reads, *chunk.writes]
            ends = max((span.buffer_offset + span.nbytes for span in spans), default=0)
            touched_bytes[chunk_index % depth] = max(touched_bytes[chunk_index % depth], ends)
            result.read_bytes += sum(span.nbytes for span in chunk.reads)
            result.written_bytes += sum(span.nbytes for span in chunk.writes)
    result.buffer_bytes = sum(touched_bytes)
    return result


def _make_param_step(
    param_spec: ParamSpec, is_paged: bool, state_dtypes: Sequence[torch.dtype], run_spec: RunSpec
) -> ParamStep:
    numel, next_offset = param_spec.shard_numel, 0
    master_on_disk = is_paged or run_spec.master_on_disk(param_spec)
    operands: dict[str, StepTensor] = {}

    def add_operand(name: str, dtype: torch.dtype, on_disk: bool, **how: Any) -> None:
        nonlocal next_offset
        offset = next_offset if on_disk else None
        next_offset += round_up(numel * dtype.itemsize) if on_disk else 0
        operands[name] = StepTensor(torch.empty(numel, dtype=dtype, device="meta"), offset, **how)

    add_operand("master", param_spec.master_dtype, master_on_disk, write=True)
    add_operand("grad", param_spec.master_dtype, run_spec.optimizer_on_disk and not run_spec.updates_in_backward)
    for index, dtype in enumerate(state_dtypes):
        add_operand(f"state {index}", dtype, run_spec.optimizer_on_disk, write=True)
    if master_on_disk and param_spec.has_copy:
        add_operand("copy", param_spec.compute_dtype, is_paged, read=False, write=True)
    return ParamStep({}, torch.empty(0), numel, operands, (), {}, False)
