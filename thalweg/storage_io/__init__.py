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

from thalweg.storage_io.buffer_ring import BufferRing
from thalweg.storage_io.disk import Disk
from thalweg.storage_io.evictable_memory import EvictableMemory, memfd
from thalweg.storage_io.io_threads import IoFuture, IoThreadPool, combine_futures
from thalweg.storage_io.swap_file import SwapError, SwapFile
from thalweg.storage_io.tiers import DeviceTier, HostTier, NvmeTier, Tier, aligned_empty

__all__ = [
    "BufferRing",
    "DeviceTier",
    "Disk",
    "EvictableMemory",
    "HostTier",
    "IoFuture",
    "IoThreadPool",
    "NvmeTier",
    "SwapError",
    "SwapFile",
    "Tier",
    "aligned_empty",
    "combine_futures",
    "memfd",
]
