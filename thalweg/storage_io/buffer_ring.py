"""A ring of fixed buffers, page-aligned for direct I/O and pinned where a GPU copies from them.

A ring bounds the memory of a stream whatever the size of what passes through: who needs the next buffer
first waits for the transfer that last used it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from thalweg.storage_io.allocator import PAGE, round_up
from thalweg.storage_io.evictable_memory import EvictableMemory


class BufferRing:
    """``num_buffers`` buffers of ``buffer_bytes`` (rounded up to pages); ``ring[i]`` is the one that turn ``i`` uses.

    ``pin``: page-locked, so that copies to and from a CUDA device are asynchronous.
    """

    def __init__(self, num_buffers: int, buffer_bytes: int, *, pin: bool = False) -> None:
        assert num_buffers > 0 and buffer_bytes > 0, (num_buffers, buffer_bytes)
        self.num_buffers, self.buffer_bytes = num_buffers, round_up(buffer_bytes)
        self._memory = EvictableMemory(num_buffers * self.buffer_bytes)
        rows = self._memory.tensor(0, (num_buffers, self.buffer_bytes), torch.uint8)
        self.pinned = pin and torch.cuda.is_available() and _lock_pages(rows)
        self._buffers = list(rows.unbind())

    def __len__(self) -> int:
        return self.num_buffers

    def __getitem__(self, index: int) -> Tensor:
        return self._buffers[index % self.num_buffers]

    def release_memory(self) -> None:
        """Give the memory back until the ring is used again."""
        if not self.pinned:
            self._memory.evict(0, self.num_buffers * self.buffer_bytes)

    def close(self) -> None:
        """Unlock pinned pages."""
        if self.pinned:
            self.pinned = False
            runtime: Any = torch.cuda.cudart()
            with contextlib.suppress(RuntimeError):
                runtime.cudaHostUnregister(self._buffers[0].data_ptr())


def _lock_pages(memory: Tensor) -> bool:
    runtime: Any = torch.cuda.cudart()
    try:
        return int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0
    except RuntimeError:
        return False


def aligned_empty(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, *, pinned: bool = False) -> Tensor:
    """An uninitialised CPU tensor that begins on a page boundary, as direct I/O asks for."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.empty(nbytes + PAGE, dtype=torch.uint8, pin_memory=pinned)
    start = -raw.data_ptr() % PAGE
    return raw[start : start + nbytes].view(dtype).view(shape)
