"""A block of memory that is handed out as a tensor, and again once nobody holds it.

Gradients live from a backward pass to the next ``zero_grad`` and have the same size in
each step.  Taken from the allocator they are fresh pages every time, which the kernel
clears on first touch, and they fragment the heap; kept here they are neither.  Whether
a tensor made from the block is still held, by whomever, is told by the block's own
reference count, as every storage over it owns a reference.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

# getrefcount sees the attribute and its own argument.
_FREE_REFCOUNT = 2


class ReusableBuffer:
    """Hands a block out as a tensor; see the module's text."""

    def __init__(self) -> None:
        self._block: mmap.mmap | None = None

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised CPU tensor: the block again if it is free and large enough, else a new one."""
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(*shape, dtype=dtype)
        if self._block is None or len(self._block) < num_bytes or sys.getrefcount(self._block) > _FREE_REFCOUNT:
            self._block = _map_anonymous(num_bytes)
        return torch.frombuffer(self._block, dtype=dtype, count=prod(shape)).view(*shape)


class BufferPool:
    """A pool for many users: a free block that is large enough goes to whoever asks next.

    Where gradients leave soon after they came, it holds as many blocks as are in use at once.
    """

    def __init__(self) -> None:
        self._blocks: list[mmap.mmap] = []

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised CPU tensor over the smallest free block that holds it, or over a new one."""
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(*shape, dtype=dtype)
        block = self._find(num_bytes)
        return torch.frombuffer(block, dtype=dtype, count=prod(shape)).view(*shape)

    def _find(self, num_bytes: int) -> mmap.mmap:
        free = [i for i in range(len(self._blocks)) if sys.getrefcount(self._blocks[i]) <= _FREE_REFCOUNT]
        fitting = [i for i in free if len(self._blocks[i]) >= num_bytes]
        if fitting:
            return self._blocks[min(fitting, key=lambda i: len(self._blocks[i]))]
        for i in reversed(free):  # too small for this one: exchanged, not kept beside it
            del self._blocks[i]
        self._blocks.append(_map_anonymous(num_bytes))
        return self._blocks[-1]


def _map_anonymous(num_bytes: int) -> mmap.mmap:
    block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
    return block
