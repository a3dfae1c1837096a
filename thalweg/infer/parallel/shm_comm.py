"""The CPU kernels' all-reduce: memory that the ranks of a stage share, beside the process group.

The picture, for a stage of two ranks::

    | failed | counters | partial sums: rank 0 | rank 1 | the same once more | logits           |
                          (tokens, hidden_size)           used in turns       rank 0 writes the left
                                                                              columns, rank 1 the right

A rank writes its partial sum, waits at the barrier, and adds up all of them in the order of ranks, so that all ranks
have the same bits.  The second set of buffers lets a fast rank write before a slow one has read: a set is used again
only after a barrier in between.  Gathering logits copies nothing: each rank's product ends in its columns.

Why not gloo: a decoded token needs two sums in each layer, each of which would end the kernels' program.  On two busy
cores, of a Llama of 8 layers, 512 wide, the 16 sums of a token took gloo 5 ms at best, and the whole step with sums in
shared memory 6 ms.

The memory is a memfd without a name, which the stage's other ranks open through ``/proc``; it goes with its last
process.
"""

import mmap
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thalweg.infer.parallel.communicator import StageCommunicator
from thalweg.infer.parallel.process_group import InferenceGroup
from thalweg.ops.cpu_kernels import CACHE_LINE_BYTES
from thalweg.storage_io.allocator import round_up


class ShmCommunicator(StageCommunicator):
    """A stage whose sums and logits meet in shared memory; creating it is collective over the stage."""

    def __init__(self, group: InferenceGroup, **shape: Any) -> None:
        super().__init__(group, **shape)
        if not group.shares_host:
            raise ValueError("the CPU kernels add up in shared memory: the ranks of an engine must be on one host")
        width, vocab = -(-self.hidden_size // 32) * 32, -(-self.vocab_size // 32) * 32
        tokens, world_size = self.max_num_batched_tokens, self.world_size
        partial_bytes = round_up(4 * tokens * width)
        reduce_start = round_up((1 + world_size) * CACHE_LINE_BYTES)
        logits_start = reduce_start + 2 * world_size * partial_bytes
        self._memory = self._map_memory(logits_start + round_up(4 * tokens * vocab))
        self._failed_word = np.frombuffer(self._memory, np.int64, 1)  # a rank that has ended, and 1
        address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        # The arguments of the kernel ``barrier``.
        self.barrier_args = [address + CACHE_LINE_BYTES, self.rank, world_size, address]
        self._reduce_buffers = []
        for index in range(2):
            start = reduce_start + index * world_size * partial_bytes
            ranks = self._floats(start, world_size, partial_bytes // 4)[:, : tokens * width]
            self._reduce_buffers.append(ranks.unflatten(1, (tokens, width)))
        self.logits = self._floats(logits_start, tokens, vocab)
        self._buffer_index = 0
        group.on_failure.append(self._end_barriers)
        if group.failed_rank is not None:
            self._end_barriers(group.failed_rank)

    def _map_memory(self, num_bytes: int) -> mmap.mmap:
        """Map the stage's memory, which its first rank creates."""
        if self.rank == 0:
            with os.fdopen(os.memfd_create("thalweg-infer", os.MFD_CLOEXEC), "r+b", buffering=0) as file:
                file.truncate(num_bytes)
                self.group.send({"path": f"/proc/{os.getpid()}/fd/{file.fileno()}"}, self.ranks[1:])
                memory = mmap.mmap(file.fileno(), num_bytes)
                for rank in self.ranks[1:]:  # they have mapped it
                    self.group.receive(rank)
            return memory
        path = self.group.receive(self.ranks[0])["path"]
        with open(path, "r+b", buffering=0) as file:
            memory = mmap.mmap(file.fileno(), num_bytes)
        self.group.send({}, self.ranks[:1])
        return memory

    def _floats(self, start: int, rows: int, columns: int) -> Tensor:
        flat = torch.frombuffer(self._memory, dtype=torch.float32, offset=start, count=rows * columns)
        return flat.view(rows, columns)

    def next_reduce_buffers(self) -> Tensor:
        """Return the next set of partial sums (ranks, tokens, hidden_size padded to 32), fp32; ours is ``[rank]``."""
        self._buffer_index = 1 - self._buffer_index
        return self._reduce_buffers[self._buffer_index]

    @property
    def failed_rank(self) -> int | None:
        """A rank that has ended, or left: nobody waits at barriers any more."""
        return int(self._failed_word[0]) - 1 if self._failed_word[0] else self.group.failed_rank

    def _end_barriers(self, rank: int) -> None:
        if not self._failed_word[0]:
            self._failed_word[0] = rank + 1

    def close(self) -> None:
        """Leave the group and let nobody wait for this rank."""
        self._end_barriers(self.group.rank)
        super().close()
