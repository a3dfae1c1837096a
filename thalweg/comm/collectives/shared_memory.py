"""Collectives through slots of an arena, in the form that FSDP2 takes.

The ring holds ``depth`` slots a rank.  Reduction number ``s`` uses slot ``s % depth``:

1. ``allocate`` waits until every peer has consumed reduction ``s - depth`` and hands
   out this rank's slot, into which FSDP2 writes the unsharded gradients;
2. ``__call__`` posts "deposited s", waits for the peers' posts, sums the rows that this
   rank owns straight out of their slots, and posts "consumed s".

``allocate`` is called twice a reduction, the second time for the output, which must be
private as it becomes the sharded gradient.  Each post carries a tag of the module, so
ranks that reduce different modules find out at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.comm.collectives.reducer import Reducer, ReplicatedReducer
from thalweg.comm.comms_logger import CollectiveCall, CommsLog
from thalweg.comm.ordered_sum import sum_rows
from thalweg.comm.shared_memory import (
    CONSUMED,
    COUNTERS_PER_BANK,
    DEPOSITED,
    MAX_DEPTH,
    TAG,
    CommError,
    SharedMemoryArena,
    hash_name,
)

# A common slot is in use until the call after the next.
READ_LAG = 2


class SharedMemoryRing:
    """``depth`` slots of ``slot_bytes`` for each rank of ``arena``, used in order.

    Two rings may share an arena if they use different ``counter_bank`` s (0 and 1) of its counters.
    """

    def __init__(self, arena: SharedMemoryArena, slot_bytes: int, depth: int = 2, counter_bank: int = 0) -> None:
        self.arena, self.slot_bytes, self.depth = arena, slot_bytes, depth
        self._deposited_column, self._consumed_column, self._tag_column = (
            COUNTERS_PER_BANK * counter_bank + c for c in (DEPOSITED, CONSUMED, TAG)
        )
        assert depth <= MAX_DEPTH
        self._offsets = [[arena.reserve(slot_bytes) for _ in range(depth)] for _ in range(arena.world_size)]
        self._sequence = 0

    @staticmethod
    def num_bytes(world_size: int, slot_bytes: int, depth: int = 2) -> int:
        """Bytes of arena that such a ring needs."""
        return world_size * depth * (slot_bytes + 64)

    def acquire_slot(self, shape: Sequence[int], dtype: torch.dtype, operation: str) -> Tensor:
        """This rank's next slot, free to write."""
        if prod(shape) * dtype.itemsize > self.slot_bytes:
            raise AssertionError(f"{operation} needs more than a slot of {self.slot_bytes} bytes")
        self.arena.wait(self._consumed_column, max(0, self._sequence + 1 - self.depth), operation)
        return self._slot_tensor(self.arena.rank, shape, dtype)

    def exchange_slots(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Post the slot just written and return every rank's, in rank order."""
        arena, sequence = self.arena, self._sequence + 1
        # One tag a slot: a peer that is ahead has not yet overwritten this slot's.
        tag, column = hash_name(name), self._tag_column + self._sequence % self.depth
        arena.post(column, tag)
        arena.post(self._deposited_column, sequence)
        arena.wait(self._deposited_column, sequence, f"the collective on {name!r}")
        for rank in range(arena.world_size):
            if arena.read(rank, column) != tag:
                raise CommError(
                    f"rank {arena.rank} reduces {name!r} while rank {rank} reduces another module: the "
                    "ranks took different branches. Run the same modules on every rank in each step."
                )
        return [self._slot_tensor(rank, shape, dtype) for rank in range(arena.world_size)]

    def release_slots(self) -> None:
        """Post that this rank has read every slot of the current reduction."""
        self._sequence += 1
        self.arena.post(self._consumed_column, self._sequence)

    def acquire_shared_output(self, shape: Sequence[int], dtype: torch.dtype, operation: str) -> Tensor:
        """The next slot that all ranks fill together; close it with :meth:`publish_shared_output`.

        It is read until the reader's next call but one, as FSDP2 may hold the previous
        result while it copies it out.
        """
        if self.depth <= READ_LAG:
            raise AssertionError(f"common slots need a ring of at least {READ_LAG + 1}")
        sequence = self._sequence + 1
        self.arena.post(self._consumed_column, max(0, sequence - READ_LAG))
        self.arena.wait(self._consumed_column, max(0, sequence - self.depth), operation)
        return self._slot_tensor(0, shape, dtype)

    def publish_shared_output(self, name: str) -> None:
        """Return when every rank has filled its part of the common slot."""
        self.exchange_slots(name, (0,), torch.uint8)
        self._sequence += 1

    def _slot_tensor(self, rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.arena.tensor(self._offsets[rank][self._sequence % self.depth], shape, dtype)


class _SharedMemoryReducer(Reducer):
    """A reduction whose input is this rank's slot of a ring."""

    def __init__(
        self,
        ring: SharedMemoryRing,
        name: str,
        ledger: CommsLog | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(name, ledger, output_dtype)
        self._ring = ring

    def _allocate_input(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._ring.acquire_slot(size, dtype, f"the reduction of {self._name!r}")


class SharedMemoryReduceScatter(_SharedMemoryReducer):
    """Reduce-scatter of one module's gradients through ``ring``."""

    transport = "shared"

    def sum_shards(
        self, rows: Tensor, output: Tensor, group: dist.ProcessGroup, scale: float, call: CollectiveCall
    ) -> None:
        """Add up the row that this rank owns straight out of the peers' slots."""
        ring = self._ring
        slots = ring.exchange_slots(self._name, rows.shape, rows.dtype)
        sum_rows([slot[ring.arena.rank] for slot in slots], output, scale)
        ring.release_slots()
        call.add_bytes((len(slots) - 1) * rows[0].nbytes)


class SharedMemoryAllReduce(_SharedMemoryReducer, ReplicatedReducer):
    """All-reduce (mean) of one module's gradients through ``ring``."""

    def _allocate_input(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        self._input_dtype = dtype
        return super()._allocate_input(size, dtype, device)

    def reduce(self, output: Tensor) -> None:
        """Replace ``output`` (1-D) by the mean over all ranks."""
        ring, world_size = self._ring, self._ring.arena.world_size
        full_bytes = output.numel() * self._input_dtype.itemsize
        with self._ledger.timed(
            "all_reduce", self._name, "shared", full_bytes=full_bytes, world_size=world_size
        ) as call:
            slots = ring.exchange_slots(self._name, output.shape, self._input_dtype)
            sum_rows(slots, output, self.mean_scale(world_size))
            ring.release_slots()
            call.add_bytes((world_size - 1) * full_bytes)


class SharedMemoryAllGather:
    """All-gather through a ring of its own: FSDP2's copy-in writes this rank's row in place."""

    def __init__(self, ring: SharedMemoryRing, name: str, ledger: CommsLog | None = None) -> None:
        self._ring, self._name, self._ledger = ring, name, ledger or CommsLog()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2's hook; the output is one slot for all ranks, each of which fills its row."""
        return self._ring.acquire_shared_output(size, dtype, f"the gather of {self._name!r}")

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        nbytes, world_size = output_tensor.nbytes, self._ring.arena.world_size
        with self._ledger.timed("all_gather", self._name, "shared", full_bytes=nbytes, world_size=world_size) as call:
            self._ring.publish_shared_output(self._name)
            call.add_bytes((world_size - 1) * input_tensor.nbytes)
        return None
