"""Memory that the ranks of one host share, the counters they meet at, and collectives through it.

The picture: one anonymous mapping (``memfd``), opened by the peers through ``/proc``,
so it has no name anywhere and vanishes with its last process, however that ends::

    | control page(s): 32 counters a rank, a cache line each | buffers ... |

A rank announces progress by storing into its own counters and waits by reading those
of its peers; no counter has two writers.  On x86-64 stores become visible in program
order, so data written before a counter is there when the counter is seen; elsewhere
the arena is not used (:func:`is_supported`).  A waiting rank spins briefly, yields, then
sleeps in growing naps, looking now and then whether its peers still live: a dead peer,
a late one or one that is somewhere else gives an error that says who, where and what.

*Collectives* go through slots of the arena.  The ring holds ``depth`` slots a rank.  Reduction number ``s`` uses
slot ``s % depth``:

1. ``allocate`` waits until every peer has consumed reduction ``s - depth`` and hands
   out this rank's slot, into which FSDP2 writes the unsharded gradients;
2. ``__call__`` posts "deposited s", waits for the peers' posts, sums the rows that this
   rank owns straight out of their slots, and posts "consumed s".

``allocate`` is called twice a reduction, the second time for the output, which must be
private as it becomes the sharded gradient.  Each post carries a tag of the module, so
ranks that reduce different modules find out at once.
"""

import hashlib
import mmap
import os
import platform
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.comm.collectives.reducer import ReduceOptions, Reducer, ReplicatedReducer, round_up, sum_rows
from thalweg.comm.comms_logger import CollectiveCall
from thalweg.comm.topology import get_host_key
from thalweg.utils.log import get_logger
from thalweg.utils.processes import is_process_alive

_log = get_logger(__name__)

_CELLS_PER_CACHE_LINE = 8  # one cache line in 8-byte cells
COUNTERS_PER_BANK = 16  # counters of one ring
_CELLS_PER_RANK = 2 * COUNTERS_PER_BANK * _CELLS_PER_CACHE_LINE  # counters a rank: room for two rings
_ALIGN = 4096
_MAP_NORESERVE = 0x4000  # what a private view has copies of is little, and not known before

# The counters, by column; TAG is the first of MAX_DEPTH columns, one for each slot of a ring.
BARRIER_COUNT, DEPOSITED, CONSUMED, PID, CLOSED, TAG = range(6)
MAX_DEPTH = 8
# Two columns, used in turn: what each rank meets its peers for.
BARRIER_TAG = TAG + MAX_DEPTH
# A common slot is in use until the call after the next.
READ_LAG = 2

_DIFFERENT_BRANCHES = (
    "the ranks took different branches. Run the same modules on every rank in each step, and let the loss depend on "
    "the same parameters of each, if only times 0"
)


class CommError(RuntimeError):
    """A collective failed: the message names the rank, the collective and the module."""


def is_supported() -> bool:
    """Whether shared arenas can work here: Linux on a processor with ordered stores."""
    has_ordered_stores = platform.machine() in ("x86_64", "AMD64")
    is_enabled = os.environ.get("THALWEG_SHARED_MEMORY", "1") != "0"
    return sys.platform == "linux" and has_ordered_stores and hasattr(os, "memfd_create") and is_enabled


