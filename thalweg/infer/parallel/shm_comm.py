"""The memory in which the ranks of one engine meet.

The picture, for one stage of two ranks::

    | counters | tables | parts: rank 0 | rank 1 | the same once more | states | logits           |
                          (tokens, width)           used in turns       to the   rank 0 writes the left
                                                                        next     columns, rank 1 the right
                                                                        stage

Of several stages each has counters and parts of its own; tables, states and logits are for all.  A stage
waits until the one before it has done the step, takes the states and leaves its own in their place; rank 0
begins no step before the last stage has done the one before, so one place is enough.

Within a stage a rank writes its part of a sum, meets the others, and adds up all parts in the order of ranks,
so that all have the same bits.  The second set of parts is there so that a fast rank may write before a slow
one has read: a set is used again only after a meeting in between.  Nothing is copied to gather logits: each
rank's product ends in its columns.  Block tables are rank 0's, which alone schedules.

The memory is a memfd without a name; it goes with its last process.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.infer.parallel.shard import vocab_range

_COUNTER_STRIDE = 128  # bytes from one rank's counter to the next, as ops/native/meeting.py has it
_PAGE = 4096
_NUM_SPINS, _MAX_YIELDS = 100, 10_000


@dataclass(frozen=True)
class ShmShape:
    """What the memory has to hold: rows of a step, their width, the vocabulary, the block tables; for how
    many stages."""

    max_tokens: int
    hidden_size: int
    vocab_size: int
    num_slots: int
    blocks_per_slot: int
    num_stages: int = 1


class ShmCommunicator:
    """One rank's view of the memory behind ``handle`` (a memfd; it stays the caller's).

    ``rank`` of the ``size`` ranks of the ``stage``.
    """

    def __init__(self, rank: int, world_size: int, shape: ShmShape, fd: int, stage: int = 0) -> None:
        self.rank, self.world_size, self.shape, self.stage = rank, world_size, shape, stage
        self.is_first_stage, self.is_last_stage, self._num_steps = (
            stage == 0,
            stage == shape.num_stages - 1,
            0,
        )
        width, vocab = -(-shape.hidden_size // 32) * 32, -(-shape.vocab_size // 32) * 32
        partial_bytes = _align_to_page(4 * shape.max_tokens * width)
        reduce_bytes = 2 * world_size * partial_bytes if world_size > 1 else 0
        activation_bytes = partial_bytes if shape.num_stages > 1 else 0
        num_counters = 1 + shape.num_stages * (1 + world_size)  # a word for the end; each stage's steps and counters
        sizes = [
            _align_to_page(num_counters * _COUNTER_STRIDE),
            _align_to_page(4 * shape.num_slots * shape.blocks_per_slot),
            shape.num_stages * reduce_bytes,
            activation_bytes,
        ]
        sizes.append(_align_to_page(4 * shape.max_tokens * vocab))
        starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        if os.fstat(fd).st_size < starts[-1]:
            os.ftruncate(fd, starts[-1])
        self._memory = mmap.mmap(fd, starts[-1])
        counters = np.frombuffer(self._memory, np.int64, num_counters * _COUNTER_STRIDE // 8)[:: _COUNTER_STRIDE // 8]
        self._aborted_flag, self._steps_done = counters[:1], counters[1 : 1 + shape.num_stages]
        first_counter = 1 + shape.num_stages + stage * world_size
        self._counters = counters[first_counter : first_counter + world_size]
        self._base_address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self._barrier_args = [
            self._base_address + first_counter * _COUNTER_STRIDE,
            rank,
            world_size,
            self._base_address,
        ]
        self.block_tables = np.frombuffer(
            self._memory, np.int32, shape.num_slots * shape.blocks_per_slot, starts[1]
        ).reshape(shape.num_slots, shape.blocks_per_slot)  # fmt: skip
        self._reduce_buffers = []
        for buffer_index in range(2 if world_size > 1 else 0):
            flat = torch.frombuffer(
                self._memory, dtype=torch.float32, offset=starts[2] + stage * reduce_bytes + buffer_index * world_size * partial_bytes,
                count=world_size * partial_bytes // 4,
            )  # fmt: skip
            rows = flat.view(world_size, partial_bytes // 4)[:, : shape.max_tokens * width]
            self._reduce_buffers.append(rows.unflatten(1, (shape.max_tokens, width)))
        if activation_bytes:
            self._activations = self._float_view(starts[3], shape.max_tokens, shape.hidden_size)
        self.logits = self._float_view(starts[4], shape.max_tokens, vocab)
        self._buffer_index = 0

    def _float_view(self, start: int, rows: int, columns: int) -> Tensor:
        flat = torch.frombuffer(self._memory, dtype=torch.float32, offset=start, count=rows * columns)
        return flat.view(rows, columns)

    # From stage to stage

    def wait_prev_stage(self) -> None:
        """Begin a step: wait until the stage before this one has done it."""
        self._num_steps += 1
        if not self.is_first_stage:
            self._wait(self._steps_done[self.stage - 1 : self.stage], self._num_steps)

    def activations(self, count: int) -> Tensor:
        """Return what the stage before has left, fp32 (count, width)."""
        return self._activations[:count]

    def publish(self, activations: Tensor | None = None) -> None:
        """End a step, leaving states (tokens, width) where another stage reads them."""
        if self.rank == 0:  # all ranks of a stage have the same
            if activations is not None:
                self._activations[: len(activations)] = activations
            self._steps_done[self.stage] = self._num_steps

    def wait_last_stage(self) -> None:
        """Wait until the last stage has done the step."""
        self._wait(self._steps_done[-1:], self._num_steps)

    # For tapes

    def barrier_args(self) -> list[int]:
        """Return the arguments of the kernel ``meet``."""
        return self._barrier_args

    def next_reduce_buffers(self) -> Tensor:
        """Return the next set of parts (size, tokens, width padded to 32), fp32; ours is ``[rank]``."""
        self._buffer_index = 1 - self._buffer_index
        return self._reduce_buffers[self._buffer_index]

    @property
    def vocab_start(self) -> int:
        """Where this rank's part of the vocabulary begins."""
        return vocab_range(self.shape.vocab_size, self.rank, self.world_size)[0]

    # For operators

    def barrier(self) -> None:
        """Wait until all ranks are here, or one is gone."""
        target = self._counters[self.rank] + 1
        self._counters[self.rank] = target
        self._wait(self._counters, target)

    def _wait(self, counters: np.ndarray, target: int) -> None:
        spins = 0
        while (counters < target).any() and not self.aborted:
            spins += 1
            if spins > _NUM_SPINS:
                time.sleep(0 if spins < _MAX_YIELDS else 5e-5)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x (tokens, width), the same bits on each."""
        if self.world_size == 1:
            return x
        if x.is_cuda and dist.is_initialized() and dist.get_world_size() == self.world_size:
            dist.all_reduce(x)
            return x
        rows, columns = x.shape
        partials = self.next_reduce_buffers()[:, :rows, :columns]
        partials[self.rank].copy_(x)
        self.barrier()
        total = partials[0].clone()
        for rank in range(1, self.world_size):
            total += partials[rank]
        return total.to(x.device, x.dtype)

    def gather_logits(self, partial: Tensor) -> Tensor:
        """Return fp32 logits (rows, vocab), put together from all ranks' columns, on the CPU."""
        start, rows = self.vocab_start, len(partial)
        self.logits[:rows, start : start + partial.shape[1]] = partial
        self.barrier()
        return self.logits[:rows, : self.shape.vocab_size]

    # Ends

    @property
    def aborted(self) -> bool:
        """Whether a rank is gone: nobody waits any more, and results are void."""
        return bool(self._aborted_flag[0])

    def abort(self) -> None:
        """Say that a rank is gone."""
        self._aborted_flag[0] = 1


def create_memfd() -> int:
    """Return a memfd for a :class:`Team`, which makes it as long as it must be."""
    return os.memfd_create("thalweg-team", os.MFD_CLOEXEC)


def _align_to_page(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE
