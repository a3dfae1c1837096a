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

from thalweg.optim.offload.io_chunks import IoChunk
from thalweg.storage_io import BufferRing, IoFuture, IoThreadPool, SwapFile
from thalweg.utils.log import get_logger
from thalweg.utils.threads import set_single_threaded

_log = get_logger("optim")
_SLOW_DISK_RATE = 300e6  # bytes a second; below this a disk is worth a word

ChunkFn = Callable[[IoChunk, Tensor], None]


class IoPipeline:
    """``ring``: at least two buffers, each large enough for any chunk; ``io_wait_seconds``: seconds of the last run in
    which the work waited for the disk."""

    def __init__(self, swap: SwapFile, ring: BufferRing) -> None:
        assert len(ring) >= 2, "one buffer cannot read and write at once"
        self._swap, self._ring = swap, ring
        self.io_wait_seconds = 0.0
        self._thread = IoThreadPool(1, "thalweg-stream", initializer=set_single_threaded)
        self._prefetched: list[tuple[IoChunk, IoFuture]] = []
        self._warned = False

    def run(self, chunks: Sequence[IoChunk], chunk_fn: ChunkFn) -> None:
        """Call ``chunk_fn(chunk, buffer)`` for each chunk, in order.

        Raises:
            SwapError: a transfer failed; some chunks are then written and others not.
        """
        if chunks:
            self._thread.submit(self._run_chunks, chunks, chunk_fn).result()

    def readahead(self, chunks: Sequence[IoChunk]) -> None:
        """Begin to read what :meth:`run` is likely to be called with next; returns at once."""
        self._thread.submit(self._start_readahead, list(chunks)[: len(self._ring)])

    def cancel_readahead(self) -> None:
        """What was expected does not come, or may be written before it does."""
        self._thread.submit(self._discard_prefetched)

    def _start_readahead(self, chunks: Sequence[IoChunk]) -> None:
        self._discard_prefetched()
        for turn, chunk in enumerate(chunks):
            self._prefetched.append((chunk, chunk.begin_read(self._swap, self._ring[turn])))

    def _discard_prefetched(self) -> None:
        prefetched, self._prefetched = self._prefetched, []
        for _, future in prefetched:
            future.wait_ignoring_errors()

    def _pop_prefetched(self, chunks: Sequence[IoChunk]) -> dict[int, IoFuture]:
        """Reads under way of the first of ``chunks``, if these are what was expected."""
        same = all(a.reads == b.reads for (a, _), b in zip(self._prefetched, chunks, strict=False))
        if not same or len(chunks) < len(self._prefetched):
            self._discard_prefetched()
        prefetched, self._prefetched = self._prefetched, []
        return {turn: future for turn, (_, future) in enumerate(prefetched)}

    @torch.no_grad()
    def _run_chunks(self, chunks: Sequence[IoChunk], chunk_fn: ChunkFn) -> None:
        swap, ring, depth = self._swap, self._ring, len(self._ring)
        start_time, start_bytes = time.perf_counter(), swap.reads.nbytes + swap.writes.nbytes
        self.io_wait_seconds = 0.0
        reads = self._pop_prefetched(chunks)
        writes = [IoFuture() for _ in range(depth)]

        def start_read(turn: int) -> None:
            if turn < len(chunks) and turn not in reads:
                self._timed_wait(writes[turn % depth])
                reads[turn] = chunks[turn].begin_read(swap, ring[turn])

        try:
            for turn in range(depth - 1):
                start_read(turn)
            for turn, chunk in enumerate(chunks):
                self._timed_wait(reads.pop(turn))
                chunk_fn(chunk, ring[turn])
                writes[turn % depth] = chunk.begin_write(swap, ring[turn])
                start_read(turn + depth - 1)
            for future in writes:
                self._timed_wait(future)
        finally:
            for future in [*reads.values(), *writes]:
                future.wait_ignoring_errors()
        self._warn_if_slow(time.perf_counter() - start_time, swap.reads.nbytes + swap.writes.nbytes - start_bytes)

    def _timed_wait(self, future: IoFuture) -> None:
        start = time.perf_counter()
        future.wait()
        self.io_wait_seconds += time.perf_counter() - start

    def _warn_if_slow(self, seconds: float, nbytes: int) -> None:
        """Say once that the disk is what a step waits for, if it is a slow one."""
        if (
            self._warned
            or nbytes < (64 << 20)
            or self.io_wait_seconds < 0.5 * seconds
            or nbytes / seconds > _SLOW_DISK_RATE
        ):
            return
        self._warned = True
        _log.warning(
            "the disk of %s moves %.0f MB/s, and the optimiser's step moves %.0f MB: %.1f of its %.1f s went "
            "by waiting. Point nvme_path to a faster disk, or keep the optimiser in memory (device cpu)",
            self._swap.folder,
            nbytes / seconds / 1e6,
            nbytes / 1e6,
            self.io_wait_seconds,
            seconds,
        )
