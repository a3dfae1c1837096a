"""Units whose parameters are in memory only while they are in use.

The picture, for one unit (a transformer block) on one rank::

    swap file   | packed unit 0  | packed unit 1  | ...          compute dtype, this rank's rows
                         |  O_DIRECT, threads
    memory      | unsharded unit 0 | unsharded unit 1 | ...      addresses for good, pages for a while

The *unsharded parameter* (see :mod:`.base`) is the same tensor at the same address always, so that
what autograd has saved of it in the forward pass is valid again in the backward pass, once its bytes are
back.  Between uses its pages are given to the system.  Outside of its use a unit's modules hold the shard, a
view of the swap file's mapping.

Phases of a unit: *out*, *coming* (a read is under way), *in* (its bytes are there), and *in use* (the modules
hold the unsharded parameters).  After use it stays in until the memory is needed: besides those in use at most
``max_units - 1`` units are anything but out, and the least recently used goes first.  Its pages go to the unit
that takes its place (*evicted* units are out and wait for that), since pages fresh from the kernel would have
to be cleared; no more than ``max_units`` units have pages.

Read-ahead.  What followed a unit the last time is what is read while it computes: a table of pairs of units
that is learnt as training goes, so that a forward pass, a backward pass and an evaluation each have their
own order.  A wrong guess costs a read.  Nothing is read beyond the end of a pass, as an update may follow.

Invariants: a unit in use is in; an updated unit that is not in use is out (:meth:`Pager.invalidate`); and every
rank opens the same units in the same order where unsharded parameters are shared, or all ranks get an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thalweg.storage_io import EvictableMemory, IoFuture, SwapFile
from thalweg.storage_io.allocator import round_up
from thalweg.storage_io.evictable_memory import HUGE_PAGE

PagingPhase = Literal["out", "coming", "in"]


@dataclass(frozen=True)
class PackedParam:
    """One parameter's place in its packed unit.

    ``packed_shard``: its bytes there, compute dtype; ``dest_rows``: this rank's rows of the unsharded parameter,
    where that is not the packed shard itself; ``master_shard``: the master, where that is other bytes of the
    file; ``file_offset``: of the packed shard; ``version()`` counts writes to the master.
    """

    packed_shard: Tensor
    dest_rows: Tensor | None
    master_shard: Tensor | None
    file_offset: int
    version: Callable[[], int]


class PagedUnit:
    """One packed unit: its place in the file, its place in memory, and its phase."""

    def __init__(
        self,
        name: str,
        swap: SwapFile,
        memory: EvictableMemory,
        *,
        file_offset: int,
        memory_offset: int,
        nbytes: int,
        params: Sequence[PackedParam],
        release_dest_pages: Callable[[], None] | None = None,
    ) -> None:
        self.name, self.swap, self.params = name, swap, params
        self.phase: PagingPhase = "out"
        self.in_use = False
        self.released_at = -1  # barriers passed when it was released
        self.last_use = 0
        self._memory, self._memory_offset, self._file_offset = memory, memory_offset, file_offset
        self._bytes = memory.tensor(memory_offset, (nbytes,), torch.uint8)
        self.reserved_bytes = round_up(nbytes, HUGE_PAGE)  # of addresses; what is dropped and moved
        self._pending_read = IoFuture()
        self._release_dest_pages = release_dest_pages
        self._versions = [param.version() for param in params]

    def start_read(self, page_source: PagedUnit | None = None) -> None:
        """Start reading, into the pages of ``page_source`` if there is one: an evicted unit of the same size."""
        if self.phase == "out":
            self.rewrite_stale()
            if page_source is not None and page_source is not self:
                assert page_source.phase == "out" and page_source.reserved_bytes == self.reserved_bytes, (
                    page_source.name,
                    self.name,
                )
                if not self._memory.move_pages(page_source._memory_offset, self._memory_offset, self.reserved_bytes):
                    page_source.release_pages()
            self._pending_read = self.swap.read(self._file_offset, self._bytes)
            self.phase = "coming"

    def wait_read(self) -> None:
        """Return when the unsharded parameters hold the bytes."""
        self.start_read()
        if self.phase == "coming":
            try:
                self._pending_read.wait()
            except BaseException:  # the next use reads again
                self.phase = "out"
                self.release_pages()
                raise
            copies = [(param.dest_rows, param.packed_shard) for param in self.params if param.dest_rows is not None]
            with torch.no_grad():
                for dest_rows, packed_shard in copies:
                    dest_rows.copy_(packed_shard)
            if copies:
                self.release_pages()
            self.phase = "in"

    def evict(self) -> bool:
        """Its bytes are not needed any more; whether it leaves pages behind."""
        if self.phase == "coming":
            self._pending_read.wait_ignoring_errors()
        leaves_pages = self.phase != "out" and self._release_dest_pages is None
        if self.phase != "out":
            if self._release_dest_pages is not None:
                self.release_pages()
                self._release_dest_pages()
            self.phase = "out"
        return leaves_pages

    def release_pages(self) -> None:
        """Give the packed unit's pages back."""
        self._memory.evict(self._memory_offset, self.reserved_bytes)

    def rewrite_stale(self) -> None:
        """Cast masters that somebody has written to into the packed shards in the file."""
        for i, param in enumerate(self.params):
            if param.master_shard is None or param.version() == self._versions[i]:
                continue
            with torch.no_grad():
                param.packed_shard.copy_(param.master_shard)
            self.swap.write(param.file_offset, param.packed_shard).wait()
            self._versions[i] = param.version()
            if (master_offset := self.swap.locate(param.master_shard)) is not None:
                self.swap.trim(master_offset, param.master_shard.nbytes)


