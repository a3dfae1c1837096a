"""Where shards and unsharded parameters live.

:class:`ShardStorage` is the memory of one parameter, :class:`ParameterStorage` that of many units and when it
holds what: gathered by FSDP2, resident (in a device's memory or shared by the ranks of a host), or paged from a
disk (:mod:`.nvme`).

A *shard* is the master copy of this rank's rows of a parameter, padded to the same
number of rows on every rank.  The *unsharded* tensor, where a storage has one, is of the full
shape in the compute dtype and stands for the unsharded parameter at all times:

* ``shared``: it lies in the arena, one copy for all ranks of a host, and where master and
  compute dtype agree the shard is simply this rank's rows of it.  Gathering is then no copy at
  all: a barrier says that everybody's rows are final.  Otherwise each rank casts its rows into it
  first (:func:`refresh_unsharded`).  Where there are other hosts, :mod:`.cross_host_sync`
  keeps their copies the same;
* ``private``: one rank, or replicated parameters: it is the shard itself, or a cast of it;
* ``wire``: several hosts or GPUs: there is none, FSDP2 gathers into memory of its own.

Invariant: rows of a shared tensor are written by their owner alone, and only between the
end of one backward pass on every rank and the barrier that opens the next forward pass (below stage 3: that ends the
update).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from thalweg.comm.collectives.shared_memory import CommError, SharedMemoryArena, hash_name
from thalweg.storage_io.evictable_memory import aligned_empty
from thalweg.utils.formatting import format_bytes
from thalweg.zero.fsdp2.private_api import FSDPGroupHandle, FSDPParamHandle
from thalweg.zero.whole_parameter import WholeParameter

StorageKind = Literal["shared", "private", "wire"]
PassKind = Literal["an accumulation window", "an evaluation"]


@dataclass(frozen=True)
class ParamSpec:
    """What must be stored for one parameter: its logical shape, dtypes and number of shards."""

    name: str
    shape: torch.Size
    master_dtype: torch.dtype
    compute_dtype: torch.dtype
    num_shards: int
    requires_grad: bool = True

    @property
    def has_copy(self) -> bool:
        """Whether the computation takes it in another dtype than the master's, which then lies beside a copy."""
        return self.compute_dtype != self.master_dtype

    @property
    def is_mixed(self) -> bool:
        """Whether the computation takes it in fewer bytes than the master has."""
        return self.compute_dtype.itemsize < self.master_dtype.itemsize

    @property
    def rows_per_shard(self) -> int:
        """Rows of a padded shard: the chunking of ``torch.chunk``."""
        return -(-self.shape[0] // self.num_shards)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of a padded shard."""
        return (self.rows_per_shard, *self.shape[1:])

    @property
    def shard_numel(self) -> int:
        """Elements of a padded shard."""
        return self.rows_per_shard * self.shape[1:].numel()

    @property
    def padded_numel(self) -> int:
        """Elements of all padded shards together."""
        return self.num_shards * self.shard_numel

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of the unsharded tensor, padded."""
        return self.padded_numel * self.compute_dtype.itemsize


def describe_uneven_shards(param_specs: Iterable[ParamSpec]) -> str | None:
    """A line on the parameters that are cut by rows into far from equal shards, as four experts over 16 ranks are.

    None where that is little: they are padded by a quarter or less, or add no more than a twentieth to all shards.
    """
    specs = list(param_specs)
    uneven = [spec for spec in specs if len(spec.shape) > 1 and spec.padded_numel > 1.25 * spec.shape.numel()]
    held = sum(spec.padded_numel * spec.master_dtype.itemsize // spec.num_shards for spec in uneven)
    even = sum(spec.shape.numel() * spec.master_dtype.itemsize // spec.num_shards for spec in uneven)
    whole = sum(spec.shape.numel() * spec.master_dtype.itemsize // spec.num_shards for spec in specs)
    if held - even <= 0.05 * whole:
        return None
    largest = max(uneven, key=lambda spec: spec.padded_numel)
    others = f" and {len(uneven) - 1} more" if len(uneven) > 1 else ""
    padded, real = held * largest.num_shards, even * largest.num_shards
    return (
        f"ZeRO cuts parameters by rows, and those of {largest.name} {list(largest.shape)}{others} do not go evenly "
        f"into {largest.num_shards} ranks: some hold {format_bytes(held)} of them where an even share is "
        f"{format_bytes(even)}, as much more for each state of the optimizer, and what is gathered and reduced of them "
        f"has {padded / real:.2g} times their bytes; let zero_optimization.mics_shard_size divide the rows, or for "
        "experts set expert_parallel.autoep_size"
    )


class ShardStorage:
    """Shard and unsharded tensor of one parameter on this rank; ``rank`` counts its shards.

    ``cast_dest``: where this rank's rows are cast to, if the unsharded tensor is not over the shard, or there is none;
    ``padded_unsharded``: a shared one with the padding of its last shard.
    """

    def __init__(
        self,
        spec: ParamSpec,
        rank: int,
        shard: Tensor,
        unsharded: Tensor | None = None,
        cast_dest: Tensor | None = None,
        padded_unsharded: Tensor | None = None,
    ) -> None:
        self.spec, self.shard, self.unsharded, self.cast_dest = spec, shard, unsharded, cast_dest
        self.crosses_link = False  # to where it is computed with, and has a copy in that dtype for it
        self.param_handle: FSDPParamHandle | None = None
        # This rank's rows in the compute dtype, beside a master in a swap file: what updates write too.
        self.compute_copy: Tensor | None = None
        start = rank * spec.rows_per_shard
        self._row_start = min(start, spec.shape[0])
        self._row_end = min(start + spec.rows_per_shard, spec.shape[0])
        self._padded_unsharded = padded_unsharded

    @classmethod
    def create(
        cls,
        spec: ParamSpec,
        rank: int,
        storage_kind: StorageKind,
        arena: SharedMemoryArena | None,
        device: torch.device,
        separate_master: bool = False,
        pin_shard: bool = False,
        private_view: bool = False,
        crosses_link: bool = False,
    ) -> ShardStorage:
        """A storage in the memory that ``storage_kind`` says.

        ``separate_master``: the shard is kept beside its rows of the unsharded tensor, which others see rounded;
        ``pin_shard``: page-locked; FSDP2 would otherwise pin a copy, which updates write and gathers do not read;
        ``private_view``: what a program writes to a shared unsharded tensor, its peers do not see;
        ``crosses_link``: the shard is copied to a device for each use: in the compute dtype, if that has fewer bytes.
        """
        if storage_kind == "shared":
            assert arena is not None
            offset = arena.reserve(spec.unsharded_bytes)
            unsharded, local_rows = view_unsharded(spec, rank, arena, offset, private_view)
            padded_shape = (spec.num_shards * spec.rows_per_shard, *spec.shape[1:])
            padded_unsharded = arena.tensor(offset, padded_shape, spec.compute_dtype)
            if spec.master_dtype == spec.compute_dtype and not separate_master:
                return cls(spec, rank, local_rows, unsharded, padded_unsharded=padded_unsharded)
            shard = torch.zeros(spec.padded_shape, dtype=spec.master_dtype, device=device)
            return cls(spec, rank, shard, unsharded, local_rows, padded_unsharded)
        if pin_shard:
            shard = aligned_empty(spec.padded_shape, spec.master_dtype, pinned=True).zero_()
        else:
            shard = torch.zeros(spec.padded_shape, dtype=spec.master_dtype, device=device)
        if storage_kind == "wire":
            storage = cls(spec, rank, shard)
            storage.crosses_link = crosses_link and spec.is_mixed
            return storage
        if not spec.has_copy:
            # The same memory under another version counter, as a gathered copy would have.
            return cls(spec, rank, shard, shard.data)
        unsharded = torch.zeros(spec.shape, dtype=spec.compute_dtype, device=device)
        return cls(spec, rank, shard, unsharded, unsharded)

    def load_full(self, full: Tensor) -> None:
        """Set this rank's rows from the full value (any dtype)."""
        with torch.no_grad():
            self.shard[: self.num_rows].copy_(self.local_rows(full))

    def version(self) -> int:
        """Grows with every write to the master, through the shard or through the parameter over it, whose
        counters are not the same; transfers to where it lies do not count."""
        version = self.shard._version
        if self.param_handle is not None:
            param = self.param_handle.sharded_param
            local = param._local_tensor if isinstance(param, DTensor) else param
            version += param._version + local._version
        return version

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter trains now."""
        return self.spec.requires_grad if self.param_handle is None else self.param_handle.sharded_param.requires_grad

    @property
    def num_rows(self) -> int:
        """Rows of this rank, padding left out."""
        return self._row_end - self._row_start

    def local_rows(self, full: Tensor) -> Tensor:
        """This rank's rows of the full value."""
        return full[self._row_start : self._row_end]

    def get_rank_rows(self, rank: int) -> Tensor:
        """The padded rows of ``rank`` in a shared unsharded tensor."""
        assert self._padded_unsharded is not None
        return self._padded_unsharded.narrow(0, rank * self.spec.rows_per_shard, self.spec.rows_per_shard)

    @property
    def refresh_copy(self) -> tuple[Tensor, Tensor] | None:
        """(destination, source) of the cast that refreshing needs, or None.  Frozen parameters too: what is
        written through ``p.data`` is counted nowhere."""
        return None if self.cast_dest is None else (self.cast_dest, self.shard)


def view_unsharded(
    spec: ParamSpec, rank: int, arena: SharedMemoryArena, offset: int, private: bool = False
) -> tuple[Tensor, Tensor]:
    """The unsharded tensor at ``offset`` of the arena, and this rank's rows of it, which its peers see."""
    row_bytes = spec.shard_numel * spec.compute_dtype.itemsize
    local_rows = arena.tensor(offset + rank * row_bytes, spec.padded_shape, spec.compute_dtype)
    return arena.tensor(offset, spec.shape, spec.compute_dtype, private=private), local_rows


def get_arena_bytes(specs: Iterable[ParamSpec]) -> int:
    """Bytes of arena for the unsharded tensors of ``specs``, each aligned."""
    return sum(spec.unsharded_bytes + 64 for spec in specs)


def max_unit_grad_bytes(param_specs: Mapping[str, ParamSpec], units: Iterable[str], reduce_dtype: torch.dtype) -> int:
    """Bytes of the largest unit's gradients as they are reduced; what no unit holds is the root's."""
    names, sizes = list(units), dict[str, int]()
    for name, spec in param_specs.items():
        unit = next((unit for unit in names if name.startswith(f"{unit}.")), "")
        sizes[unit] = sizes.get(unit, 0) + spec.padded_numel * reduce_dtype.itemsize
    return max(sizes.values(), default=0)


def refresh_unsharded(storages: Iterable[ShardStorage]) -> None:
    """Cast this rank's rows into the unsharded tensors; those over the shard itself need nothing."""
    ops: Any = torch  # which has lists' operators with an underscore
    if pairs := [pair for storage in storages if (pair := storage.refresh_copy) is not None]:
        with torch.no_grad():  # on a GPU few launches, with the cast in them
            ops._foreach_copy_([copy for copy, _ in pairs], [source for _, source in pairs])


class ParameterStorage(Protocol):
    """Where the parameters of some units are between uses, and what brings them there and back.

    ``groups``: the units; :meth:`unshard` is called for one that is used by itself.
    """

    groups: Sequence[FSDPGroupHandle] = ()

    def before_forward(self) -> None:
        """A forward pass of the whole model begins: what is in memory all the time is made ready; collective."""

    def unshard(self, group: FSDPGroupHandle) -> None:
        """A unit is about to be used; by itself, if :meth:`before_forward` was not called; collective."""

    def reshard(self, end_of: PassKind) -> None:
        """Nothing is in use any more; the units' modules hold shards again; collective."""

    def after_update(self, units: Iterable[str] | None = None) -> None:
        """The shards of these units (None: of all) may have new values, and so may their compute copies on disk."""

    def adopt_writes(self) -> None:
        """What the program has written to whole parameters enters this rank's shards; no rank reads them now."""

    def adopt_early(self) -> None:
        """Updates come in the backward pass already."""

    def sync(self) -> None:
        """Adopt and publish what every rank has written; collective."""

    def publish(self) -> None:
        """Bring whole parameters up to date with the shards; collective, with nothing where there are none."""

    def close(self) -> None:
        """Give memory and disk back."""


class _UnshardedStorage(ParameterStorage):
    """Units whose unsharded parameters are in memory at all times, in the device's or the host's.

    ``storages``: of each unit, by its name; ``arena``: what the ranks of the host meet at, if they share memory;
    ``refresh``: brings unsharded tensors up to date (a barrier follows before other ranks read them), by default on
    one host; ``log_gather``: around the barrier that stands for a gather, where ``refresh`` does not log what moves;
    ``on_update``: shards may have new values that no counter tells of.
    """

    def __init__(
        self,
        groups: Sequence[FSDPGroupHandle],
        storages: Mapping[str, Sequence[ShardStorage]],
        refresh: Callable[[Iterable[ShardStorage]], None] | None = refresh_unsharded,
        arena: SharedMemoryArena | None = None,
        log_gather: Callable[[], AbstractContextManager[object]] = nullcontext,
        on_update: Callable[[], None] = lambda: None,
    ) -> None:
        self.groups, self._refresh, self._on_update = groups, refresh, on_update
        self._storages_by_group = storages
        self._storages = [storage for group in groups for storage in storages[group.name]]
        self._arena, self._log_gather = arena, log_gather

    def after_update(self, units: Iterable[str] | None = None) -> None:
        """The next refresh sends what has changed."""
        self._on_update()

    def close(self) -> None:
        """Leave the arena."""
        if self._arena is not None:
            self._arena.close()

    def _refresh_all(self, storages: Iterable[ShardStorage], operation: str) -> None:
        assert self._refresh is not None
        self._refresh(storages)
        if self._arena is not None:
            with self._log_gather():
                self._arena.barrier(operation)


class FSDPStorage(ParameterStorage):
    """Units that FSDP2 gathers into memory of its own, and frees; ``storages``: of each unit, by its name.

    Masters on the host may be wider than what is computed with.  What crosses to the device is then a cast, made anew
    in each forward pass (no counter tells of what programs write through ``p.data``), and good for the backward pass::

        this thread   | unit 1: its copy, its kernels | unit 2: its copy, its kernels | ...
        the other     | cast of unit 2 | of unit 3    | of unit 4    |

    What a hook writes to a unit's shards while one of the ``CASTS_AHEAD`` units before it runs may come too late.
    """

    CASTS_AHEAD = 2

    def __init__(self, groups: Sequence[FSDPGroupHandle], storages: Mapping[str, Sequence[ShardStorage]]) -> None:
        self.groups, self._stale, self._casts = groups, set[str](), dict[str, Future[None]]()
        self._thread = ThreadPoolExecutor(1, "thalweg-casts")  # a later cast of a unit waits for an earlier one
        self._to_cast: dict[str, Sequence[ShardStorage]] = {}
        for group in groups:
            members = storages[group.name]
            flat = _make_cast_dests([storage for storage in members if storage.crosses_link])
            if any(storage.refresh_copy is not None for storage in members):
                sources = [storage.shard if (pair := storage.refresh_copy) is None else pair[0] for storage in members]
                self._to_cast[group.name] = members
                group.all_gather_from(sources, partial(self._refresh, group.name), flat=flat)

    def before_forward(self) -> None:
        """The program may have written to any shard."""
        self._stale = set(self._to_cast)
        self._casts.clear()

    def unshard(self, group: FSDPGroupHandle) -> None:
        """Gather a unit that is used by itself."""
        if group.is_sharded and group.name in self._to_cast:
            self._stale.add(group.name)
        group.gather()

    def _refresh(self, name: str) -> None:
        names = list(self._to_cast)
        first = names.index(name)
        for ahead in names[first : first + 1 + self.CASTS_AHEAD]:
            if ahead in self._stale:
                self._stale.discard(ahead)
                self._casts[ahead] = self._thread.submit(refresh_unsharded, self._to_cast[ahead])
        if (cast := self._casts.pop(name, None)) is not None:
            cast.result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def reshard(self, end_of: PassKind) -> None:
        """See the base; FSDP2 would keep the root's after an evaluation, whatever is written to the shards then."""
        for group in self.groups:
            group.to_sharded()


def _make_cast_dests(storages: Sequence[ShardStorage]) -> Tensor | None:
    """Memory for the casts of a unit's shards, one behind the other; None if there are none."""
    if not storages:
        return None
    sizes, first = [storage.shard.numel() for storage in storages], storages[0]
    flat = torch.empty(sum(sizes), dtype=first.spec.compute_dtype, pin_memory=first.shard.is_pinned())
    for storage, cast_dest in zip(storages, flat.split(sizes), strict=True):
        storage.cast_dest = cast_dest.view_as(storage.shard)
    return flat


class ResidentStorage(_UnshardedStorage):
    """Units whose modules hold shards between two uses."""

    def before_forward(self) -> None:
        """Refresh all units at once."""
        if not any(group.is_sharded for group in self.groups):
            return
        self._refresh_all(self._storages, "the start of a forward pass")
        for group in self.groups:
            group.to_unsharded()

    def unshard(self, group: FSDPGroupHandle) -> None:
        """Refresh a unit that is called by itself, not through the root."""
        if group.is_sharded:
            self._refresh_all(self._storages_by_group[group.name], f"the forward pass of {group.name!r}")
            group.to_unsharded()

    def reshard(self, end_of: PassKind) -> None:
        """Put shards in place, and wait until all ranks have: rows may be written from then on."""
        for group in self.groups:
            group.to_sharded()
        if self._arena is not None:
            self._arena.barrier(f"the end of {end_of}")


class WholeStorage(_UnshardedStorage):
    """Units whose modules hold whole plain parameters at all times (stages 0 to 2): see :mod:`..whole_parameter`.

    They are gathered when an update has ended, not before the next forward pass.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """``refresh``: None where FSDP2 gathers over links."""
        super().__init__(*args, **options)
        self._adopts_early = False
        self._wholes: list[WholeParameter] = []
        self._gather()
        self._wholes = [whole for group in self.groups for whole in group.keep_whole()]
        self._mark_published()

    def before_forward(self) -> None:
        """Where the first forward pass after an update finds that shards have changed (through the optimizer's
        parameters, say), all ranks publish theirs.  What a program has written to whole parameters is in place: it
        enters the shards when the window ends, or before if updates come in the backward pass."""
        if self._adopts_early:
            self.adopt_writes()
        if not self._may_differ:
            return
        self._may_differ = False
        for whole in self._wholes:
            if whole.requires_grad != whole.sharded.requires_grad:  # thawed through the optimizer's parameter
                whole.requires_grad_(whole.sharded.requires_grad)
        if self._versions != [storage.version() for storage in self._storages]:
            if self._arena is not None:
                self._arena.checked_barrier("parameters changed between two updates")
            self.adopt_writes()
            self.publish()

    def unshard(self, group: FSDPGroupHandle) -> None:
        """See :meth:`before_forward`."""
        self.before_forward()

    def adopt_early(self) -> None:
        """Updates come in the backward pass: what is written before it must enter the shards before it."""
        self._adopts_early = True

    def sync(self) -> None:
        """See the base."""
        self._meet("the reading of a model's state")
        self.adopt_writes()
        self.publish()

    def reshard(self, end_of: PassKind) -> None:
        """Wait until no rank computes with them any more: rows may be written from then on."""
        if end_of == "an accumulation window":
            self._meet(f"the end of {end_of}")

    def _meet(self, operation: str) -> None:
        """A barrier of ranks whose programs have written to the same parameters."""
        if self._arena is None:
            return
        written = [index for index, whole in enumerate(self._wholes) if whole.has_own_values]
        if not self._arena.agree(hash_name(str(written)) if written else 0, operation):
            names = [self._storages[index].spec.name for index in written[:4]]
            raise CommError(
                f"rank {self._arena.rank} has written to {', '.join(names) or 'no parameter'} since the last update, "
                "and another rank to others: every rank of a job must write the same to the same parameters"
            )

    @torch.no_grad()
    def adopt_writes(self) -> None:
        """See the base."""
        for storage, whole in zip(self._storages, self._wholes, strict=True):
            if whole.is_written:
                if storage.shard.data_ptr() != whole.data_ptr():
                    storage.load_full(whole.detach())
                whole.mark_adopted()

    def publish(self) -> None:
        """See the base."""
        self._gather()
        self._mark_published()

    def _gather(self) -> None:
        if self._refresh is None:
            for group in self.groups:
                group.regather()
        else:
            if self._arena is not None and any(whole.has_own_values for whole in self._wholes):
                self._arena.drop_private_pages()
            self._refresh_all(self._storages, "the end of an update")

    def _mark_published(self) -> None:
        for whole in self._wholes:
            whole.mark_published()
        self._versions = [storage.version() for storage in self._storages]
        self._may_differ = True
