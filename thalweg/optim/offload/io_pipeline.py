"""Chunks of a swap file that pass through a ring of buffers: read n+1, work on n, write n-1.

It runs on a thread of its own that uses one core: one reaches several times a disk's rate, and a team of
threads that has to meet after each chunk is held up by whoever else computes (40 times slower, where a
backward pass had the cores).

What comes next may be told beforehand (:meth:`IoPipeline.readahead`): its first chunks are then read into the idle
ring, as many as fit.  A guess that turns out wrong costs those reads.  Between the guess and its use nobody
may write what it reads.

Several runs may follow one another without a pause of the disk (``finish_writes=False``): the last writes of one go
out while the next one reads and works.  :meth:`IoPipeline.flush` ends them.

Invariants: nothing is written before its chunk was worked on, and all transfers of a run are over when it raises, or
returns and was to finish its writes.

What a step reads and writes is cut into chunks that fit a buffer:

    ParamStep   one parameter in this step, with its tensors
    StepTensor  one flat tensor of it: the master, the gradient, each state tensor, the compute copy
    ParamSlice  elements [start, stop) of a parameter, the same for all its tensors
    IoChunk     pieces whose tensors fit one buffer together

A tensor has a ``file_offset`` if it lies in the swap file on a page boundary; then its bytes pass through the
buffer.  Any other is used where it is.  Pieces are cut at multiples of ``ALIGN_ELEMENTS`` elements from the start of
the parameter, for two reasons: such a cut is a page boundary in every dtype, and it is a multiple of every
vector length, so that torch's kernels treat each element as they would in one call over the whole parameter
(their scalar tails may round differently).

Invariant: a tensor that begins on a page boundary of the swap file owns the pages up to its end.  Hence no
page belongs to two chunks, and neighbours in the file can be read and written in one transfer.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from thalweg.storage_io.allocator import PAGE, round_up
from thalweg.storage_io.evictable_memory import BufferRing
from thalweg.storage_io.io_threads import IoFuture, IoThreadPool, combine_futures
from thalweg.storage_io.swap_file import SwapFile
from thalweg.utils.log import get_logger

_log = get_logger("optim")
_SLOW_DISK_RATE = 300e6  # bytes a second; below this a disk is worth a word

ALIGN_ELEMENTS = PAGE


@dataclass
class StepTensor:
    """A flat tensor, whether it is needed and changed, and its place in the swap file if it has one; new
    values go there, or to ``shadow_offset``, another place that is as large."""

    tensor: Tensor
    file_offset: int | None
    read: bool = True
    write: bool = False
    shadow_offset: int | None = None

    @property
    def padded_bytes(self) -> int:
        """Bytes that it takes in the swap file."""
        return round_up(self.tensor.nbytes)


@dataclass
class ParamStep:
    """One parameter in this step; ``scalar_state`` is the part of its state that is not cut."""

    group: dict[str, Any]
    param: Tensor
    numel: int
    step_tensors: dict[str, StepTensor]
    state_keys: tuple[str, ...]
    scalar_state: dict[str, Any]
    is_new_state: bool
    new_scalar_state: dict[str, Any] = field(default_factory=dict)

    def buffer_bytes(self, num_elements: int) -> int:
        """Bytes of buffer that ``num_elements`` elements take."""
        return sum(
            round_up(num_elements * step_tensor.tensor.itemsize)
            for step_tensor in self.step_tensors.values()
            if step_tensor.file_offset is not None
        )


class IoRange(NamedTuple):
    """Bytes that move together between the file and a buffer (or another place in the file)."""

    file_offset: int
    buffer_offset: int
    nbytes: int


@dataclass
class ParamSlice:
    """Elements ``[start, stop)`` of an item; ``buffer_offsets`` is where its operands lie in the buffer."""

    param_step: ParamStep
    start: int
    stop: int
    buffer_offsets: dict[str, int] = field(default_factory=dict)

    def get_tensor(self, name: str, buffer: Tensor | None) -> Tensor:
        """The operand's elements, in the buffer or in memory."""
        step_tensor, offset = self.param_step.step_tensors[name], self.buffer_offsets.get(name)
        if offset is None:
            return step_tensor.tensor[self.start : self.stop]
        assert buffer is not None
        nbytes = (self.stop - self.start) * step_tensor.tensor.itemsize
        return buffer[offset : offset + nbytes].view(step_tensor.tensor.dtype)

    def subslice(self, start: int, stop: int) -> Self:
        """A part of it, where its operands lie."""
        step_tensors, skipped = self.param_step.step_tensors, start - self.start
        offsets = {name: at + skipped * step_tensors[name].tensor.itemsize for name, at in self.buffer_offsets.items()}
        return replace(self, start=start, stop=stop, buffer_offsets=offsets)


