"""Storage behind tensors that keep their identity: device, host memory, and a disk.

    SwapFile     nvme.py     a file without a name: mapped views, and direct transfers from threads
    PagedMemory  paged.py    host memory whose pages come and go under tensors that stay
    Ring         buffers.py  a fixed number of aligned buffers that a stream passes through
    Tier         tiers.py    put / prefetch / get / release, the same for all three places
    Ticket       io.py       a transfer under way
    Disk         disk.py     the system calls, replaceable

Where ranges of a swap file have changed places, extents.py knows it.

Nothing here knows of models or optimisers.  No thread starts and no memory is taken at import.
"""

from __future__ import annotations

from thalweg.store.buffers import BufferRing
from thalweg.store.disk import Disk
from thalweg.store.io import IoThreadPool, IoFuture, combine_futures
from thalweg.store.nvme import SwapError, SwapFile
from thalweg.store.paged import EvictableMemory, memfd
from thalweg.store.tiers import DeviceTier, HostTier, NvmeTier, Tier, aligned_empty

__all__ = [
    "DeviceTier",
    "Disk",
    "HostTier",
    "IoThreadPool",
    "NvmeTier",
    "EvictableMemory",
    "BufferRing",
    "SwapError",
    "SwapFile",
    "IoFuture",
    "Tier",
    "aligned_empty",
    "memfd",
    "combine_futures",
]
