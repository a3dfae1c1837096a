"""Storage behind tensors that keep their identity: device, host memory, and a disk.

    SwapFile         swap_file.py         a file without a name: mapped views, and direct transfers from threads
    EvictableMemory  evictable_memory.py  host memory whose pages come and go under tensors that stay
    BufferRing       evictable_memory.py  a fixed number of aligned buffers that a stream passes through
    IoFuture         io_threads.py        a transfer under way
    Disk             disk.py              the system calls, replaceable

``allocator.py`` keeps track of ranges of a swap file that have changed places.

Nothing here knows of models or optimisers.  No thread starts and no memory is taken at import.
"""
