"""Chunks of a swap file that pass through a ring of buffers: read n+1, work on n, write n-1.

It runs on a thread of its own that uses one core: one reaches several times a disk's rate, and a team of
threads that has to meet after each chunk is held up by whoever else computes (40 times slower, where a
backward pass had the cores).

What comes next may be told beforehand (:meth:`Stream.expect`): its first chunks are then read into the idle
ring, as many as fit.  A guess that turns out wrong costs those reads.  Between the guess and its use nobody
may write what it reads.

Invariants: nothing is written before its chunk was worked on, and all transfers of a run are over when it
returns or raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thalweg.optim.chunks import Chunk
from thalweg.store import IoThreads, Ring, SwapFile, Ticket
from thalweg.utils.log import get_logger
from thalweg.utils.threads import use_one_core

_log = get_logger("optim")
_SLOW = 300e6  # bytes a second; below this a disk is worth a word

Work = Callable[[Chunk, Tensor], None]


class Stream:
    """``ring``: at least two buffers, each large enough for any chunk; ``waited``: seconds of the last run in
    which the work waited for the disk."""

    def __init__(self, swap: SwapFile, ring: Ring) -> None:
        assert len(ring) >= 2, "one buffer cannot read and write at once"
        self._swap, self._ring = swap, ring
        self.waited = 0.0
        self._thread = IoThreads(1, "thalweg-stream", begin=use_one_core)
        self._ahead: list[tuple[Chunk, Ticket]] = []
        self._told = False

    def run(self, chunks: Sequence[Chunk], work: Work) -> None:
        """Call ``work(chunk, buffer)`` for each chunk, in order.

        Raises:
            SwapError: a transfer failed; some chunks are then written and others not.
        """
        if chunks:
            self._thread.submit(self._pump, chunks, work).result()

    def expect(self, chunks: Sequence[Chunk]) -> None:
        """Begin to read what :meth:`run` is likely to be called with next; returns at once."""
        self._thread.submit(self._read_ahead, list(chunks)[: len(self._ring)])

    def expect_nothing(self) -> None:
        """What was expected does not come, or may be written before it does."""
        self._thread.submit(self._forget)

    def _read_ahead(self, chunks: Sequence[Chunk]) -> None:
        self._forget()
        for turn, chunk in enumerate(chunks):
            self._ahead.append((chunk, chunk.begin_read(self._swap, self._ring[turn])))

    def _forget(self) -> None:
        ahead, self._ahead = self._ahead, []
        for _, ticket in ahead:
            ticket.settle()

    def _expected(self, chunks: Sequence[Chunk]) -> dict[int, Ticket]:
        """Reads under way of the first of ``chunks``, if these are what was expected."""
        same = all(a.reads == b.reads for (a, _), b in zip(self._ahead, chunks, strict=False))
        if not same or len(chunks) < len(self._ahead):
            self._forget()
        ahead, self._ahead = self._ahead, []
        return {turn: ticket for turn, (_, ticket) in enumerate(ahead)}

    @torch.no_grad()
    def _pump(self, chunks: Sequence[Chunk], work: Work) -> None:
        swap, ring, depth = self._swap, self._ring, len(self._ring)
        begun, moved = time.perf_counter(), swap.reads.nbytes + swap.writes.nbytes
        self.waited = 0.0
        reads = self._expected(chunks)
        writes = [Ticket() for _ in range(depth)]

        def begin(turn: int) -> None:
            if turn < len(chunks) and turn not in reads:
                self._wait(writes[turn % depth])
                reads[turn] = chunks[turn].begin_read(swap, ring[turn])

        try:
            for turn in range(depth - 1):
                begin(turn)
            for turn, chunk in enumerate(chunks):
                self._wait(reads.pop(turn))
                work(chunk, ring[turn])
                writes[turn % depth] = chunk.begin_write(swap, ring[turn])
                begin(turn + depth - 1)
            for ticket in writes:
                self._wait(ticket)
        finally:
            for ticket in [*reads.values(), *writes]:
                ticket.settle()
        self._report(time.perf_counter() - begun, swap.reads.nbytes + swap.writes.nbytes - moved)

    def _wait(self, ticket: Ticket) -> None:
        start = time.perf_counter()
        ticket.wait()
        self.waited += time.perf_counter() - start

    def _report(self, seconds: float, nbytes: int) -> None:
        """Say once that the disk is what a step waits for, if it is a slow one."""
        if self._told or nbytes < (64 << 20) or self.waited < 0.5 * seconds or nbytes / seconds > _SLOW:
            return
        self._told = True
        _log.warning(
            "the disk of %s moves %.0f MB/s, and the optimiser's step moves %.0f MB: %.1f of its %.1f s went "
            "by waiting. Point nvme_path to a faster disk, or keep the optimiser in memory (device cpu)",
            self._swap.folder,
            nbytes / seconds / 1e6,
            nbytes / 1e6,
            self.waited,
            seconds,
        )
