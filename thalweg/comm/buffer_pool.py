"""A block of memory that is handed out as a tensor, and again once nobody holds it.

Gradients live from a backward pass to the next ``zero_grad`` and have the same size in
each step.  Taken from the allocator they are fresh pages every time, which the kernel
clears on first touch, and they fragment the heap; kept here they are neither.  Each
tensor is made over a memoryview of its own, which its storage keeps alive: when the last
storage over the block is gone, so is the memoryview, and a weak reference to it says so.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor


class _Block:
    """Anonymous memory, in use by one tensor (and its views) at a time."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._user: weakref.ref[memoryview] | None = None

    @property
    def is_free(self) -> bool:
        return self._user is None or self._user() is None

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        buffer = memoryview(self._memory)
        self._user = weakref.ref(buffer)
        return torch.frombuffer(buffer, dtype=dtype, count=prod(shape)).view(*shape)


class ReusableBuffer:
    """Hands one block out; while that is in use, another takes its place and it is forgotten."""

    def __init__(self) -> None:
        self._block: _Block | None = None

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised CPU tensor: the block again if it is free and large enough, else a new one."""
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(*shape, dtype=dtype)
        if self._block is None or self._block.num_bytes < num_bytes or not self._block.is_free:
            self._block = _Block(num_bytes)
        return self._block.tensor(shape, dtype)


class BufferPool:
    """Blocks for many users: a free one that is large enough goes to whoever asks next.

    It holds as many blocks as are in use at once: where gradients leave soon after they came, few.
    """

    def __init__(self) -> None:
        self._blocks: list[_Block] = []

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised CPU tensor over the smallest free block that holds it, or over a new one."""
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(*shape, dtype=dtype)
        return self._find(num_bytes).tensor(shape, dtype)

    def _find(self, num_bytes: int) -> _Block:
        fitting = [block for block in self._blocks if block.is_free and block.num_bytes >= num_bytes]
        if fitting:
            return min(fitting, key=lambda block: block.num_bytes)
        # A free one is too small: it is exchanged, not kept beside the new one.
        self._blocks = [block for block in self._blocks if not block.is_free]
        self._blocks.append(_Block(num_bytes))
        return self._blocks[-1]
