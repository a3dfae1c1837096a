"""Units that come from a disk, and the update that streams over it: the engine's own pager over stand-ins.

What is in memory when is decided by ``zero/paging.py: Pager`` itself; a :class:`_Page` takes the place of a
unit and counts bytes instead of reading them.  How an update cuts parameters, gradients and state into
buffers is ``optim/chunks.py``'s own doing, over tensors without data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch

from thalweg.optim.chunks import GRAIN, Item, Operand, cut_chunks
from thalweg.optim.streamed import StreamPolicy
from thalweg.plan.process import Process
from thalweg.plan.setting import Setting
from thalweg.store.paged import HUGE_PAGE
from thalweg.store.regions import round_up
from thalweg.zero.homes import Slot
from thalweg.zero.paging import PagedUnit, Pager, Phase


class _Page:
    """Stands in for a :class:`PagedUnit`: bytes that come and go, pages that one unit leaves to another."""

    def __init__(self, process: Process, name: str, image_bytes: int, home_bytes: int) -> None:
        self.name, self.phase, self.in_use, self.closed_at = name, cast(Phase, "out"), False, -1
        self.stale, self.last_use, self.read_bytes = False, 0, 0
        self._process, self.image_bytes, self._home = process, image_bytes, home_bytes
        self.room = round_up(image_bytes, HUGE_PAGE)
        self._kept = 0  # bytes of the image that are in memory

    def begin(self, donor: _Page | None = None) -> None:
        """Start reading, into the pages of ``donor`` if there is one."""
        if self.phase == "out":
            if donor is not None and donor is not self:
                self._kept, donor._kept = donor._kept, 0
            self._keep(max(self._kept, self.image_bytes))
            self.read_bytes += self.image_bytes
            self.phase = "coming"

    def finish(self) -> None:
        """The bytes are there; in a shared home, where that is not the image, with those of the peers."""
        self.begin()
        if self.phase == "coming":
            if self._home:
                self._process.map("gathered", self._home)
                self.clear()
            self.phase = "in"

    def retire(self) -> bool:
        """Its bytes are not wanted any more; whether it leaves pages behind."""
        leaves = self.phase != "out" and not self._home
        if self.phase != "out" and self._home:
            self.clear()
            if self.phase == "in":
                self._process.map("gathered", -self._home)
        self.phase = "out"
        return leaves

    def clear(self) -> None:
        """The image's pages go back."""
        self._keep(0)

    def _keep(self, nbytes: int) -> None:
        self._process.map("gathered", nbytes - self._kept)
        self._kept = nbytes


class Pages:
    """The units of ``slots`` (by unit) that are paged, under the engine's pager."""

    def __init__(self, process: Process, slots: dict[str, list[Slot]], setting: Setting) -> None:
        shared = setting.placement == "shared"
        self.pages = {}
        for name, members in slots.items():
            image = sum(round_up(prod(slot.padded_shape) * slot.compute.itemsize) for slot in members)
            home = sum(slot.home_bytes for slot in members) if shared else 0
            self.pages[name] = _Page(process, name, image, home)
        meet = _meet if shared else None
        units = cast(list[PagedUnit], list(self.pages.values()))
        self.pager = Pager(units, setting.offload.units_in_memory, meet)

    def follow(self, verb: str, name: str) -> None:
        """``open``, ``close`` or ``ahead`` of one unit."""
        {"open": self.pager.open, "close": self.pager.close, "ahead": self.pager.read_ahead}[verb](name)

    def leave(self, name: str) -> None:
        """The unit is updated within the backward pass."""
        self.pager.forget([name])

    def end_of_window(self) -> None:
        """The update follows: nothing that is in memory is true any more."""
        self.pager.end_pass()
        self.pager.forget(None)

    @property
    def read_bytes(self) -> int:
        """Bytes read so far."""
        return sum(page.read_bytes for page in self.pages.values())


def _meet(name: str) -> None:
    """All ranks are here."""


@dataclass
class Streamed:
    """One streamed update on one rank: bytes of buffers it touches, bytes read and written."""

    buffer_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


@dataclass(frozen=True)
class OnDisk:
    """Which operands of an update lie in the swap file."""

    master: bool
    grad: bool
    state: bool
    copy: bool = True


def stream(
    updates: Sequence[Sequence[tuple[Slot, OnDisk]]], state_dtypes: Sequence[torch.dtype], setting: Setting
) -> Streamed:
    """What the updates of a step (each a list of parameters) move through the ring of buffers."""
    depth, size = setting.states.ring
    touched, found = [0] * depth, Streamed()
    for members in updates:
        items = [_item(slot, where, state_dtypes) for slot, where in members]
        for turn, chunk in enumerate(cut_chunks(items, size, max(StreamPolicy().chunk_elements, GRAIN))):
            spans = [*chunk.reads, *chunk.writes]
            ends = max((span.start + span.nbytes for span in spans), default=0)
            touched[turn % depth] = max(touched[turn % depth], ends)
            found.read_bytes += sum(span.nbytes for span in chunk.reads)
            found.written_bytes += sum(span.nbytes for span in chunk.writes)
    found.buffer_bytes = sum(touched)
    return found


def _item(slot: Slot, where: OnDisk, state_dtypes: Sequence[torch.dtype]) -> Item:
    numel, at = prod(slot.padded_shape), 0
    operands: dict[str, Operand] = {}

    def add(name: str, dtype: torch.dtype, on_disk: bool, **how: Any) -> None:
        nonlocal at
        offset = at if on_disk else None
        at += round_up(numel * dtype.itemsize) if on_disk else 0
        operands[name] = Operand(torch.empty(numel, dtype=dtype, device="meta"), offset, **how)

    add("master", slot.master, where.master, write=True)
    add("grad", slot.master, where.grad)
    for index, dtype in enumerate(state_dtypes):
        add(f"state {index}", dtype, where.state, write=True)
    if where.master and slot.compute != slot.master:
        add("copy", slot.compute, where.copy, read=False, write=True)
    return Item({}, torch.empty(0), numel, operands, (), {}, False)
