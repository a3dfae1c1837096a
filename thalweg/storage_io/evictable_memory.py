"""Memory whose tensors outlive their pages.

One range of addresses is reserved, and pages come with the first touch.  ``evict`` gives the pages of a range
back while the tensors over it stay what they are: same object, same address.  So a parameter that autograd
saved in the forward pass can be evicted, and be read into the same place before the backward pass needs it.

The memory is anonymous and asks for huge pages: a fault then brings 2 MiB instead of 4 KiB.

``move_pages`` hands the pages of one range to another.  A page that comes fresh from the kernel is cleared first,
which takes as long as reading it from a fast disk; a moved one is not, and costs a few entries of a table.

Invariant: what an evicted range reads as is undefined to the program (zeros, in fact), until it was written.

:class:`BufferRing` is a ring of fixed buffers over such memory, page-aligned for direct I/O and pinned where a GPU
copies from them.  A ring bounds the memory of a stream whatever the size of what passes through: who
needs the next buffer first waits for the transfer that last used it.
"""

import ctypes
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

from thalweg.device import can_pin, lock_pages, unlock_pages
from thalweg.storage_io.allocator import PAGE, RangeAllocator, round_up
from thalweg.utils.log import get_logger

log = get_logger(__name__)
HUGE_PAGE = 2 << 20
_LOCKED_IN_PLACE = 1 << 20  # bytes; torch keeps what is smaller, and page-locked, for the next
_MAYMOVE, _FIXED, _DONTUNMAP = 1, 2, 4
_POPULATE_WRITE = 23  # of madvise(2)