@dataclass
class IoChunk:
    """Pieces that share a buffer, and the transfers that fill and empty it."""

    slices: list[ParamSlice]
    reads: list[IoRange]
    writes: list[IoRange]


def split_into_chunks(param_steps: Iterable[ParamStep], buffer_bytes: int, max_elements: int) -> list[IoChunk]:
    """Cut ``param_steps``, in their order, into chunks of at most ``buffer_bytes`` and ``max_elements``.

    Raises:
        ValueError: not even ``ALIGN_ELEMENTS`` elements of an item fit a buffer.
    """
    whole = (ParamSlice(param_step, 0, param_step.numel) for param_step in param_steps)
    return [_build_chunk(slices) for slices in split_slices(whole, max_elements, buffer_bytes)]


def split_slices(slices: Iterable[ParamSlice], max_elements: int, max_bytes: int = 1 << 62) -> list[list[ParamSlice]]:
    """Cut pieces further, into groups of about ``max_elements`` that stay in the cache, or in a buffer."""
    groups: list[list[ParamSlice]] = [[]]
    bytes_left, elements_left = max_bytes, max_elements
    for piece in slices:
        start, buffer_bytes = piece.start, piece.param_step.buffer_bytes
        while True:
            num_elements = piece.stop - start
            if num_elements > elements_left or buffer_bytes(num_elements) > bytes_left:
                unit_bytes = buffer_bytes(ALIGN_ELEMENTS)
                num_units = min(elements_left // ALIGN_ELEMENTS, bytes_left // unit_bytes if unit_bytes else 1 << 62)
                num_elements = min(num_units * ALIGN_ELEMENTS, num_elements)
                if num_elements == 0:
                    if not groups[-1]:
                        raise ValueError(
                            f"buffers of {max_bytes} bytes are too small for this optimiser: it needs at "
                            f"least {unit_bytes}; raise buffer_size"
                        )
                    groups.append([])
                    bytes_left, elements_left = max_bytes, max_elements
                    continue
            groups[-1].append(piece.subslice(start, start + num_elements))
            bytes_left -= buffer_bytes(num_elements)
            start, elements_left = start + num_elements, elements_left - num_elements
            if start >= piece.stop:
                break
    return [group for group in groups if group]


def _build_chunk(slices: list[ParamSlice]) -> IoChunk:
    operands = [
        (step_tensor.file_offset + piece.start * step_tensor.tensor.itemsize, piece, name, step_tensor)
        for piece in slices
        for name, step_tensor in piece.param_step.step_tensors.items()
        if step_tensor.file_offset is not None and piece.stop > piece.start
    ]
    # In the order of the file, so that neighbours there are neighbours in the buffer.
    operands.sort(key=lambda operand: operand[0])
    reads, writes, buffer_offset = [], [], 0
    for offset, piece, name, step_tensor in operands:
        piece.buffer_offsets[name] = buffer_offset
        nbytes = round_up((piece.stop - piece.start) * step_tensor.tensor.itemsize)
        if step_tensor.read:
            reads.append(IoRange(offset, buffer_offset, nbytes))
        if step_tensor.write:
            shadow, home = step_tensor.shadow_offset, step_tensor.file_offset
            shift = 0 if shadow is None or home is None else shadow - home
            writes.append(IoRange(offset + shift, buffer_offset, nbytes))
        buffer_offset += nbytes
    return IoChunk(slices, merge_adjacent(reads), merge_adjacent(writes))


def merge_adjacent(io_ranges: Iterable[IoRange]) -> list[IoRange]:
    """Make one range of those that follow one another in both places."""
    merged: list[IoRange] = []
    for io_range in io_ranges:
        last = merged[-1] if merged else IoRange(-1, -1, 0)
        if (last.file_offset + last.nbytes, last.buffer_offset + last.nbytes) == io_range[:2]:
            merged[-1] = last._replace(nbytes=last.nbytes + io_range.nbytes)
        else:
            merged.append(io_range)
    return merged


def _start_transfers(transfer: Callable[[int, Tensor], IoFuture], io_ranges: list[IoRange], buffer: Tensor) -> IoFuture:
    return combine_futures(transfer(at, buffer[start : start + nbytes]) for at, start, nbytes in io_ranges)


def set_single_threaded() -> None:
    """Let torch's operations of this thread run on it alone, and leave all others as they are.

    torch keeps the number of threads twice: for each thread (OpenMP's own), and as a default for threads that
    are yet to compute.  ``set_num_threads`` sets both; a short-lived thread sets the default back.
    """
    default = torch.get_num_threads()
    torch.set_num_threads(1)
    restorer = threading.Thread(target=torch.set_num_threads, args=(default,))
    restorer.start()
    restorer.join()


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
        self._first = 0  # the buffer that the next run begins with
        self._writes = [IoFuture()] * len(ring)  # by buffer, what was last written from it
        self._warned = False

    def run(self, chunks: Sequence[IoChunk], chunk_fn: ChunkFn, finish_writes: bool = True) -> None:
        """Call ``chunk_fn(chunk, buffer)`` for each chunk, in order.

        Without ``finish_writes`` the last writes may be under way when it returns: until :meth:`flush`, or a run that
        finishes its own, nobody may read or write what they write.

        Raises:
            SwapError: a transfer failed, of this run or of one before that left it; some chunks are then written and
                others not.
        """
        if chunks:
            self._thread.submit(self._run_chunks, chunks, chunk_fn, finish_writes).result()

    def flush(self) -> None:
        """Return when no write of a run is under way.

        Raises:
            SwapError: one failed.
        """
        self._thread.submit(self._finish_writes).result()

    def readahead(self, chunks: Sequence[IoChunk]) -> None:
        """Begin to read what :meth:`run` is likely to be called with next; returns at once."""
        # One buffer is left to the last write of a run that has not finished it.
        self._thread.submit(self._start_readahead, list(chunks)[: len(self._ring) - 1])

    def cancel_readahead(self) -> None:
        """What was expected does not come, or may be written before it does."""
        self._thread.submit(self._discard_prefetched)

    def _start_readahead(self, chunks: Sequence[IoChunk]) -> None:
        self._discard_prefetched()
        for turn, chunk in enumerate(chunks, self._first):
            self._writes[turn % len(self._ring)].wait_ignoring_errors()  # the run or flush() raises them
            self._prefetched.append((chunk, _start_transfers(self._swap.read, chunk.reads, self._ring[turn])))

    def _discard_prefetched(self) -> None:
        prefetched, self._prefetched = self._prefetched, []
        for _, future in prefetched:
            future.wait_ignoring_errors()

    def _finish_writes(self) -> None:
        writes, self._writes = self._writes, [IoFuture()] * len(self._ring)
        combine_futures(writes).wait()

    @torch.no_grad()
    def _run_chunks(self, chunks: Sequence[IoChunk], chunk_fn: ChunkFn, finish_writes: bool) -> None:
        swap, ring, depth, first = self._swap, self._ring, len(self._ring), self._first
        start_time, start_bytes = time.perf_counter(), swap.reads.nbytes + swap.writes.nbytes
        self.io_wait_seconds = 0.0
        # Reads under way count if they are those of the first chunks.
        same = all(a.reads == b.reads for (a, _), b in zip(self._prefetched, chunks, strict=False))
        if not same or len(chunks) < len(self._prefetched):
            self._discard_prefetched()
        prefetched, self._prefetched = self._prefetched, []
        reads = {turn: future for turn, (_, future) in enumerate(prefetched)}
        writes = self._writes

        def start_read(turn: int) -> None:
            if turn < len(chunks) and turn not in reads:
                self._timed_wait(writes[(first + turn) % depth])
                reads[turn] = _start_transfers(swap.read, chunks[turn].reads, ring[first + turn])

        try:
            for turn in range(depth - 1):
                start_read(turn)
            for turn, chunk in enumerate(chunks):
                self._timed_wait(reads.pop(turn))
                chunk_fn(chunk, ring[first + turn])
                writes[(first + turn) % depth] = _start_transfers(swap.write, chunk.writes, ring[first + turn])
                start_read(turn + depth - 1)
            for future in writes if finish_writes else ():
                self._timed_wait(future)
        except BaseException:
            for future in [*reads.values(), *writes]:
                future.wait_ignoring_errors()
            self._writes = [IoFuture()] * depth
            raise
        self._first = (first + len(chunks)) % depth
        seconds, nbytes = time.perf_counter() - start_time, swap.reads.nbytes + swap.writes.nbytes - start_bytes
        # Said once, if the disk is what a step waits for, and a slow one.
        is_slow = self.io_wait_seconds >= 0.5 * seconds and nbytes <= _SLOW_DISK_RATE * seconds
        if is_slow and nbytes >= 64 << 20 and not self._warned:
            self._warned = True
            _log.warning(
                "the disk of %s moves %.0f MB/s, and the optimiser's step moves %.0f MB: %.1f of its %.1f s went "
                "by waiting. Point nvme_path to a faster disk, or keep the optimiser in memory (device cpu)",
                swap.folder,
                nbytes / seconds / 1e6,
                nbytes / 1e6,
                self.io_wait_seconds,
                seconds,
            )

    def _timed_wait(self, future: IoFuture) -> None:
        start = time.perf_counter()
        future.wait()
        self.io_wait_seconds += time.perf_counter() - start