class SharedMemoryArena:
    """A mapping of ``num_bytes`` shared by all ranks of ``group``.

    Use :meth:`create`, which is collective and returns None on every rank when the
    ranks do not share a host (or the mapping fails on any of them).
    """

    def __init__(
        self, memory: mmap.mmap, rank: int, world_size: int, *, timeout: float, private_view: mmap.mmap | None = None
    ) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self._memory, self._private_view = memory, private_view
        self._cells = memoryview(memory).cast("Q")
        self._next_offset = _control_bytes(world_size)
        self._num_barriers = 0
        self.post(PID, os.getpid())

    @classmethod
    def create(cls, group: dist.ProcessGroup, num_bytes: int, *, timeout: float = 1800.0) -> Self | None:
        """Map an arena with room for ``num_bytes`` of buffers; collective over ``group``.

        A rank that could have mapped it and did not says why in the log.
        """
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        total_bytes = _control_bytes(world_size) + round_up(num_bytes, _ALIGN) + _ALIGN
        token = secrets.token_bytes(24)
        fd = _create_memfd(total_bytes, token) if rank == 0 and is_supported() else -1
        header = torch.zeros(7, dtype=torch.int64)
        if rank == 0:
            words = [int.from_bytes(token[i : i + 7], "little") for i in (0, 7, 14)]
            header = torch.tensor([get_host_key(), os.getpid(), fd, *words, total_bytes], dtype=torch.int64)
        dist.broadcast(header, src=dist.get_global_rank(group, 0), group=group)
        views = _map_memfd(header.tolist(), fd) if is_supported() else None
        all_mapped = torch.tensor([0 if views is None else 1])
        dist.all_reduce(all_mapped, op=dist.ReduceOp.MIN, group=group)
        if fd >= 0:
            os.close(fd)
        if int(all_mapped) == 0:
            return None
        assert views is not None
        arena = cls(views[0], rank, world_size, timeout=timeout, private_view=views[1])
        dist.barrier(group=group)  # every pid cell is written before anybody reads one
        return arena

    def reserve(self, num_bytes: int) -> int:
        """Return the offset of a fresh aligned range; every rank reserves in the same order."""
        offset = self._next_offset
        self._next_offset = round_up(offset + num_bytes, 64)
        assert self._next_offset <= len(self._memory), f"arena of {len(self._memory)} bytes is full"
        return offset

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype, *, private: bool = False) -> Tensor:
        """A tensor over the mapping, with a storage (and version counter) of its own.

        ``private``: what is written to it no peer sees, and a page that was written to no longer follows the peers,
        until :meth:`drop_private_pages`.
        """
        numel = prod(shape)
        if numel == 0:
            return torch.empty(*shape, dtype=dtype)
        memory = self._private_view if private and self._private_view is not None else self._memory
        return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset).view(*shape)

    def drop_private_pages(self) -> None:
        """Private tensors hold again what the peers wrote."""
        if self._private_view is not None:
            self._private_view.madvise(mmap.MADV_DONTNEED)

    def post(self, column: int, value: int) -> None:
        """Publish this rank's ``value`` in ``column``."""
        self._cells[self.rank * _CELLS_PER_RANK + column * _CELLS_PER_CACHE_LINE] = value

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
        self.post(BARRIER_COUNT, self._num_barriers)
        self.wait(BARRIER_COUNT, self._num_barriers, operation)

    def checked_barrier(self, name: str) -> None:
        """A barrier that every rank must reach for the same ``name``.

        Raises:
            CommError: as :meth:`wait`, or a peer is here for something else.
        """
        if not self.agree(hash_name(name), f"the use of {name!r}"):
            raise CommError(
                f"rank {self.rank} is about to use {name!r} and another rank another module: {_DIFFERENT_BRANCHES}"
            )

    def agree(self, tag: int, operation: str) -> bool:
        """A barrier that says whether every rank came with the same ``tag`` (63 bits)."""
        column = BARRIER_TAG + self._num_barriers % 2
        self.post(column, tag)
        self.barrier(operation)
        return all(self.read(rank, column) == tag for rank in range(self.world_size))

    def release_pages(self, offset: int, num_bytes: int) -> None:
        """Give the pages wholly within a range back to the system, for all ranks; they read as zeros then."""
        start, stop = round_up(offset, _ALIGN), (offset + num_bytes) // _ALIGN * _ALIGN
        if stop > start:
            self._memory.madvise(mmap.MADV_REMOVE, start, stop - start)

    def close(self) -> None:
        """Tell the peers that this rank has left; the mapping goes with its last tensor."""
        self.post(CLOSED, 1)

    def _wait_with_backoff(self, rank: int, index: int, value: int, operation: str) -> None:
        cells, start, next_check = self._cells, time.monotonic(), 0.05
        for _ in range(50):
            os.sched_yield()
            if cells[index] >= value:
                return
        while cells[index] < value:
            # By a sixteenth too late at worst; naps of 20 us would wake some 600 times in 50 ms.
            time.sleep(min(max(2e-5, (time.monotonic() - start) / 16), 1e-3))
            waited = time.monotonic() - start
            if waited < next_check:
                continue
            next_check = waited + 0.05
            failure = self._find_failure(rank, operation, waited)
            # A peer may have come and then left while this rank slept: it stores the one before the other.
            if failure and cells[index] < value:
                raise CommError(failure)

    def _find_failure(self, rank: int, operation: str, waited_seconds: float) -> str:
        """Why a peer will not come, or an empty text."""
        pid = self.read(rank, PID)
        if self.read(rank, CLOSED):
            return f"rank {self.rank} waits in {operation}, but rank {rank} has closed its engine"
        if not is_process_alive(pid):
            return f"rank {self.rank} waits in {operation}, but rank {rank} (process {pid}) has died"
        if waited_seconds > self.timeout:
            return (
                f"rank {self.rank} waited {waited_seconds:.0f} s in {operation} for rank {rank}, which has done "
                f"{self.read(rank, BARRIER_COUNT)} barriers and {self.read(rank, DEPOSITED)} reductions; "
                f"this rank {self._num_barriers} and {self.read(self.rank, DEPOSITED)}. "
                "Some ranks took another branch, or one of them is stuck: see its traceback."
            )
        return ""


