"""Parameters on NVMe: where they rest between uses, and when their units are in memory.

*The file.*  One file for the parameters of a rank, unit by unit::

    | packed unit 0: parameter 0 | parameter 1 | ... | masters of unit 0 | packed unit 1 | ...

The *packed unit* is what the forward pass needs, this rank's rows in the compute dtype, and is read in one go into
a memory of the same layout.  Where master and compute dtype agree the master *is* the parameter's place in
the packed unit, else it lies behind it.  Each parameter begins at a page, so that all transfers are direct.

Units that ``resident_numel`` elements hold stay in memory for good: the root first, which is in use throughout,
then units from the model's end, whose backward pass follows upon their forward pass.

Or masters alone are in the file, while the parameters that training computes with stay in memory.  With 16-bit
parameters and the optimiser's state on NVMe::

    swap file   | fp32 master, this rank's rows | moments (optim/offload/nvme_step.py) |
    memory      | unsharded, 16 bits: what forward and backward read                   |

so that a parameter takes 2 bytes of memory instead of 6.  The streamed update reads master and moments, and
writes this rank's rows of the unsharded tensor in the same pass; nothing is cast again as a window opens.

Invariant: these rows are the cast of the master, but for masters that somebody has written to through
their views (a checkpoint, ``GatheredParameters``): these are cast at the next refresh.

*Memory.*  The picture, for one unit (a transformer block) on one rank::

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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.comm.collectives.shared_memory import SharedMemoryArena
from thalweg.comm.error_agreement import all_ranks_or_raise
from thalweg.config import Config
from thalweg.config.schema.zero import OffloadParam, ZeroOptimization
from thalweg.device import can_pin
from thalweg.storage_io.allocator import round_up
from thalweg.storage_io.evictable_memory import HUGE_PAGE, BufferRing, EvictableMemory
from thalweg.storage_io.io_threads import IoFuture
from thalweg.storage_io.swap_file import MAX_SWAP_BYTES, SwapFile
from thalweg.zero.fsdp2.private_api import FSDPGroupHandle
from thalweg.zero.storage.base import ParameterStorage, ParamSpec, PassKind, ShardStorage, StorageKind, view_unsharded

PagingPhase = Literal["out", "coming", "in"]
WRITE_CHUNK_BYTES = 16 << 20


def shards_on_host(zero: ZeroOptimization, on_cpu: bool) -> bool:
    """Whether shards lie in host memory and are copied to a GPU as they are gathered."""
    return not on_cpu and (zero.offload_param.device != "none" or zero.offload_optimizer.device != "none")


def pins_grads(zero: ZeroOptimization) -> bool:
    """Whether gradients come to the host in page-locked memory, and shards lie in it.

    Shards in a swap file cannot: what is read of them goes on through such memory."""
    section = zero.offload_optimizer if zero.offload_param.device == "none" else zero.offload_param
    return section.pin_memory and can_pin()


def get_offload_messages(zero: ZeroOptimization, device: torch.device) -> dict[str, str]:
    """What the tiers come to on ``device``, where a user may think of something else."""
    messages = {}
    if device.type == "cpu" and zero.offload_param.device == "cpu":
        messages["offload_param.device"] = (
            "no effect: the parameters of a rank that computes on the CPU are in host memory already; "
            "nvme takes them out of it"
        )
    if device.type == "cpu" and zero.offload_optimizer.device == "cpu":
        messages["offload_optimizer.device"] = (
            "state is in host memory already; updates run within the backward pass where they may, so "
            "that the gradients of all units never exist at once"
        )
    if zero.offload_optimizer.device == "cpu" and zero.offload_optimizer.ratio < 1:
        messages["offload_optimizer.ratio"] = (
            "no effect: all of the state is on the host; on nvme the rest of it stays in memory"
        )
    return messages


def prefers_low_memory(config: Config) -> bool:
    """Whether the user would rather wait than use memory: something lies on a disk."""
    zero = config.zero_optimization
    return "nvme" in (zero.offload_param.device, zero.offload_optimizer.device)


class PagedShardStorage(ShardStorage):
    """A storage whose shard is a view of the swap file.

    ``packed_shard``: this rank's rows as they are read, in the compute dtype; ``dest_rows``: this rank's rows of the
    unsharded parameter, where those are not the packed shard itself; ``compute_offset``: where the rows lie in the
    file beside the master (at ``master_offset``), if they do.
    """

    def __init__(
        self,
        spec: ParamSpec,
        rank: int,
        swap: SwapFile,
        ring: BufferRing,
        master_offset: int,
        unsharded: Tensor | None,
        packed_shard: Tensor,
        dest_rows: Tensor | None = None,
        compute_offset: int | None = None,
    ) -> None:
        super().__init__(spec, rank, swap.view(master_offset, spec.padded_shape, spec.master_dtype), unsharded)
        self.packed_shard, self.dest_rows, self.compute_offset = packed_shard, dest_rows, compute_offset
        self._swap, self._ring, self._places = swap, ring, {master_offset: spec.master_dtype}
        if compute_offset is not None:
            self.compute_copy = swap.view(compute_offset, spec.padded_shape, spec.compute_dtype)
            self._places[compute_offset] = spec.compute_dtype

    def load_full(self, full: Tensor) -> None:
        """Set this rank's rows from the full value, past the page cache."""
        for offset, dtype in self._places.items():
            self._swap.write_through(offset, self.local_rows(full), dtype, self._ring)
        self._ring.release_memory()


