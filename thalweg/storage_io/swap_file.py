"""The swap file: tensors on a disk that are still tensors.

The picture, one file without a name in the folder the user gave::

    | region | region | ...                 |      each from a page boundary, in pages of its own
        |        `--- read / write: O_DIRECT, threads, page-aligned buffers      the fast path
        `------------ view: a tensor over a shared mapping of the same bytes     the slow path

A *view* keeps its identity for good: anything may read and write it (a checkpoint, ``p.norm()``, a user's
own optimiser), page by page through the page cache.  The fast path streams the same bytes and never touches
the mapping; *trim* gives back the memory that slow readers have faulted in.

Coherence.  A direct read first writes dirty cached pages of its range out, a direct write drops them (Linux,
local file systems; tests/unit/test_storage_io_swap_file.py).  So the two paths may alternate freely, but must not run
at the same time on the same bytes, as with any two writers.

Offsets are those of the mapping.  *Exchange* lets two ranges change places in the file (allocator.py): views
keep their addresses and show the other bytes, and not a byte is moved.

Space is taken in full when the file is made: a disk that is too small is an error before training, not in
its midst.  The file never has a name (or loses it at once), so nothing stays behind, however a job ends.
"""

import errno
import mmap
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from thalweg.storage_io.allocator import PAGE, RangeAllocator, RemapTable, round_up
from thalweg.storage_io.disk import DirectFile, Disk
from thalweg.storage_io.evictable_memory import BufferRing
from thalweg.storage_io.io_threads import IoFuture, IoThreadPool
from thalweg.utils.formatting import format_bytes

# Beyond this a larger block gains nothing and a smaller one spreads over more threads.
BLOCK_BYTES = 8 << 20
NUM_THREADS = 4
# Addresses for a file that may grow as long as its disk has room.
MAX_SWAP_BYTES = 1 << 40


class SwapError(RuntimeError):
    """A transfer failed; the message names folder, offset, bytes and cause."""