_ORDER_ROWS = 1 << 10  # as far as the host may run ahead of a peer's
_ORDER_POLL_SECONDS = 0.2


class CollectiveOrder:
    """Notices that the ranks of ``arena`` begin different collectives, without waiting for any of them.

    An accelerator's library waits for ever, or mixes tensors up, and the host is long past that when it does.  So each
    rank writes what its n-th collective is into row n of a table that its peers see, and looks at theirs: whoever comes
    to a row second sees that they differ before its own begins, and says so in the last row.  Whoever came first may by
    then wait for the device: a thread looks at that row, and has the device's library give up what will never end
    (``group.abort()``), so that the host gets to its next collective, where it is told the same.
    """

    def __init__(self, arena: SharedMemoryArena, group: dist.ProcessGroup) -> None:
        self._rank, self._count, self._operations = arena.rank, 0, dict[int, str]()
        shape = (_ORDER_ROWS + 1, arena.world_size)
        self._table = arena.tensor(arena.reserve(prod(shape) * 8), shape, torch.int64).numpy()
        dropped = threading.Event()
        weakref.finalize(self, dropped.set)
        watch = partial(_abort_after_failure, self._table[_ORDER_ROWS], group, dropped)
        threading.Thread(target=watch, name="thalweg-order", daemon=True).start()

    @staticmethod
    def num_bytes(world_size: int) -> int:
        """Bytes of arena that it needs."""
        return world_size * (_ORDER_ROWS + 1) * 8 + 64

    def begin(self, operation: str) -> None:
        """This rank's next collective is ``operation``.

        Raises:
            CommError: a peer's is another, or was at one before.
        """
        tag = hash_name(operation) & 0xFFFFFFFF
        self._operations[tag] = operation
        self._count += 1
        self._table[self._count % _ORDER_ROWS, self._rank] = self._count % (1 << 31) << 32 | tag
        self._compare(self._count)
        self.check()

    def check(self) -> None:
        """Raise the error of a peer that has found, at a collective that this rank has begun, that they differ."""
        for count in self._table[_ORDER_ROWS].tolist():
            if 0 < count <= self._count:
                self._compare(count)

    def _compare(self, count: int) -> None:
        entries = self._table[count % _ORDER_ROWS].tolist()
        entry = entries[self._rank]
        for rank, peers_entry in enumerate(entries):
            if peers_entry != entry and peers_entry >> 32 == entry >> 32:
                self._table[_ORDER_ROWS, self._rank] = count
                mine, peers = (
                    self._operations.get(one & 0xFFFFFFFF, "a collective of another module")
                    for one in (entry, peers_entry)
                )
                raise CommError(
                    f"rank {self._rank} began {mine} while rank {rank} began {peers}: {_DIFFERENT_BRANCHES}"
                )


