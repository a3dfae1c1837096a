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

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor

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


class Store:
    """Shard and home of one parameter on this rank."""

    def __init__(
        self,
        slot: Slot,
        rank: int,
        placement: Placement,
        arena: Arena | None,
        device: torch.device,
        apart: bool = False,
    ) -> None:
        """``apart``: the shard is kept beside its rows of the home, which others see rounded."""
        self.slot = slot
        start = rank * slot.rows
        self._first = min(start, slot.shape[0])
        self._last = min(start + slot.rows, slot.shape[0])
        self.shard: Tensor
        self.home: Tensor | None = None
        self._cast_into: Tensor | None = None
        if placement == "shared":
            assert arena is not None
            offset = arena.reserve(slot.home_bytes)
            self.home = arena.tensor(offset, slot.shape, slot.compute)
            self._padded = arena.tensor(offset, (slot.num_shards * slot.rows, *slot.shape[1:]), slot.compute)
            row_bytes = prod(slot.padded_shape) * slot.compute.itemsize
            own_rows = arena.tensor(offset + rank * row_bytes, slot.padded_shape, slot.compute)
            if slot.master == slot.compute and not apart:
                self.shard = own_rows
            else:
                self.shard = torch.zeros(slot.padded_shape, dtype=slot.master, device=device)
                self._cast_into = own_rows
            return
        self.shard = torch.zeros(slot.padded_shape, dtype=slot.master, device=device)
        if placement == "private":
            if slot.master == slot.compute:
                # The same memory under another version counter, as a gathered copy would have.
                self.home = self.shard.data
            else:
                self.home = torch.zeros(slot.shape, dtype=slot.compute, device=device)
                self._cast_into = self.home

    def fill(self, full: Tensor) -> None:
        """Set this rank's rows from the full value (any dtype)."""
        with torch.no_grad():
            self.shard[: self._last - self._first].copy_(full[self._first : self._last])

    def rows_of(self, rank: int) -> Tensor:
        """The padded rows of ``rank`` in a shared home."""
        return self._padded.narrow(0, rank * self.slot.rows, self.slot.rows)

    @property
    def cast(self) -> tuple[Tensor, Tensor] | None:
        """(destination, source) of the copy that publishing needs, or None."""
        return None if self._cast_into is None else (self._cast_into, self.shard)


def arena_bytes(slots: Iterable[Slot]) -> int:
    """Bytes of arena for the homes of ``slots``, each aligned."""
    return sum(slot.home_bytes + 64 for slot in slots)


def publish(stores: Iterable[Store]) -> None:
    """Cast this rank's rows into the homes; homes that are the shard itself need nothing."""
    with torch.no_grad():
        for store in stores:
            if (pair := store.cast) is not None:
                pair[0].copy_(pair[1])