class SwapFile:
    """``num_bytes`` of disk below ``folder``, with views and asynchronous transfers.

    ``capacity``: bytes that it may grow to (by default none more); they cost addresses only.  ``segment_bytes``: it
    grows to a multiple of that where the disk has room for it, else by what is needed.
    ``block_bytes``: transfers are cut into blocks of this size, spread over ``num_threads`` threads.
    ``direct`` tells whether the page cache is bypassed; ``reads`` and ``writes`` measure transfers.

    Raises:
        ValueError: the folder is missing or not writable, or the disk has too little room.
    """

    def __init__(
        self,
        folder: str | Path,
        num_bytes: int,
        *,
        capacity: int = 0,
        segment_bytes: int = PAGE,
        num_threads: int = NUM_THREADS,
        block_bytes: int = BLOCK_BYTES,
        disk: Disk | None = None,
    ) -> None:
        self.folder, self.num_bytes = Path(folder).expanduser(), max(round_up(num_bytes), PAGE)
        self._disk = disk or Disk()
        self._block_bytes, self._segment_bytes = max(round_up(block_bytes), PAGE), segment_bytes
        self._file = DirectFile(self._disk, self._create(), self.folder)
        self.direct, self.reads, self.writes = self._file.direct, self._file.reads, self._file.writes
        self._capacity, self._memory = self._map(max(round_up(capacity), self.num_bytes))
        self._base = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self._allocator = RangeAllocator(self.num_bytes)
        self._remap_table = RemapTable()
        self._lock = threading.RLock()
        self._threads = IoThreadPool(num_threads)
        # An engine that is dropped without being closed must not keep the disk's space.
        self._finalizer = weakref.finalize(self, _close_resources, self._threads, self._file)

    # Space

    def allocate(self, nbytes: int) -> int:
        """Take ``nbytes`` (rounded up to pages); returns their offset, a multiple of the page size.  The file
        grows where it has no gap of that size and its capacity allows.

        Raises:
            ValueError: it may not grow, or the disk has too little room.
        """
        with self._lock:
            offset = self._allocator.allocate(nbytes)
            if offset is None and self.num_bytes + round_up(nbytes) <= self._capacity:
                extra = round_up(self.num_bytes + nbytes, self._segment_bytes) - self.num_bytes
                if not self.extend_if_free(extra, extra):
                    self.extend(nbytes)
                offset = self._allocator.allocate(nbytes)
        if offset is None:
            raise ValueError(
                f"the swap file in {self.folder} was made for {format_bytes(self.num_bytes)} and has "
                f"{format_bytes(self._allocator.largest_gap)} left in one piece; {format_bytes(nbytes)} more are "
                "needed: make it larger"
            )
        return offset

    def extend(self, num_bytes: int) -> None:
        """Take ``num_bytes`` more of the disk.

        Raises:
            ValueError: the disk has too little room, or the capacity is used up.
        """
        extra = round_up(num_bytes)
        if extra == 0:
            return
        with self._lock:
            if self.num_bytes + extra > self._capacity:
                raise ValueError(
                    f"a swap file of at most {format_bytes(self._capacity)} cannot take {format_bytes(extra)} more"
                )
            free = self._disk.free_bytes(self.folder)
            if free < extra:
                raise ValueError(self._too_small_message(free, needed=extra))
            # Not from the start: where the disk has no such call the C library writes to each block, transfers or not.
            self._fallocate(self._file.handle, self.num_bytes + extra, self.num_bytes)
            self.num_bytes += extra
            self._allocator.extend(extra)

    def extend_if_free(self, num_bytes: int, free_bytes: int) -> bool:
        """:meth:`extend`, if the disk has ``free_bytes``; whether it had."""
        fits = self.num_bytes + round_up(num_bytes) <= self._capacity
        if not fits or self._disk.free_bytes(self.folder) < free_bytes:
            return False
        try:
            self.extend(num_bytes)
        except ValueError:  # somebody else was quicker, or a quota says less
            return False
        return True

    def free(self, offset: int) -> None:
        """Give back the region that begins at ``offset``; its views must not be used any more."""
        with self._lock:
            self._allocator.free(offset)

    # The slow path

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor over the mapped bytes from ``offset``; it lives as long as anybody holds it."""
        if prod(shape) == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        assert offset >= 0 and offset + prod(shape) * dtype.itemsize <= self.num_bytes, (offset, shape)
        return torch.frombuffer(self._memory, dtype=dtype, count=prod(shape), offset=offset).view(tuple(shape))

    def locate(self, tensor: Tensor) -> int | None:
        """The offset of a tensor that lies in the mapping (a view, or a part of one), or None."""
        if tensor.device.type != "cpu" or not tensor.numel():
            return None
        offset = tensor.data_ptr() - self._base
        return offset if 0 <= offset < self.num_bytes else None

    def trim(self, offset: int = 0, nbytes: int | None = None) -> None:
        """Give back the memory that readers and writers of views took; the bytes stay on the disk.

        Dirty pages start on their way to the disk; the page cache keeps them until they are there.
        """
        start = offset // PAGE * PAGE
        stop = self.num_bytes if nbytes is None else min(round_up(offset + nbytes), self.num_bytes)
        if stop > start and self._finalizer.alive:
            self._memory.madvise(mmap.MADV_DONTNEED, start, stop - start)
            for extent in self._remap_table.lookup(start, stop - start):
                self._disk.drop_page_cache(self._file.handle, extent.file_offset, extent.nbytes)

    def was_touched(self, offset: int, nbytes: int) -> bool:
        """Whether anybody may have read or written the whole pages of the range through a view since they were last
        trimmed or written directly; always True where transfers go through the page cache themselves."""
        whole = nbytes // PAGE * PAGE
        return not self.direct or (whole > 0 and self._disk.is_cached(self._base + offset, whole))

    def readahead(self, offset: int, nbytes: int) -> None:
        """A hint that views of the range are about to be read: the disk starts at once."""
        for extent in self._remap_table.lookup(offset, nbytes):
            self._disk.readahead(self._file.handle, extent.file_offset, extent.nbytes)

    def swap_ranges(self, first: int, second: int, nbytes: int) -> None:
        """Let two ranges of whole pages change places in the file; no transfer of theirs may be under way.

        Raises:
            OSError: the system cannot map the file anew; nothing has changed then.
        """
        assert first % PAGE == second % PAGE == nbytes % PAGE == 0, (first, second, nbytes)
        self._remap_table.swap_ranges(first, second, nbytes)
        try:
            self._remap(first, nbytes)
            self._remap(second, nbytes)
        except OSError:
            self._remap_table.swap_ranges(first, second, nbytes)
            self._remap(first, nbytes)
            self._remap(second, nbytes)
            raise

    def can_swap_ranges(self) -> bool:
        """Whether :meth:`swap_ranges` works on this system."""
        try:
            self._remap(0, PAGE)
        except OSError:
            return False
        return True

    def _remap(self, start: int, nbytes: int) -> None:
        for extent in self._remap_table.lookup(start, nbytes):
            self._disk.mmap_fixed(self._file.handle, self._base + extent.start, extent.nbytes, extent.file_offset)

    # The fast path

    def read(self, offset: int, into: Tensor) -> IoFuture:
        """Fill the contiguous CPU tensor ``into`` from ``offset``.

        Bytes bypass the page cache where the memory's address and the offset are multiples of the page
        size (:class:`.buffer_ring.BufferRing` gives such memory); a ragged end, or all of it, goes through it.
        """
        return self._transfer("read", offset, into)

    def write(self, offset: int, source: Tensor) -> IoFuture:
        """Store the contiguous CPU tensor ``source`` at ``offset``; it must not change until the ticket is
        done."""
        return self._transfer("write", offset, source)

    @torch.no_grad()
    def write_through(self, offset: int, source: Tensor, dtype: torch.dtype, ring: BufferRing) -> None:
        """Store ``source`` as ``dtype`` at ``offset`` by way of the buffers of ``ring``: past the mapping and the page
        cache; returns when it is done."""
        step, futures = ring.buffer_bytes // dtype.itemsize, list[IoFuture]()
        for turn, piece in enumerate(source.reshape(-1).split(step)):
            if turn >= len(ring):
                futures[turn - len(ring)].wait()
            buffer = ring[turn].view(dtype)[: piece.numel()]
            buffer.copy_(piece)
            futures.append(self.write(offset + turn * step * dtype.itemsize, buffer))
        for future in futures:
            future.wait()

    def close(self) -> None:
        """End all transfers and give the file back; views that somebody still holds stay readable."""
        if self._finalizer.alive:
            self._finalizer()
            del self._memory  # views hold it on their own

    def _transfer(self, verb: Literal["read", "write"], offset: int, tensor: Tensor) -> IoFuture:
        assert self._finalizer.alive, "the swap file is closed"
        assert tensor.is_contiguous() and tensor.device.type == "cpu", "transfers need contiguous CPU memory"
        data = tensor.detach().view(-1).view(torch.uint8).numpy().data
        assert offset >= 0 and offset + data.nbytes <= self.num_bytes, (offset, data.nbytes, self.num_bytes)
        aligned = data.nbytes if offset % PAGE == 0 and tensor.data_ptr() % PAGE == 0 else 0
        aligned = aligned // PAGE * PAGE if self.direct else 0
        futures = []
        for extent in self._remap_table.lookup(offset, data.nbytes):
            begin = extent.start - offset
            end = begin + extent.nbytes
            aligned_end = min(max(aligned, begin), end)
            boundaries = [
                *range(begin, aligned_end, self._block_bytes),
                *range(aligned_end, end, self._block_bytes),
                end,
            ]
            for start, stop in pairwise(boundaries):
                file_offset = extent.file_offset + start - begin
                block, direct = data[start:stop], stop <= aligned
                futures.append(self._threads.submit(self._transfer_block, verb, block, file_offset, direct))
        return IoFuture(futures)

    def _transfer_block(self, verb: Literal["read", "write"], data: memoryview, offset: int, direct: bool) -> None:
        try:
            self._file.transfer(verb, data, offset, direct)
        except OSError as error:
            hint = " Make room on that disk." if error.errno == errno.ENOSPC else ""
            raise SwapError(
                f"cannot {verb} {data.nbytes} bytes at offset {offset} of the swap file in {self.folder}: "
                f"{error.strerror or error}.{hint}"
            ) from error

    # Birth

    def _create(self) -> int:
        disk, folder = self._disk, self.folder
        try:
            free = disk.free_bytes(folder)
        except OSError as error:
            raise ValueError(
                f"the swap folder {folder} cannot be used: {error.strerror}. Create it on the disk that is "
                "to hold the swap file"
            ) from error
        if free < self.num_bytes:
            raise ValueError(self._too_small_message(free))
        try:
            handle = disk.open_unnamed(folder)
        except OSError as error:
            raise ValueError(
                f"no file can be made in the swap folder {folder}: {error.strerror}. Choose a folder that "
                "this user may write to"
            ) from error
        try:
            self._fallocate(handle, self.num_bytes)
        except ValueError:
            disk.close(handle)
            raise
        return handle

    def _map(self, capacity: int) -> tuple[int, mmap.mmap]:
        """Map the file, and addresses for it to grow to ``capacity``: as many as the system gives."""
        for size in (capacity, min(capacity, 4 * self.num_bytes)):
            with suppress(OSError):  # a limit on addresses or on the length of files
                if size > self.num_bytes:
                    self._disk.truncate(self._file.handle, size)
                return size, mmap.mmap(self._file.handle, size)
        return self.num_bytes, mmap.mmap(self._file.handle, self.num_bytes)

    def _fallocate(self, handle: int, num_bytes: int, start: int = 0) -> None:
        try:
            self._disk.fallocate(handle, num_bytes, start)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise ValueError(self._too_small_message(self._disk.free_bytes(self.folder), error.strerror)) from error
            raise ValueError(
                f"the swap folder {self.folder} refuses a file of {format_bytes(num_bytes)}: {error.strerror}"
            ) from error

    def _too_small_message(self, free: int, cause: str | None = None, needed: int = 0) -> str:
        reason = f" ({cause})" if cause else ""
        return (
            f"the swap file needs {format_bytes(needed or self.num_bytes)} and the disk of {self.folder} has "
            f"{format_bytes(free)} free{reason}: make room, point nvme_path to a larger disk, or offload less (device "
            '"cpu" for the parameters or the optimiser)'
        )


def _close_resources(threads: IoThreadPool, file: DirectFile) -> None:
    threads.close()
    file.close()