def _abort_after_failure(failed: Any, group: dist.ProcessGroup, dropped: threading.Event) -> None:
    """Abort ``group`` once a rank has stopped at a collective; ``failed``: by rank, which one that was."""
    # All ranks look at the same time: NCCL's watchdog ends a process that finds a peer's connection closed.
    while not dropped.wait(_ORDER_POLL_SECONDS - time.monotonic() % _ORDER_POLL_SECONDS):
        if failed.any():
            _log.error("ranks began different collectives: what waits for them on the device is given up")
            group.abort()
            return


def hash_name(name: str) -> int:
    """A 63-bit tag of a collective's name, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def _control_bytes(world_size: int) -> int:
    return round_up(world_size * _CELLS_PER_RANK * 8, _ALIGN)


def _create_memfd(total_bytes: int, token: bytes) -> int:
    """A file of that size, or -1: the peers, who wait for its number, then learn that there is none."""
    fd = -1
    try:
        fd = os.memfd_create("thalweg", os.MFD_CLOEXEC)
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, total_bytes)
        os.pwrite(fd, token[:21], total_bytes - _ALIGN)
    except OSError as error:
        _warn_of_wires(error)
        if fd >= 0:
            os.close(fd)
        return -1
    return fd


def _warn_of_wires(error: OSError | ValueError) -> None:
    _log.warning(
        "The ranks of this host cannot share memory (%s): on processors their collectives go through gloo, which is "
        "slower.",
        error,
    )


def _map_memfd(header: list[int], local_fd: int) -> tuple[mmap.mmap, mmap.mmap] | None:
    """The memory, and a private view of it: copied page by page where it is written to."""
    host, pid, remote_fd, *words, total_bytes = header
    if remote_fd < 0 or host != get_host_key():
        return None
    token = b"".join(word.to_bytes(7, "little") for word in words)
    try:
        fd = os.dup(local_fd) if local_fd >= 0 else os.open(f"/proc/{pid}/fd/{remote_fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        _warn_of_wires(error)
        return None
    try:
        # Another host may have a process of the same number: the token settles it.
        if os.pread(fd, 21, total_bytes - _ALIGN) != token:
            return None
        return mmap.mmap(fd, total_bytes), mmap.mmap(fd, total_bytes, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE)
    except (OSError, ValueError) as error:
        _warn_of_wires(error)
        return None
    finally:
        os.close(fd)


class SharedMemoryRing:
    """``depth`` slots of ``slot_bytes`` for each rank of ``arena``, used in order.

    Two rings may share an arena if they use different ``counter_bank`` s (0 and 1) of its counters.
    """

    def __init__(self, arena: SharedMemoryArena, slot_bytes: int, depth: int = 2, counter_bank: int = 0) -> None:
        self.arena, self.slot_bytes, self.depth = arena, slot_bytes, depth
        self._deposited_column, self._consumed_column, self._tag_column = (
            COUNTERS_PER_BANK * counter_bank + c for c in (DEPOSITED, CONSUMED, TAG)
        )
        assert depth <= MAX_DEPTH
        self._offsets = [[arena.reserve(slot_bytes) for _ in range(depth)] for _ in range(arena.world_size)]
        self._sequence = 0

    @staticmethod
    def num_bytes(world_size: int, slot_bytes: int, depth: int = 2) -> int:
        """Bytes of arena that such a ring needs."""
        return world_size * depth * (slot_bytes + 64)

    def acquire_slot(self, shape: Sequence[int], dtype: torch.dtype, operation: str) -> Tensor:
        """This rank's next slot, free to write."""
        if prod(shape) * dtype.itemsize > self.slot_bytes:
            raise AssertionError(f"{operation} needs more than a slot of {self.slot_bytes} bytes")
        self.arena.wait(self._consumed_column, max(0, self._sequence + 1 - self.depth), operation)
        return self._slot_tensor(self.arena.rank, shape, dtype)

    def exchange_slots(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Post the slot just written and return every rank's, in rank order."""
        arena, sequence = self.arena, self._sequence + 1
        # One tag a slot: a peer that is ahead has not yet overwritten this slot's.
        tag, column = hash_name(name), self._tag_column + self._sequence % self.depth
        arena.post(column, tag)
        arena.post(self._deposited_column, sequence)
        arena.wait(self._deposited_column, sequence, f"the collective on {name!r}")
        for rank in range(arena.world_size):
            if arena.read(rank, column) != tag:
                raise CommError(
                    f"rank {arena.rank} reduces {name!r} while rank {rank} reduces another module, or other parameters "
                    f"of it: {_DIFFERENT_BRANCHES}"
                )
        return [self._slot_tensor(rank, shape, dtype) for rank in range(arena.world_size)]

    def release_slots(self) -> None:
        """Post that this rank has read every slot of the current reduction."""
        self._sequence += 1
        self.arena.post(self._consumed_column, self._sequence)

    def acquire_shared_output(self, shape: Sequence[int], dtype: torch.dtype, operation: str) -> Tensor:
        """The next slot that all ranks fill together; close it with :meth:`publish_shared_output`.

        It is read until the reader's next call but one, as FSDP2 may hold the previous
        result while it copies it out.
        """
        assert self.depth > READ_LAG, f"common slots need a ring of at least {READ_LAG + 1}"
        sequence = self._sequence + 1
        self.arena.post(self._consumed_column, max(0, sequence - READ_LAG))
        self.arena.wait(self._consumed_column, max(0, sequence - self.depth), operation)
        return self._slot_tensor(0, shape, dtype)

    def publish_shared_output(self, name: str) -> None:
        """Return when every rank has filled its part of the common slot."""
        self.exchange_slots(name, (0,), torch.uint8)
        self._sequence += 1

    def _slot_tensor(self, rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.arena.tensor(self._offsets[rank][self._sequence % self.depth], shape, dtype)


class SharedMemoryReducer(Reducer):
    """A reduction whose input is this rank's slot of a ring."""

    def __init__(self, ring: SharedMemoryRing, name: str, options: ReduceOptions | None = None) -> None:
        super().__init__(name, options)
        self._ring = ring

    def _allocate_input(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._ring.acquire_slot(size, dtype, f"the reduction of {self._name!r}")


class SharedMemoryReduceScatter(SharedMemoryReducer):
    """Reduce-scatter of one module's gradients through ``ring``."""

    transport = "shared"

    def sum_shards(self, rows: Tensor, output: Tensor, scale: float, call: CollectiveCall) -> None:
        """Add up the row that this rank owns straight out of the peers' slots."""
        ring = self._ring
        slots = ring.exchange_slots(self._name + self.lacking, rows.shape, rows.dtype)
        sum_rows([slot[ring.arena.rank] for slot in slots], output, scale)
        ring.release_slots()
        call.add_bytes((len(slots) - 1) * rows[0].nbytes)


class SharedMemoryAllReduce(SharedMemoryReducer, ReplicatedReducer):
    """All-reduce (mean) of one module's gradients through ``ring``."""

    def _allocate_input(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        self._input_dtype = dtype
        return super()._allocate_input(size, dtype, device)

    def reduce(self, output: Tensor) -> None:
        """Replace ``output`` (1-D) by the mean over all ranks."""
        ring, world_size = self._ring, self._ring.arena.world_size
        full_bytes = output.numel() * self._input_dtype.itemsize
        with self._ledger.timed("all_reduce", self._name, "shared", full_bytes, world_size) as call:
            slots = ring.exchange_slots(self._name + self.lacking, output.shape, self._input_dtype)
            sum_rows(slots, output, self.mean_scale(world_size))
            ring.release_slots()
            call.add_bytes((world_size - 1) * full_bytes)
