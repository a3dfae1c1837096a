"""Memory that the ranks of one host share, and the counters they meet at.

The picture: one anonymous mapping (``memfd``), opened by the peers through ``/proc``,
so it has no name anywhere and vanishes with its last process, however that ends::

    | control page(s): 32 counters a rank, a cache line each | buffers ... |

A rank announces progress by storing into its own counters and waits by reading those
of its peers; no counter has two writers.  On x86-64 stores become visible in program
order, so data written before a counter is there when the counter is seen; elsewhere
the arena is not used (:func:`is_supported`).  A waiting rank spins briefly, yields, then
sleeps in growing naps, looking now and then whether its peers still live: a dead peer,
a late one or one that is somewhere else gives an error that says who, where and what.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import platform
import secrets
import sys
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

_CELLS_PER_CACHE_LINE = 8  # one cache line in 8-byte cells
COUNTERS_PER_BANK = 16  # counters of one ring
_CELLS_PER_RANK = 2 * COUNTERS_PER_BANK * _CELLS_PER_CACHE_LINE  # counters a rank: room for two rings
_ALIGN = 4096

# The counters, by column; TAG is the first of MAX_DEPTH columns, one for each slot of a ring.
BARRIER_COUNT, DEPOSITED, CONSUMED, PID, CLOSED, TAG = range(6)
MAX_DEPTH = 8
# Two columns, used in turn: what each rank meets its peers for.
BARRIER_TAG = TAG + MAX_DEPTH


class CommError(RuntimeError):
    """A collective failed: the message names the rank, the collective and the module."""


def is_supported() -> bool:
    """Whether shared arenas can work here: Linux on a processor with ordered stores."""
    has_ordered_stores = platform.machine() in ("x86_64", "AMD64")
    is_enabled = os.environ.get("THALWEG_SHARED_MEMORY", "1") != "0"
    return sys.platform == "linux" and has_ordered_stores and hasattr(os, "memfd_create") and is_enabled


def get_host_key() -> int:
    """A number (56 bits) that ranks have in common if they can share memory: one kernel, one process
    namespace.  ``THALWEG_HOST`` replaces it, to keep ranks of one machine apart."""
    host_name = os.environ.get("THALWEG_HOST")
    if host_name is None:
        boot = Path("/proc/sys/kernel/random/boot_id")
        host_name = f"{boot.read_text() if boot.exists() else platform.node()} {_process_namespace()}"
    return int.from_bytes(hashlib.blake2b(host_name.encode(), digest_size=7).digest(), "little")


def _process_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


class SharedMemoryArena:
    """A mapping of ``num_bytes`` shared by all ranks of ``group``.

    Use :meth:`create`, which is collective and returns None on every rank when the
    ranks do not share a host (or the mapping fails on any of them).
    """

    def __init__(self, memory: mmap.mmap, rank: int, world_size: int, *, timeout: float) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self._memory = memory
        self._cells = memoryview(memory).cast("Q")
        self._next_offset = _control_bytes(world_size)
        self._num_barriers = 0
        self._store(PID, os.getpid())

    @classmethod
    def create(cls, group: dist.ProcessGroup, num_bytes: int, *, timeout: float = 1800.0) -> SharedMemoryArena | None:
        """Map an arena with room for ``num_bytes`` of buffers; collective over ``group``."""
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        total_bytes = _control_bytes(world_size) + _round_up(num_bytes, _ALIGN) + _ALIGN
        token = secrets.token_bytes(24)
        fd = _create_memfd(total_bytes, token) if rank == 0 and is_supported() else -1
        header = torch.zeros(7, dtype=torch.int64)
        if rank == 0:
            words = [int.from_bytes(token[i : i + 7], "little") for i in (0, 7, 14)]
            header = torch.tensor([get_host_key(), os.getpid(), fd, *words, total_bytes], dtype=torch.int64)
        dist.broadcast(header, src=dist.get_global_rank(group, 0), group=group)
        memory = _map_memfd(header.tolist(), fd) if is_supported() else None
        all_mapped = torch.tensor([0 if memory is None else 1])
        dist.all_reduce(all_mapped, op=dist.ReduceOp.MIN, group=group)
        if fd >= 0:
            os.close(fd)
        if int(all_mapped) == 0:
            return None
        assert memory is not None
        arena = cls(memory, rank, world_size, timeout=timeout)
        dist.barrier(group=group)  # every pid cell is written before anybody reads one
        return arena

    def reserve(self, num_bytes: int) -> int:
        """Return the offset of a fresh aligned range; every rank reserves in the same order."""
        offset = self._next_offset
        self._next_offset = _round_up(offset + num_bytes, 64)
        if self._next_offset > len(self._memory):
            raise AssertionError(f"arena of {len(self._memory)} bytes is full")
        return offset

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor over the mapping, with a storage (and version counter) of its own."""
        numel = prod(shape)
        if numel == 0:
            return torch.empty(*shape, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=offset).view(*shape)

    def post(self, column: int, value: int) -> None:
        """Publish this rank's ``value`` in ``column``."""
        self._store(column, value)

    def read(self, rank: int, column: int) -> int:
        """The value that ``rank`` last published in ``column``."""
        return self._cells[rank * _CELLS_PER_RANK + column * _CELLS_PER_CACHE_LINE]

    def wait(self, column: int, value: int, operation: str) -> None:
        """Return once every peer's ``column`` has reached ``value``.

        Raises:
            CommError: a peer died, or did not come within the timeout.
        """
        cells = self._cells
        for rank in range(self.world_size):
            index = rank * _CELLS_PER_RANK + column * _CELLS_PER_CACHE_LINE
            if cells[index] >= value or rank == self.rank:
                continue
            for _ in range(400):
                if cells[index] >= value:
                    break
            else:
                self._wait_with_backoff(rank, index, value, operation)

    def barrier(self, operation: str) -> None:
        """Return when every rank has called it as often: all earlier stores are then visible."""
        self._num_barriers += 1
        self._store(BARRIER_COUNT, self._num_barriers)
        self.wait(BARRIER_COUNT, self._num_barriers, operation)

    def checked_barrier(self, name: str) -> None:
        """A barrier that every rank must reach for the same ``name``.

        Raises:
            CommError: as :meth:`wait`, or a peer is here for something else.
        """
        column, tag = BARRIER_TAG + self._num_barriers % 2, hash_name(name)
        self._store(column, tag)
        self.barrier(f"the use of {name!r}")
        if any(self.read(rank, column) != tag for rank in range(self.world_size)):
            raise CommError(
                f"rank {self.rank} is about to use {name!r} and another rank another module: the ranks took "
                "different branches. Run the same modules on every rank in each step."
            )

    def release_pages(self, offset: int, num_bytes: int) -> None:
        """Give the pages wholly within a range back to the system, for all ranks; they read as zeros then."""
        start, stop = _round_up(offset, _ALIGN), (offset + num_bytes) // _ALIGN * _ALIGN
        if stop > start:
            self._memory.madvise(mmap.MADV_REMOVE, start, stop - start)

    def close(self) -> None:
        """Tell the peers that this rank has left; the mapping goes with its last tensor."""
        self._store(CLOSED, 1)

    def _store(self, column: int, value: int) -> None:
        self._cells[self.rank * _CELLS_PER_RANK + column * _CELLS_PER_CACHE_LINE] = value

    def _wait_with_backoff(self, rank: int, index: int, value: int, operation: str) -> None:
        cells, start, nap = self._cells, time.monotonic(), 2e-5
        next_check = start + 0.05
        for _ in range(50):
            os.sched_yield()
            if cells[index] >= value:
                return
        while cells[index] < value:
            time.sleep(nap)
            now = time.monotonic()
            if now < next_check:
                continue
            next_check = now + 0.05
            nap = min(nap * 1.5, 1e-3)
            self._check_peer(rank, operation, now - start)

    def _check_peer(self, rank: int, operation: str, waited_seconds: float) -> None:
        pid = self.read(rank, PID)
        if self.read(rank, CLOSED):
            raise CommError(f"rank {self.rank} waits in {operation}, but rank {rank} has closed its engine")
        if not _is_process_alive(pid):
            raise CommError(f"rank {self.rank} waits in {operation}, but rank {rank} (process {pid}) has died")
        if waited_seconds > self.timeout:
            raise CommError(
                f"rank {self.rank} waited {waited_seconds:.0f} s in {operation} for rank {rank}, which has done "
                f"{self.read(rank, BARRIER_COUNT)} barriers and {self.read(rank, DEPOSITED)} reductions; "
                f"this rank {self._num_barriers} and {self.read(self.rank, DEPOSITED)}. "
                "Some ranks took another branch, or one of them is stuck: see its traceback."
            )


def hash_name(name: str) -> int:
    """A 63-bit tag of a collective's name, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def _control_bytes(world_size: int) -> int:
    return _round_up(world_size * _CELLS_PER_RANK * 8, _ALIGN)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _create_memfd(total_bytes: int, token: bytes) -> int:
    fd = os.memfd_create("thalweg", os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, total_bytes)
    os.pwrite(fd, token[:21], total_bytes - _ALIGN)
    return fd


def _map_memfd(header: list[int], local_fd: int) -> mmap.mmap | None:
    host, pid, remote_fd, *words, total_bytes = header
    if remote_fd < 0 or host != get_host_key():
        return None
    token = b"".join(word.to_bytes(7, "little") for word in words)
    try:
        fd = os.dup(local_fd) if local_fd >= 0 else os.open(f"/proc/{pid}/fd/{remote_fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # Another host may have a process of the same number: the token settles it.
        if os.pread(fd, 21, total_bytes - _ALIGN) != token:
            return None
        return mmap.mmap(fd, total_bytes)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)


def _is_process_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
