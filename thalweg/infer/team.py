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

from thalweg.infer.shard import vocab_part

_LINE = 128  # bytes from one rank's counter to the next, as ops/native/meeting.py has it
_PAGE = 4096
_SPINS, _LONG = 100, 10_000


@dataclass(frozen=True)
class Shape:
    """What the memory has to hold: rows of a step, their width, the vocabulary, the block tables; for how
    many stages."""

    tokens: int
    width: int
    vocab: int
    slots: int
    table: int
    stages: int = 1


class Team:
    """One rank's view of the memory behind ``handle`` (a memfd; it stays the caller's).

    ``rank`` of the ``size`` ranks of the ``stage``.
    """

    def __init__(self, rank: int, size: int, shape: Shape, handle: int, stage: int = 0) -> None:
        self.rank, self.size, self.shape, self.stage = rank, size, shape, stage
        self.first, self.last, self._steps = stage == 0, stage == shape.stages - 1, 0
        width, vocab = -(-shape.width // 32) * 32, -(-shape.vocab // 32) * 32
        part = _up(4 * shape.tokens * width)
        parts = 2 * size * part if size > 1 else 0
        relayed = part if shape.stages > 1 else 0
        lines = 1 + shape.stages * (1 + size)  # a word for the end; each stage's steps and counters
        sizes = [_up(lines * _LINE), _up(4 * shape.slots * shape.table), shape.stages * parts, relayed]
        sizes.append(_up(4 * shape.tokens * vocab))
        starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        if os.fstat(handle).st_size < starts[-1]:
            os.ftruncate(handle, starts[-1])
        self._memory = mmap.mmap(handle, starts[-1])
        cells = np.frombuffer(self._memory, np.int64, lines * _LINE // 8)[:: _LINE // 8]
        self._gone, self._done = cells[:1], cells[1 : 1 + shape.stages]
        ours = 1 + shape.stages + stage * size
        self._counters = cells[ours : ours + size]
        self._base = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self._meeting = [self._base + ours * _LINE, rank, size, self._base]
        self.tables = np.frombuffer(
            self._memory, np.int32, shape.slots * shape.table, starts[1]
        ).reshape(shape.slots, shape.table)  # fmt: skip
        self._sets = []
        for turn in range(2 if size > 1 else 0):
            flat = torch.frombuffer(
                self._memory, dtype=torch.float32, offset=starts[2] + stage * parts + turn * size * part,
                count=size * part // 4,
            )  # fmt: skip
            rows = flat.view(size, part // 4)[:, : shape.tokens * width]
            self._sets.append(rows.unflatten(1, (shape.tokens, width)))
        if relayed:
            self._states = self._floats(starts[3], shape.tokens, shape.width)
        self.logits = self._floats(starts[4], shape.tokens, vocab)
        self._turn = 0

    def _floats(self, start: int, rows: int, columns: int) -> Tensor:
        flat = torch.frombuffer(self._memory, dtype=torch.float32, offset=start, count=rows * columns)
        return flat.view(rows, columns)

    # From stage to stage

    def begin(self) -> None:
        """Begin a step: wait until the stage before this one has done it."""
        self._steps += 1
        if not self.first:
            self._wait(self._done[self.stage - 1 : self.stage], self._steps)

    def states(self, count: int) -> Tensor:
        """Return what the stage before has left, fp32 (count, width)."""
        return self._states[:count]

    def end(self, states: Tensor | None = None) -> None:
        """End a step, leaving states (tokens, width) where another stage reads them."""
        if self.rank == 0:  # all ranks of a stage have the same
            if states is not None:
                self._states[: len(states)] = states
            self._done[self.stage] = self._steps

    def finish(self) -> None:
        """Wait until the last stage has done the step."""
        self._wait(self._done[-1:], self._steps)

    # For tapes

    def meeting(self) -> list[int]:
        """Return the arguments of the kernel ``meet``."""
        return self._meeting

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
        mine = self._counters[self.rank] + 1
        self._counters[self.rank] = mine
        self._wait(self._counters, mine)

    def _wait(self, counters: np.ndarray, wanted: int) -> None:
        spins = 0
        while (counters < wanted).any() and not self.gone:
            spins += 1
            if spins > _SPINS:
                time.sleep(0 if spins < _LONG else 5e-5)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x (tokens, width), the same bits on each."""
        if self.size == 1:
            return x
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
        return bool(self._gone[0])

    def leave(self) -> None:
        """Say that a rank is gone."""
        self._gone[0] = 1


def shared_handle() -> int:
    """Return a memfd for a :class:`Team`, which makes it as long as it must be."""
    return os.memfd_create("thalweg-team", os.MFD_CLOEXEC)


def _up(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE
