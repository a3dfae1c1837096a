"""Masters in the swap file, while the parameters that training computes with stay in memory.

With 16-bit parameters and the optimiser's state on NVMe::

    swap file   | fp32 master, this rank's rows | moments (optim/streamed.py) |
    memory      | home, 16 bits: what forward and backward read               |

so that a parameter takes 2 bytes of memory instead of 6.  The streamed update reads master and moments, and
writes this rank's rows of the home in the same pass; nothing is cast again as a window opens.

Invariant: the home's rows are the cast of the master, but for masters that somebody has written to through
their views (a checkpoint, ``GatheredParameters``): these are cast when the home is next published.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from thalweg.comm import Arena
from thalweg.comm.verdict import all_or_none
from thalweg.store import SwapFile
from thalweg.store.regions import round_up
from thalweg.zero.homes import Placement, Slot, shared_home
from thalweg.zero.offload import CAPACITY_TO_COME, Offload, PagedStore, Paging, Writer, page_units
from thalweg.zero.paging import Pager
from thalweg.zero.wiring import Wiring


class MasterStore(PagedStore):
    """A store whose shard is a view of the swap file and whose home is in memory; ``rows``: this rank's rows
    of the home, padded."""

    def __init__(
        self, slot: Slot, rank: int, swap: SwapFile, writer: Writer, home: Tensor, rows: Tensor
    ) -> None:
        offset = swap.region(_master_bytes(slot))
        shard = swap.view(offset, slot.padded_shape, slot.master)
        super().__init__(slot, rank, shard, home, rows, writer.to(shard, offset, offset, shard), rows)
        self._rows, self._seen = rows, 0

    def fill(self, full: Tensor) -> None:
        """Set this rank's rows of both from the full value."""
        super().fill(full)
        with torch.no_grad():
            self._rows[: self.num_rows].copy_(self.own_rows(full).to(self.slot.master))

    @property
    def cast(self) -> tuple[Tensor, Tensor] | None:
        """What publishing must copy: nothing, unless somebody has written to the master."""
        if (version := self.version()) == self._seen:
            return None
        self._seen = version
        return self._rows, self.shard


def rest_on_disk(
    slots: dict[str, Slot],
    units: Iterable[str],
    offload: Offload,
    fixed: Sequence[str],
    rank: int,
    wiring: Wiring,
    mesh: DeviceMesh,
) -> Paging | None:
    """What of ``slots`` rests on a disk: whole units (``page_units``), or masters; collective over ``mesh``.

    Raises:
        ValueError: on all ranks, if one of them cannot make its swap file.
    """
    place = page_units if offload.pages or wiring.crossing else swap_masters
    make = partial(place, slots, units, offload, fixed, rank, wiring.placement, wiring.arena)
    if not offload.pages and offload.states != "nvme":
        return make()
    return all_or_none(make, "a swap file for its parameters", mesh.get_group() if mesh.size() > 1 else None)


def _has_master(slot: Slot) -> bool:
    return slot.trains and slot.master != slot.compute and prod(slot.padded_shape) > 0


def swap_masters(
    slots: Mapping[str, Slot],
    units: Iterable[str],
    offload: Offload,
    fixed: Sequence[str],
    rank: int,
    placement: Placement,
    arena: Arena | None,
) -> Paging | None:
    """The swap file with the masters of ``slots``; None where there are none, or no homes to compute with.

    The arguments are those of ``page_units``, whose place this takes where units stay in memory.

    Raises:
        ValueError: the folder cannot be used, or its disk is too small.
    """
    held = {name: slot for name, slot in slots.items() if _has_master(slot)}
    if not held or placement == "wire" or offload.states != "nvme":
        return None
    needed = sum(_master_bytes(slot) for slot in held.values())
    swap = SwapFile(offload.state_folder, needed, capacity=needed + CAPACITY_TO_COME)
    writer = Writer(swap)
    stores: dict[str, PagedStore] = {}
    for name, slot in held.items():
        if placement == "shared":
            assert arena is not None
            home, rows = shared_home(slot, rank, arena, arena.reserve(slot.home_bytes))
        else:
            home = rows = torch.zeros(slot.shape, dtype=slot.compute)
        stores[name] = MasterStore(slot, rank, swap, writer, home, rows)
    return Paging(swap, Pager((), 2), stores)


def _master_bytes(slot: Slot) -> int:
    return round_up(prod(slot.padded_shape) * slot.master.itemsize)
