"""A ring of fixed buffers, page-aligned for direct I/O and pinned where a GPU copies from them.

A ring bounds the memory of a stream whatever the size of what passes through: who needs the next buffer
first waits for the transfer that last used it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from thalweg.store.paged import PagedMemory
from thalweg.store.regions import round_up


class Ring:
    """``count`` buffers of ``nbytes`` (rounded up to pages); ``ring[i]`` is the one that turn ``i`` uses.

    ``pin``: page-locked, so that copies to and from a CUDA device are asynchronous.
    """

    def __init__(self, count: int, nbytes: int, *, pin: bool = False) -> None:
        assert count > 0 and nbytes > 0, (count, nbytes)
        self.count, self.nbytes = count, round_up(nbytes)
        self._memory = PagedMemory(count * self.nbytes)
        whole = self._memory.tensor(0, (count, self.nbytes), torch.uint8)
        self.pinned = pin and torch.cuda.is_available() and _lock_pages(whole)
        self._buffers = list(whole.unbind())

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, turn: int) -> Tensor:
        return self._buffers[turn % self.count]

    def drop(self) -> None:
        """Give the memory back until the ring is used again."""
        if not self.pinned:
            self._memory.drop(0, self.count * self.nbytes)

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