class PagedUnit:
    """One packed unit: its place in the file, its place in memory, and its phase."""

    def __init__(
        self,
        name: str,
        swap: SwapFile,
        memory: EvictableMemory,
        file_offset: int,
        memory_offset: int,
        nbytes: int,
        params: Sequence[PagedShardStorage],
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
        # Gives back the pages of the unsharded parameters, where those are not the packed unit itself.
        self.release_dest_pages: Callable[[], None] | None = None
        self._versions = [param.version() for param in params]

    def start_read(self, page_source: PagedUnit | None) -> None:
        """Start reading, into the pages of ``page_source`` if there is one: an evicted unit of the same size."""
        self.rewrite_stale()
        if page_source is not None and page_source is not self:
            assert page_source.phase == "out" and page_source.reserved_bytes == self.reserved_bytes
            if not self._memory.move_pages(page_source._memory_offset, self._memory_offset, self.reserved_bytes):
                page_source.release_pages()
        self._pending_read = self.swap.read(self._file_offset, self._bytes)
        self.phase = "coming"

    def wait_read(self) -> None:
        """Return when the unsharded parameters hold the bytes, which are coming or there."""
        if self.phase == "in":
            return
        try:
            self._pending_read.wait()
        except BaseException:  # the next use reads again
            self.phase = "out"
            self.release_pages()
            raise
        with torch.no_grad():
            for param in self.params:
                if param.dest_rows is not None:
                    param.dest_rows.copy_(param.packed_shard)
        if any(param.dest_rows is not None for param in self.params):
            self.release_pages()
        self.phase = "in"

    def evict(self) -> bool:
        """Its bytes are not needed any more; whether it leaves pages behind."""
        if self.phase == "coming":
            self._pending_read.wait_ignoring_errors()
        was_out, self.phase = self.phase == "out", "out"
        if was_out or self.release_dest_pages is None:
            return not was_out
        self.release_pages()
        self.release_dest_pages()
        return False

    def release_pages(self) -> None:
        """Give the packed unit's pages back."""
        self._memory.evict(self._memory_offset, self.reserved_bytes)

    def rewrite_stale(self) -> None:
        """Cast masters that somebody has written to into the packed shards in the file."""
        for i, param in enumerate(self.params):
            if param.compute_offset is None or param.version() == self._versions[i]:
                continue
            with torch.no_grad():
                param.packed_shard.copy_(param.shard)
            self.swap.write(param.compute_offset, param.packed_shard).wait()
            self._versions[i] = param.version()
            if (master_offset := self.swap.locate(param.shard)) is not None:
                self.swap.trim(master_offset, param.shard.nbytes)


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
        # Follow the learnt order while there is room.
        recent = self._recent
        for _ in range(max(1, (self.max_units - 1) // 2)):
            if not (following := self._next_unit.get(recent, "")):
                break
            self.prefetch(following)
            recent = (recent[1], following)

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
        page_sources = [one for one in self._evicted if one.reserved_bytes == unit.reserved_bytes]
        page_source = unit if unit in page_sources else next(iter(page_sources), None)
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


@dataclass(frozen=True)
class ParamPaging:
    """What a model's paging consists of: the swap file, the pager, and the storages by parameter."""

    swap: SwapFile
    pager: Pager
    storages: Mapping[str, PagedShardStorage]


class NvmeStorage(ParameterStorage):
    """Units that are in memory only while they are in use; a unit's FSDP2 group asks for it.

    ``groups``: those that ``paging`` pages, with the ``storages`` of each.
    """

    def __init__(
        self, groups: Sequence[FSDPGroupHandle], storages: Mapping[str, Sequence[ShardStorage]], paging: ParamPaging
    ) -> None:
        self.groups, self.paging = groups, paging
        pager = paging.pager
        for group in groups:
            name, paged = group.name, [paging.storages[storage.spec.name] for storage in storages[group.name]]
            acquire, release = partial(pager.acquire, name), partial(pager.release, name)
            if all(storage.unsharded is None for storage in paged):
                group.all_gather_from([storage.packed_shard for storage in paged], acquire, release)
            else:
                group.use_pager(partial(pager.prefetch, name), acquire, release)

    def unshard(self, group: FSDPGroupHandle) -> None:
        """Bring a unit in that is used by itself."""
        group.gather()

    def before_forward(self) -> None:
        """Nothing was read ahead across this point."""
        self.paging.pager.end_pass()

    def reshard(self, end_of: PassKind) -> None:
        """Put shards in place; what comes next begins anew."""
        for group in self.groups:
            group.to_sharded()
        self.paging.pager.end_pass()

    def after_update(self, units: Iterable[str] | None = None) -> None:
        """What is in memory of these units is outdated."""
        if units is None:
            self.paging.pager.end_pass()
        self.paging.pager.invalidate(units)

    def close(self) -> None:
        """Give memory and disk back."""
        self.paging.pager.close_all()
        self.paging.swap.close()


# What ``max_in_cpu`` is where nobody knows the memory there is: DeepSpeed's default.
MOST_IN_MEMORY = 1_000_000_000


def select_paged_units(
    units: dict[str, list[ParamSpec]], section: OffloadParam, resident_units: Iterable[str] = ()
) -> list[str]:
    """Names of the units to page, in order; ``resident_units`` and what ``max_in_cpu`` has room for are not."""
    budget = MOST_IN_MEMORY if section.max_in_cpu is None else section.max_in_cpu
    names = [name for name in units if name not in set(resident_units)]
    eviction_order = [name for name in names if name == ""] + [name for name in reversed(names) if name != ""]
    for name in eviction_order:
        size = sum(spec.shard_numel for spec in units[name])
        if size > budget:
            break
        budget -= size
        names.remove(name)
    return names


def build_param_paging(
    param_specs: dict[str, ParamSpec],
    units: Iterable[str],
    zero: ZeroOptimization,
    resident_modules: Sequence[str],
    rank: int,
    storage_kind: StorageKind,
    arena: SharedMemoryArena | None,
    several_hosts: bool,
    group: dist.ProcessGroup | None,
) -> ParamPaging | None:
    """What of ``param_specs`` rests on a disk: whole units but for ``resident_modules``, or masters; collective over
    ``group``.  ``several_hosts``: their copies of the parameters are kept the same, which masters on disk do not
    go with.

    Raises:
        ValueError: on all ranks, if one of them cannot make its swap file.
    """

    def page_units() -> ParamPaging | None:
        """The paging of the units (or the root) that do not stay in memory, or None."""
        section, names = zero.offload_param, [*resident_modules, *units]
        specs_by_unit = dict[str, list[ParamSpec]]()
        for name, spec in param_specs.items():
            unit = next((key for key in names if name.startswith(f"{key}.")), "")
            specs_by_unit.setdefault(unit, []).append(spec)
        paged = select_paged_units(specs_by_unit, section, resident_modules)
        if not paged:
            return None
        packed_bytes = {name: sum(map(_packed_bytes, specs_by_unit[name])) for name in paged}
        file_bytes = {
            name: packed_bytes[name] + sum(_master_bytes(spec) for spec in specs_by_unit[name] if spec.has_copy)
            for name in paged
        }
        swap, ring = _make_swap_file(section.nvme_path, sum(file_bytes.values()))
        # Units begin on huge pages, so that these stay whole as they go from one unit to another.
        memory = EvictableMemory(sum(round_up(size, HUGE_PAGE) for size in packed_bytes.values()), align=HUGE_PAGE)
        storages: dict[str, PagedShardStorage] = {}
        paged_units = []
        for name in paged:
            base, start = swap.allocate(file_bytes[name]), memory.allocate(packed_bytes[name])
            rows, offset, next_master = [], 0, base + packed_bytes[name]
            for spec in specs_by_unit[name]:
                packed_shard = memory.tensor(start + offset, spec.padded_shape, spec.compute_dtype)
                unsharded, dest_rows = None, None
                if storage_kind == "private":
                    # A tensor of its own over the packed bytes: refreshing those is no change to a parameter.
                    unsharded = memory.tensor(start + offset, spec.shape, spec.compute_dtype)
                elif storage_kind == "shared":
                    assert arena is not None
                    arena_offset = arena.reserve(spec.unsharded_bytes)
                    unsharded, dest_rows = view_unsharded(spec, rank, arena, arena_offset)
                    rows.append((arena_offset + rank * dest_rows.nbytes, dest_rows.nbytes))
                master_offset, compute_offset = base + offset, None
                if spec.master_dtype != spec.compute_dtype:
                    master_offset, compute_offset = next_master, base + offset
                    next_master += _master_bytes(spec)
                storages[spec.name] = PagedShardStorage(
                    spec, rank, swap, ring, master_offset, unsharded, packed_shard, dest_rows, compute_offset
                )
                offset += _packed_bytes(spec)
            params = [storages[spec.name] for spec in specs_by_unit[name]]
            unit = PagedUnit(name, swap, memory, base, start, packed_bytes[name], params)
            if arena is not None and rows:
                unit.release_dest_pages = partial(_release_pages, arena, rows)
            paged_units.append(unit)
        barrier = arena.checked_barrier if arena is not None and storage_kind == "shared" else None
        return ParamPaging(swap, Pager(paged_units, section.buffer_count, barrier), storages)

    def keep_masters() -> ParamPaging | None:
        """The swap file with the masters of ``param_specs``, whose units stay in memory; None where there are none, or
        no compute copy."""
        master_specs = [
            spec
            for spec in param_specs.values()
            if spec.requires_grad and spec.master_dtype != spec.compute_dtype and spec.shard_numel > 0
        ]
        if not master_specs or storage_kind == "wire":
            return None
        swap, ring = _make_swap_file(zero.offload_optimizer.nvme_path, sum(map(_master_bytes, master_specs)))
        storages: dict[str, PagedShardStorage] = {}
        for spec in master_specs:
            if storage_kind == "shared":
                assert arena is not None
                unsharded, rows = view_unsharded(spec, rank, arena, arena.reserve(spec.unsharded_bytes))
            else:
                unsharded = rows = torch.zeros(spec.shape, dtype=spec.compute_dtype)
            storages[spec.name] = NvmeMasterStorage(spec, rank, swap, ring, unsharded, rows)
        return ParamPaging(swap, Pager((), 2), storages)

    if zero.offload_param.device == "nvme":
        return all_ranks_or_raise(page_units, "a swap file for its parameters", group)
    if zero.offload_optimizer.device == "nvme" and not several_hosts:
        return all_ranks_or_raise(keep_masters, "a swap file for its parameters", group)
    return None


def _make_swap_file(folder: str | None, num_bytes: int) -> tuple[SwapFile, BufferRing]:
    """The file, and the ring that values are written through, so that nothing is mapped or cached meanwhile.

    Raises:
        ValueError: the folder cannot be used, or its disk is too small.
    """
    swap = SwapFile(folder or "", num_bytes, capacity=num_bytes + MAX_SWAP_BYTES)
    return swap, BufferRing(2, WRITE_CHUNK_BYTES)


def _release_pages(arena: SharedMemoryArena, ranges: Sequence[tuple[int, int]]) -> None:
    for offset, size in ranges:
        arena.release_pages(offset, size)


class NvmeMasterStorage(PagedShardStorage):
    """A storage whose shard is a view of the swap file and whose unsharded tensor is in memory; ``rows``: this
    rank's rows of it, padded."""

    def __init__(
        self, spec: ParamSpec, rank: int, swap: SwapFile, ring: BufferRing, unsharded: Tensor, rows: Tensor
    ) -> None:
        super().__init__(spec, rank, swap, ring, swap.allocate(_master_bytes(spec)), unsharded, rows)
        self.compute_copy, self._cast_version = rows, 0

    def load_full(self, full: Tensor) -> None:
        """Set this rank's rows of both from the full value."""
        super().load_full(full)
        with torch.no_grad():
            self.packed_shard[: self.num_rows].copy_(self.local_rows(full).to(self.spec.master_dtype))

    @property
    def refresh_copy(self) -> tuple[Tensor, Tensor] | None:
        """What refreshing must copy: nothing, unless somebody has written to the master."""
        if (version := self.version()) == self._cast_version:
            return None
        self._cast_version = version
        return self.packed_shard, self.shard


def _packed_bytes(spec: ParamSpec) -> int:
    return round_up(spec.shard_numel * spec.compute_dtype.itemsize)


def _master_bytes(spec: ParamSpec) -> int:
    return round_up(spec.shard_numel * spec.master_dtype.itemsize)