class EvictableMemory:
    """``num_bytes`` of addresses.

    Raises:
        OSError: the addresses cannot be reserved.
    """

    def __init__(self, num_bytes: int, *, align: int = PAGE) -> None:
        self.num_bytes = max(round_up(num_bytes, HUGE_PAGE), HUGE_PAGE)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._memory = mmap.mmap(-1, self.num_bytes, flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            _madvise(self._memory, mmap.MADV_HUGEPAGE, 0, self.num_bytes)
        self._base = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self._allocator = RangeAllocator(self.num_bytes, align)

    def allocate(self, nbytes: int) -> int:
        """Take ``nbytes`` of addresses (in whole pages); returns their offset.

        Raises:
            ValueError: there is no gap of that size.
        """
        offset = self._allocator.allocate(nbytes)
        if offset is None:
            raise ValueError(f"{nbytes} bytes do not fit: {self._allocator.largest_gap} of {self.num_bytes} are left")
        return offset

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor over the bytes from ``offset``, with a storage (and version counter) of its own."""
        if prod(shape) == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=prod(shape), offset=offset).view(tuple(shape))

    def evict(self, offset: int, nbytes: int) -> None:
        """Give the pages that lie wholly within the range back to the system."""
        start, stop = round_up(offset), (offset + nbytes) // PAGE * PAGE
        if stop > start:
            _madvise(self._memory, mmap.MADV_DONTNEED, start, stop - start)

    def release(self) -> None:
        """Let the system take all pages when it needs them; the memory then reads as zeros, until that as it was.

        Where it needs none, what is written next finds its pages at hand: clearing them anew took longer than filling
        them.
        """
        _madvise(self._memory, mmap.MADV_FREE, 0, self.num_bytes)

    def populate(self, offset: int, nbytes: int) -> None:
        """Let pages come that hold the range, as if each were written to; what they hold stays.

        Other threads of the interpreter go on meanwhile.  Where the system cannot (Linux has had it since 5.14) or has
        no pages left, a line in the log says so, and pages come with the first touch.
        """
        start = offset // PAGE * PAGE
        stop = min(round_up(offset + nbytes), self.num_bytes)
        if stop > start and sys.platform.startswith("linux"):
            if _madvise_address(self._base + start, stop - start, _POPULATE_WRITE):
                reason = os.strerror(ctypes.get_errno())
                log.info("%d bytes are not prefaulted (%s): the first use of each page waits", stop - start, reason)

    def move_pages(self, source: int, target: int, nbytes: int) -> bool:
        """Give the pages of ``source`` to ``target`` (offsets; whole pages), whose own are lost.

        ``source`` is dropped by that.  Huge pages stay whole where both begin on one.  False, and nothing has
        happened, where the system cannot.
        """
        assert source % PAGE == target % PAGE == nbytes % PAGE == 0, (source, target, nbytes)
        with suppress(OSError, AttributeError):
            mremap(self._base + source, self._base + target, nbytes)
            return True
        return False


class PagePrefaulter:
    """Lets the pages of a memory that is used from its start on come before they are needed, in a thread.

    A first touch costs what clearing 2 MiB costs, and on a virtual machine whose host has not given the
    memory yet thirty times that: too long for a step that somebody waits for.
    """

    def __init__(self, memory: EvictableMemory, chunk_bytes: int, *, margin_bytes: int = 64 << 20) -> None:
        """``chunk_bytes``: bytes that are used together; ``margin_bytes``: bytes that are there beyond those in use (at
        most an eighth of the memory).  256 MiB (at most a quarter of it) come at once."""
        self._memory, self._chunk_bytes = memory, chunk_bytes
        self._margin_bytes = min(margin_bytes, memory.num_bytes // 8)
        self._prefaulted_bytes = 0
        self._prefault(min(256 << 20, memory.num_bytes // 4))

    def prefault_to(self, chunk_index: int) -> None:
        """Note that this piece is in use."""
        used_bytes = (chunk_index + 1) * self._chunk_bytes
        if self._prefaulted_bytes < min(used_bytes + self._margin_bytes // 2, self._memory.num_bytes):
            self._prefault(used_bytes + self._margin_bytes)

    def _prefault(self, stop: int) -> None:
        start, self._prefaulted_bytes = self._prefaulted_bytes, stop
        if stop - start >= HUGE_PAGE:  # less comes quickly enough by itself
            threading.Thread(target=self._memory.populate, args=(start, stop - start), daemon=True).start()


def release_pages(tensor: Tensor) -> None:
    """:meth:`EvictableMemory.release` of the pages that lie wholly within a tensor's memory, in a heap or mapped."""
    storage = tensor.untyped_storage()
    start, stop = round_up(storage.data_ptr()), (storage.data_ptr() + storage.nbytes()) // PAGE * PAGE
    if stop > start and sys.platform.startswith("linux"):
        _madvise_address(start, stop - start, mmap.MADV_FREE)


def _madvise_address(start: int, nbytes: int, advice: int) -> int:
    call = ctypes.CDLL(None, use_errno=True).madvise
    call.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    return call(start, nbytes, advice)


def mremap(source: int, target: int, nbytes: int) -> None:
    """mremap(2): pages go from one address to another, and ``source`` stays mapped, empty.

    Raises:
        OSError: the system has no such call (Linux has had it since 5.7).
    """
    call = ctypes.CDLL(None, use_errno=True).mremap
    word = ctypes.c_size_t
    call.argtypes, call.restype = [word, word, word, ctypes.c_int, word], word
    if call(source, nbytes, nbytes, _MAYMOVE | _FIXED | _DONTUNMAP, target) != target:
        error_number = ctypes.get_errno()
        raise OSError(error_number, os.strerror(error_number))


def _madvise(memory: mmap.mmap, advice: int, start: int, nbytes: int) -> None:
    try:
        memory.madvise(advice, start, nbytes)
    except OSError as error:
        # A kernel without huge pages; dropping must work, or memory would grow unseen.
        if advice != getattr(mmap, "MADV_HUGEPAGE", None):
            raise AssertionError(f"cannot give pages back: {error}") from error


class BufferRing:
    """``num_buffers`` buffers of ``buffer_bytes`` (rounded up to pages); ``ring[i]`` is the one that turn ``i`` uses.

    ``pin``: page-locked where that can be, so that copies to and from an accelerator are asynchronous.
    """

    def __init__(self, num_buffers: int, buffer_bytes: int, *, pin: bool = False) -> None:
        assert num_buffers > 0 and buffer_bytes > 0, (num_buffers, buffer_bytes)
        self.num_buffers, self.buffer_bytes = num_buffers, round_up(buffer_bytes)
        self._memory = EvictableMemory(num_buffers * self.buffer_bytes)
        rows = self._memory.tensor(0, (num_buffers, self.buffer_bytes), torch.uint8)
        self.pinned = pin and lock_pages(rows)
        if self.pinned:  # memory that is locked still must not be given back
            weakref.finalize(self, unlock_pages, rows.data_ptr(), rows).atexit = False
        self._buffers = list(rows.unbind())

    def __len__(self) -> int:
        return self.num_buffers

    def __getitem__(self, index: int) -> Tensor:
        return self._buffers[index % self.num_buffers]

    def release_memory(self) -> None:
        """Give the memory back until the ring is used again."""
        if not self.pinned:
            self._memory.evict(0, self.num_buffers * self.buffer_bytes)


def aligned_empty(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, *, pinned: bool = False) -> Tensor:
    """An uninitialised CPU tensor that begins on a page boundary, as direct I/O asks for; ``pinned``: page-locked.

    Torch rounds what it page-locks up to a power of two, which is twice a model's bytes at worst: where the device can,
    what is large is locked where it lies."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.empty(round_up(nbytes) + PAGE, dtype=torch.uint8)
    if pinned and can_pin():
        start = -raw.data_ptr() % PAGE
        pages = raw[start : start + round_up(nbytes)]
        if nbytes >= _LOCKED_IN_PLACE and lock_pages(pages):  # until nothing is left that views them
            weakref.finalize(raw.untyped_storage(), unlock_pages, pages.data_ptr()).atexit = False
        else:
            raw = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            if raw.data_ptr() % PAGE:  # by itself it begins on a page
                raw = torch.empty(nbytes + PAGE, dtype=torch.uint8, pin_memory=True)
    start = -raw.data_ptr() % PAGE
    return raw[start : start + nbytes].view(dtype).view(shape)