class Pager:
    """Decides when each unit's bytes are in memory.

    ``barrier(name)``: called when a unit is about to be used, on every rank; returns once all ranks have their
    rows in its unsharded parameters (shared memory); None where that memory is this rank's own.
    """

    def __init__(
        self, units: Iterable[PagedUnit], max_units: int, barrier: Callable[[str], None] | None = None
    ) -> None:
        self.units = {unit.name: unit for unit in units}
        self.max_units = max(2, max_units)
        self._evicted: list[PagedUnit] = []
        self._barrier = barrier
        self._clock = self._num_barriers = 0
        self._next_unit: dict[tuple[str, str], str] = {}
        self._recent = ("", "")

    def prefetch(self, name: str) -> None:
        """Start reading a unit that is likely to be next, if there is room; a hint."""
        unit = self.units[name]
        if unit.phase == "out" and self._evict_idle(self.max_units - 2):
            self._start_read(unit)
            self._touch(unit)

    def acquire(self, name: str) -> None:
        """Return when the unit's unsharded parameters hold their values."""
        unit = self.units[name]
        unit.in_use = True
        self._evict_idle(self.max_units - 1)
        try:
            self._start_read(unit)
            unit.wait_read()
        except BaseException:
            unit.in_use = False
            raise
        self._touch(unit)
        if self._barrier is not None:
            self._barrier(name)
        self._num_barriers += 1
        self._next_unit[self._recent] = name
        self._recent = (self._recent[1], name)
        self._prefetch_next()

    def release(self, name: str) -> None:
        """The unit's modules hold the shards again."""
        unit = self.units[name]
        unit.in_use, unit.released_at = False, self._num_barriers
        self._touch(unit)

    def invalidate(self, names: Iterable[str] | None = None) -> None:
        """The parameters of these units (default: all) have changed in the file, compute copies too."""
        for name in self.units if names is None else names:
            if (unit := self.units.get(name)) is not None and not unit.in_use:
                self._evict(unit)

    def end_pass(self) -> None:
        """What comes next begins anew: nothing is read ahead across this point."""
        self._next_unit[self._recent] = ""
        self._recent = ("", "")

    def close_all(self) -> None:
        """Drop everything."""
        for unit in self.units.values():
            unit.in_use = False
            unit.evict()
            unit.release_pages()
        self._evicted.clear()

    def _start_read(self, unit: PagedUnit) -> None:
        if unit.phase != "out":
            return
        if unit in self._evicted:
            page_source = unit
        else:
            page_source = next((one for one in self._evicted if one.reserved_bytes == unit.reserved_bytes), None)
        if page_source is not None:
            self._evicted.remove(page_source)
        unit.start_read(page_source)
        num_present = sum(one.phase != "out" for one in self.units.values())
        while self._evicted and num_present + len(self._evicted) > self.max_units:
            self._evicted.pop(0).release_pages()

    def _evict(self, unit: PagedUnit) -> None:
        if unit.evict():
            self._evicted.append(unit)

    def _touch(self, unit: PagedUnit) -> None:
        self._clock += 1
        unit.last_use = self._clock

    def _evict_idle(self, max_idle: int) -> bool:
        """Drop units that are not in use until ``max_idle`` of them are left; False if that cannot be.

        Shared memory may go after one more barrier: all ranks are then done with it.
        """
        idle = [unit for unit in self.units.values() if unit.phase != "out" and not unit.in_use]
        excess = len(idle) - max(max_idle, 0)
        evictable = [unit for unit in idle if self._barrier is None or unit.released_at < self._num_barriers]
        for unit in sorted(evictable, key=lambda unit: unit.last_use)[: max(0, excess)]:
            self._evict(unit)
        return max_idle >= 0 and len(evictable) >= excess

    def _prefetch_next(self) -> None:
        """Follow the learnt order while there is room."""
        recent = self._recent
        for _ in range(max(1, (self.max_units - 1) // 2)):
            name = self._next_unit.get(recent, "")
            if not name:
                return
            self.prefetch(name)
            recent = (recent[1], name)
