"""Where shards and unsharded parameters live.

A *shard* is the master copy of this rank's rows of a parameter, padded to the same
number of rows on every rank.  A *home* is a tensor of the full shape in the compute
dtype that can stand for the unsharded parameter:

* ``shared``: the ranks of a host share it; where there are other hosts,
  :mod:`.crossing` keeps their homes in step.  One host:  The home lies in the arena, one copy for all
  of them, and where master and compute dtype agree the shard is simply this rank's rows
  of it.  Gathering is then no copy at all: a fence says that everybody's rows are
  final.  Otherwise each rank casts its rows into the home first (``publish``);
* ``private``: one rank, or replicated parameters: the home is the shard itself, or a
  cast of it;
* ``wire``: several hosts or GPUs: no home, FSDP2 gathers into memory of its own.

Invariant: rows of a shared home are written by their owner alone, and only between the
end of one backward pass on every rank and the fence that opens the next forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from thalweg.comm import Arena

Placement = Literal["shared", "private", "wire"]


@dataclass(frozen=True)
class Slot:
    """What must be stored for one parameter: its logical shape, dtypes and number of shards."""

    name: str
    shape: torch.Size
    master: torch.dtype
    compute: torch.dtype
    num_shards: int
    trains: bool = True

    @property
    def rows(self) -> int:
        """Rows of a padded shard: the chunking of ``torch.chunk``."""
        return -(-self.shape[0] // self.num_shards)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of a padded shard."""
        return (self.rows, *self.shape[1:])

    @property
    def padded_numel(self) -> int:
        """Elements of all padded shards together."""
        return self.num_shards * prod(self.padded_shape)

    @property
    def home_bytes(self) -> int:
        """Bytes of the home."""
        return self.padded_numel * self.compute.itemsize


class Shown(Protocol):
    """What the model shows of a store."""

    @property
    def sharded(self) -> Tensor:
        """The sharded parameter over the store's shard."""
        ...


class Store:
    """Shard and home of one parameter on this rank; ``rank`` counts its shards.

    ``cast_into``: where this rank's rows are cast to when they are published, if the home is not the shard;
    ``padded``: a shared home with the padding of its last shard.
    """

    def __init__(
        self,
        slot: Slot,
        rank: int,
        shard: Tensor,
        home: Tensor | None = None,
        cast_into: Tensor | None = None,
        padded: Tensor | None = None,
    ) -> None:
        self.slot, self.shard, self.home = slot, shard, home
        self.shown: Shown | None = None
        start = rank * slot.rows
        self._first = min(start, slot.shape[0])
        self._last = min(start + slot.rows, slot.shape[0])
        self._cast_into, self._padded = cast_into, padded

    @classmethod
    def make(
        cls,
        slot: Slot,
        rank: int,
        placement: Placement,
        arena: Arena | None,
        device: torch.device,
        apart: bool = False,
    ) -> Store:
        """A store in the memory that ``placement`` says.

        ``apart``: the shard is kept beside its rows of the home, which others see rounded.
        """
        if placement == "shared":
            assert arena is not None
            offset = arena.reserve(slot.home_bytes)
            home, own_rows = shared_home(slot, rank, arena, offset)
            padded = arena.tensor(offset, (slot.num_shards * slot.rows, *slot.shape[1:]), slot.compute)
            if slot.master == slot.compute and not apart:
                return cls(slot, rank, own_rows, home, padded=padded)
            shard = torch.zeros(slot.padded_shape, dtype=slot.master, device=device)
            return cls(slot, rank, shard, home, own_rows, padded)
        shard = torch.zeros(slot.padded_shape, dtype=slot.master, device=device)
        if placement == "wire":
            return cls(slot, rank, shard)
        if slot.master == slot.compute:
            # The same memory under another version counter, as a gathered copy would have.
            return cls(slot, rank, shard, shard.data)
        home = torch.zeros(slot.shape, dtype=slot.compute, device=device)
        return cls(slot, rank, shard, home, home)

    def fill(self, full: Tensor) -> None:
        """Set this rank's rows from the full value (any dtype)."""
        with torch.no_grad():
            self.shard[: self.num_rows].copy_(self.own_rows(full))

    def version(self) -> int:
        """Grows with every write to the master, through the shard or through the parameter over it, whose
        counters are not the same; transfers to where it lies do not count."""
        found = self.shard._version
        if self.shown is not None:
            param = self.shown.sharded
            found += param._version
            if isinstance(param, DTensor):
                with torch.no_grad():
                    found += param.to_local()._version
        return found

    @property
    def trains(self) -> bool:
        """Whether the parameter trains now."""
        return self.slot.trains if self.shown is None else self.shown.sharded.requires_grad

    @property
    def num_rows(self) -> int:
        """Rows of this rank, padding left out."""
        return self._last - self._first

    def own_rows(self, full: Tensor) -> Tensor:
        """This rank's rows of the full value."""
        return full[self._first : self._last]

    def rows_of(self, rank: int) -> Tensor:
        """The padded rows of ``rank`` in a shared home."""
        assert self._padded is not None
        return self._padded.narrow(0, rank * self.slot.rows, self.slot.rows)

    @property
    def cast(self) -> tuple[Tensor, Tensor] | None:
        """(destination, source) of the copy that publishing needs, or None.  Frozen parameters too: what is
        written through ``p.data`` is counted nowhere."""
        return None if self._cast_into is None else (self._cast_into, self.shard)


def shared_home(slot: Slot, rank: int, arena: Arena, offset: int) -> tuple[Tensor, Tensor]:
    """The home at ``offset`` of the arena, and this rank's rows of it."""
    row_bytes = prod(slot.padded_shape) * slot.compute.itemsize
    own_rows = arena.tensor(offset + rank * row_bytes, slot.padded_shape, slot.compute)
    return arena.tensor(offset, slot.shape, slot.compute), own_rows


def arena_bytes(slots: Iterable[Slot]) -> int:
    """Bytes of arena for the homes of ``slots``, each aligned."""
    return sum(slot.home_bytes + 64 for slot in slots)


def largest_unit(slots: Mapping[str, Slot], units: Iterable[str], reduce: torch.dtype) -> int:
    """Bytes of the largest unit's gradients as they are reduced; what no unit holds is the root's."""
    names, sizes = list(units), dict[str, int]()
    for name, slot in slots.items():
        unit = next((unit for unit in names if name.startswith(f"{unit}.")), "")
        sizes[unit] = sizes.get(unit, 0) + slot.padded_numel * reduce.itemsize
    return max(sizes.values(), default=0)


def publish(stores: Iterable[Store]) -> None:
    """Cast this rank's rows into the homes; homes that are the shard itself need nothing."""
    with torch.no_grad():
        for store in stores:
            if (pair := store.cast) is not None:
                pair[0].copy_(pair[1])
