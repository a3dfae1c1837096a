"""Masters in the swap file, while the parameters that training computes with stay in memory.

With 16-bit parameters and the optimiser's state on NVMe::

    swap file   | fp32 master, this rank's rows | moments (optim/offload/nvme_step.py) |
    memory      | unsharded, 16 bits: what forward and backward read                   |

so that a parameter takes 2 bytes of memory instead of 6.  The streamed update reads master and moments, and
writes this rank's rows of the unsharded tensor in the same pass; nothing is cast again as a window opens.

Invariant: these rows are the cast of the master, but for masters that somebody has written to through
their views (a checkpoint, ``GatheredParameters``): these are cast at the next refresh.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from thalweg.comm import SharedMemoryArena
from thalweg.comm.error_agreement import all_ranks_or_raise
from thalweg.storage_io import SwapFile
from thalweg.storage_io.allocator import round_up
from thalweg.zero.collectives import Collectives
from thalweg.zero.storage.base import ParamSpec, StorageKind, view_unsharded
from thalweg.zero.storage.nvme import (
    OPTIMIZER_CAPACITY_BYTES,
    NvmeStorage,
    PagedShardStorage,
    ParamOffloadPolicy,
    SwapFileWriter,
    build_unit_paging,
)
from thalweg.zero.storage.pager import Pager


class NvmeMasterStorage(PagedShardStorage):
    """A storage whose shard is a view of the swap file and whose unsharded tensor is in memory; ``rows``: this
    rank's rows of it, padded."""

    def __init__(
        self,
        spec: ParamSpec,
        rank: int,
        swap: SwapFile,
        writer: SwapFileWriter,
        unsharded: Tensor,
        rows: Tensor,
    ) -> None:
        offset = swap.allocate(_master_bytes(spec))
        shard = swap.view(offset, spec.padded_shape, spec.master_dtype)
        super().__init__(spec, rank, shard, unsharded, rows, writer.make_write_fn(shard, offset, offset, shard), rows)
        self._unsharded_rows, self._cast_version = rows, 0

    def load_full(self, full: Tensor) -> None:
        """Set this rank's rows of both from the full value."""
        super().load_full(full)
        with torch.no_grad():
            self._unsharded_rows[: self.num_rows].copy_(self.local_rows(full).to(self.spec.master_dtype))

    @property
    def refresh_copy(self) -> tuple[Tensor, Tensor] | None:
        """What refreshing must copy: nothing, unless somebody has written to the master."""
        if (version := self.version()) == self._cast_version:
            return None
        self._cast_version = version
        return self._unsharded_rows, self.shard


def build_nvme_storage(
    param_specs: dict[str, ParamSpec],
    units: Iterable[str],
    offload: ParamOffloadPolicy,
    resident_modules: Sequence[str],
    rank: int,
    collectives: Collectives,
    mesh: DeviceMesh,
) -> NvmeStorage | None:
    """What of ``param_specs`` rests on a disk: whole units (``build_unit_paging``), or masters; collective.

    Raises:
        ValueError: on all ranks, if one of them cannot make its swap file.
    """
    build_fn = build_unit_paging if offload.uses_nvme or collectives.cross_host_sync else build_nvme_masters
    build = partial(
        build_fn,
        param_specs,
        units,
        offload,
        resident_modules,
        rank,
        collectives.storage_kind,
        collectives.arena,
    )
    if not offload.uses_nvme and offload.optimizer_device != "nvme":
        return build()
    return all_ranks_or_raise(build, "a swap file for its parameters", mesh.get_group() if mesh.size() > 1 else None)


def _has_separate_master(spec: ParamSpec) -> bool:
    return spec.requires_grad and spec.master_dtype != spec.compute_dtype and prod(spec.padded_shape) > 0


def build_nvme_masters(
    param_specs: Mapping[str, ParamSpec],
    units: Iterable[str],
    offload: ParamOffloadPolicy,
    resident_modules: Sequence[str],
    rank: int,
    storage_kind: StorageKind,
    arena: SharedMemoryArena | None,
) -> NvmeStorage | None:
    """The swap file with the masters of ``param_specs``; None where there are none, or no compute copy.

    The arguments are those of ``build_unit_paging``, which this replaces where units stay in memory.

    Raises:
        ValueError: the folder cannot be used, or its disk is too small.
    """
    master_specs = {name: spec for name, spec in param_specs.items() if _has_separate_master(spec)}
    if not master_specs or storage_kind == "wire" or offload.optimizer_device != "nvme":
        return None
    num_bytes = sum(_master_bytes(spec) for spec in master_specs.values())
    swap = SwapFile(offload.optimizer_folder, num_bytes, capacity=num_bytes + OPTIMIZER_CAPACITY_BYTES)
    writer = SwapFileWriter(swap)
    storages: dict[str, PagedShardStorage] = {}
    for name, spec in master_specs.items():
        if storage_kind == "shared":
            assert arena is not None
            unsharded, rows = view_unsharded(spec, rank, arena, arena.reserve(spec.unsharded_bytes))
        else:
            unsharded = rows = torch.zeros(spec.shape, dtype=spec.compute_dtype)
        storages[name] = NvmeMasterStorage(spec, rank, swap, writer, unsharded, rows)
    return NvmeStorage(swap, Pager((), 2), storages)


def _master_bytes(spec: ParamSpec) -> int:
    return round_up(prod(spec.padded_shape) * spec.master_dtype.itemsize)
