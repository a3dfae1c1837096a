"""The memory in which the ranks of a tensor-parallel engine meet.

The picture, for two ranks::

    | counters | tables | parts: rank 0 | rank 1 | the same once more | logits                  |
                          (tokens, width)           used in turns       rank 0 writes the left
                                                                        columns, rank 1 the right

A rank writes its part of a sum, meets the others, and adds up all parts in the order of ranks, so that all
have the same bits.  The second set of parts is there so that a fast rank may write before a slow one has
read: a set is used again only after a meeting in between.  Nothing is copied to gather logits: each rank's
product ends in its columns.  Block tables are rank 0's, which alone schedules.

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

from thalweg.infer.shard import vocab_part

_LINE = 128  # bytes from one rank's counter to the next, as ops/native/meeting.py has it
_PAGE = 4096
_SPINS = 100


@dataclass(frozen=True)
class Shape:
    """What the memory has to hold: rows of a step, their width, the vocabulary, the block tables."""

    tokens: int
    width: int
    vocab: int
    slots: int
    table: int


class Team:
    """One rank's view of the memory behind ``handle`` (a memfd; it stays the caller's)."""

    def __init__(self, rank: int, size: int, shape: Shape, handle: int) -> None:
        self.rank, self.size, self.shape = rank, size, shape
        width, vocab = -(-shape.width // 32) * 32, -(-shape.vocab // 32) * 32
        part = _up(4 * shape.tokens * width)
        sizes = [_up((size + 1) * _LINE), _up(4 * shape.slots * shape.table), 2 * size * part]
        sizes.append(_up(4 * shape.tokens * vocab))
        starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        if os.fstat(handle).st_size < starts[-1]:
            os.ftruncate(handle, starts[-1])
        self._memory = mmap.mmap(handle, starts[-1])
        self._cells = np.frombuffer(self._memory, np.int64, (size + 1) * _LINE // 8)
        self._base = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self.tables = np.frombuffer(
            self._memory, np.int32, shape.slots * shape.table, starts[1]
        ).reshape(shape.slots, shape.table)  # fmt: skip
        self._sets = []
        for turn in range(2):
            flat = torch.frombuffer(
                self._memory, dtype=torch.float32, offset=starts[2] + turn * size * part,
                count=size * part // 4,
            )  # fmt: skip
            rows = flat.view(size, part // 4)[:, : shape.tokens * width]
            self._sets.append(rows.unflatten(1, (shape.tokens, width)))
        self.logits = torch.frombuffer(
            self._memory, dtype=torch.float32, offset=starts[3], count=shape.tokens * vocab
        ).view(shape.tokens, vocab)
        self._turn = 0

    # For tapes

    def meeting(self) -> list[int]:
        """Return the arguments of the kernel ``meet``."""
        return [self._base, self.rank, self.size, self._base + self.size * _LINE]

    def parts(self) -> Tensor:
        """Return the next set of parts (size, tokens, width padded to 32), fp32; ours is ``[rank]``."""
        self._turn = 1 - self._turn
        return self._sets[self._turn]

    @property
    def first_token(self) -> int:
        """Where this rank's part of the vocabulary begins."""
        return vocab_part(self.shape.vocab, self.rank, self.size)[0]

    # For operators

    def meet(self) -> None:
        """Wait until all ranks are here, or one is gone."""
        mine = self._cells[self.rank * _LINE // 8] + 1
        self._cells[self.rank * _LINE // 8] = mine
        spins = 0
        while (self._cells[: -(_LINE // 8) : _LINE // 8] < mine).any() and not self.gone:
            spins += 1
            if spins > _SPINS:
                time.sleep(0)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x (tokens, width), the same bits on each."""
        if x.is_cuda and dist.is_initialized() and dist.get_world_size() == self.size:
            dist.all_reduce(x)
            return x
        rows, columns = x.shape
        every = self.parts()[:, :rows, :columns]
        every[self.rank].copy_(x)
        self.meet()
        total = every[0].clone()
        for rank in range(1, self.size):
            total += every[rank]
        return total.to(x.device, x.dtype)

    def gather(self, part: Tensor) -> Tensor:
        """Return fp32 logits (rows, vocab), put together from all ranks' columns, on the CPU."""
        start, rows = self.first_token, len(part)
        self.logits[:rows, start : start + part.shape[1]] = part
        self.meet()
        return self.logits[:rows, : self.shape.vocab]

    # Ends

    @property
    def gone(self) -> bool:
        """Whether a rank is gone: nobody waits any more, and results are void."""
        return bool(self._cells[self.size * _LINE // 8])

    def leave(self) -> None:
        """Say that a rank is gone."""
        self._cells[self.size * _LINE // 8] = 1


def shared_handle() -> int:
    """Return a memfd for a :class:`Team`, which makes it as long as it must be."""
    return os.memfd_create("thalweg-team", os.MFD_CLOEXEC)


def _up(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE
