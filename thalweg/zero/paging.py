"""Units whose parameters are in memory only while they are in use.

The picture, for one unit (a transformer block) on one rank::

    swap file   | image of unit 0 | image of unit 1 | ...        compute dtype, this rank's rows
                         |  O_DIRECT, threads
    memory      |  home of unit 0  |  home of unit 1  | ...      addresses for good, pages for a while

A *home* is the unsharded parameter (see :mod:`.homes`): the same tensor at the same address always, so that
what autograd has saved of it in the forward pass is valid again in the backward pass, once its bytes are
back.  Between uses its pages are given to the system.  Outside of its use a unit's modules hold the shard, a
view of the swap file's mapping.

Phases of a unit: *out*, *coming* (a read is under way), *in* (its bytes are there), and *in use* (the modules
hold the homes).  After use it stays in until the memory is wanted: besides those in use at most
``limit - 1`` units are anything but out, and the least recently used goes first.  Its pages go to the unit
that takes its place (*retired* units are out and wait for that), since pages fresh from the kernel would have
to be cleared; no more than ``limit`` units have pages.

Read-ahead.  What followed a unit the last time is what is read while it computes: a table of pairs of units
that is learnt as training goes, so that a forward pass, a backward pass and an evaluation each have their
own order.  A wrong guess costs a read.  Nothing is read beyond the end of a pass, as an update may follow.

Invariants: a unit in use is in; an updated unit that is not in use is out (:meth:`Pager.forget`); and every
rank opens the same units in the same order where homes are shared, or all ranks get an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thalweg.store import PagedMemory, SwapFile, Ticket
from thalweg.store.paged import HUGE_PAGE
from thalweg.store.regions import round_up

Phase = Literal["out", "coming", "in"]


@dataclass(frozen=True)
class Part:
    """One parameter's share of its unit's image.

    ``image``: its bytes in the image, compute dtype; ``landing``: this rank's rows of the home, where the
    image is not the home itself; ``shard``: the master, where that is not the image's place in the file;
    ``offset``: of the image's bytes in the file; ``version()`` tells of writes to the master.
    """

    image: Tensor
    landing: Tensor | None
    shard: Tensor | None
    offset: int
    version: Callable[[], int]


class PagedUnit:
    """The image of one unit: its place in the file, its place in memory, and its phase."""

    def __init__(
        self,
        name: str,
        swap: SwapFile,
        memory: PagedMemory,
        *,
        offset: int,
        start: int,
        nbytes: int,
        parts: Sequence[Part],
        drop_landings: Callable[[], None] | None = None,
    ) -> None:
        self.name, self.swap, self.parts = name, swap, parts
        self.phase: Phase = "out"
        self.in_use = False
        self.closed_at = -1  # how often the ranks had met when it was closed
        self.stale = False  # masters have changed unseen, so that the image must be cast anew
        self.last_use = 0
        self._memory, self._start, self._offset = memory, start, offset
        self._bytes = memory.tensor(start, (nbytes,), torch.uint8)
        self.room = round_up(nbytes, HUGE_PAGE)  # of addresses; what is dropped and moved
        self._ticket = Ticket()
        self._drop_landings = drop_landings
        self._versions = [part.version() for part in parts]

    def begin(self, donor: PagedUnit | None = None) -> None:
        """Start reading, into the pages of ``donor`` if there is one: a retired unit with as much room."""
        if self.phase == "out":
            self.refresh()
            if donor is not None and donor is not self:
                assert donor.phase == "out" and donor.room == self.room, (donor.name, self.name)
                if not self._memory.move(donor._start, self._start, self.room):
                    donor.clear()
            self._ticket = self.swap.read(self._offset, self._bytes)
            self.phase = "coming"

    def finish(self) -> None:
        """Return when the bytes are in their homes."""
        self.begin()
        if self.phase == "coming":
            try:
                self._ticket.wait()
            except BaseException:  # the next use reads again
                self.phase = "out"
                self.clear()
                raise
            landings = [(part.landing, part.image) for part in self.parts if part.landing is not None]
            with torch.no_grad():
                for landing, image in landings:
                    landing.copy_(image)
            if landings:
                self.clear()
            self.phase = "in"

    def retire(self) -> bool:
        """Its bytes are not wanted any more; whether it leaves pages behind."""
        if self.phase == "coming":
            self._ticket.settle()
        leaves = self.phase != "out" and self._drop_landings is None
        if self.phase != "out":
            if self._drop_landings is not None:
                self.clear()
                self._drop_landings()
            self.phase = "out"
        return leaves

    def clear(self) -> None:
        """Give the image's pages back."""
        self._memory.drop(self._start, self.room)

    def refresh(self) -> None:
        """Cast masters that somebody has written to into the image's place in the file."""
        stale, self.stale = self.stale, False
        for i, part in enumerate(self.parts):
            if part.shard is None or not (stale or part.version() != self._versions[i]):
                continue
            with torch.no_grad():
                part.image.copy_(part.shard)
            self.swap.write(part.offset, part.image).wait()
            self._versions[i] = part.version()
            if (place := self.swap.locate(part.shard)) is not None:
                self.swap.trim(place, part.shard.nbytes)


class Pager:
    """Decides when each unit's bytes are in memory.

    ``meet(name)``: called when a unit is about to be used, on every rank; returns once all ranks have their
    rows in its homes (shared homes), None where homes are this rank's own.
    """

    def __init__(
        self, units: Iterable[PagedUnit], limit: int, meet: Callable[[str], None] | None = None
    ) -> None:
        self.units = {unit.name: unit for unit in units}
        self.limit = max(2, limit)
        self._retired: list[PagedUnit] = []
        self.copies_are_kept = False  # whether updates write compute copies as well as masters
        self._meet = meet
        self._clock = self._num_meets = 0
        self._order: dict[tuple[str, str], str] = {}
        self._past = ("", "")

    def read_ahead(self, name: str) -> None:
        """Start reading a unit that is likely to be next, if there is room; a hint."""
        unit = self.units[name]
        if unit.phase == "out" and self._make_room(self.limit - 2):
            self._begin(unit)
            self._used(unit)

    def open(self, name: str) -> None:
        """Return when the unit's homes hold its parameters."""
        unit = self.units[name]
        unit.in_use = True
        self._make_room(self.limit - 1)
        try:
            self._begin(unit)
            unit.finish()
        except BaseException:
            unit.in_use = False
            raise
        self._used(unit)
        if self._meet is not None:
            self._meet(name)
        self._num_meets += 1
        self._order[self._past] = name
        self._past = (self._past[1], name)
        self._look_ahead()

    def close(self, name: str) -> None:
        """The unit's modules hold the shards again."""
        unit = self.units[name]
        unit.in_use, unit.closed_at = False, self._num_meets
        self._used(unit)

    def forget(self, names: Iterable[str] | None = None) -> None:
        """The parameters of these units (default: all) have changed in the file."""
        for name in self.units if names is None else names:
            if (unit := self.units.get(name)) is not None:
                unit.stale = not self.copies_are_kept
                if not unit.in_use:
                    self._retire(unit)

    def end_pass(self) -> None:
        """What comes next begins anew: nothing is read ahead across this point."""
        self._order[self._past] = ""
        self._past = ("", "")

    def close_all(self) -> None:
        """Drop everything."""
        for unit in self.units.values():
            unit.in_use = False
            unit.retire()
            unit.clear()
        self._retired.clear()

    def _begin(self, unit: PagedUnit) -> None:
        if unit.phase != "out":
            return
        if unit in self._retired:
            donor = unit
        else:
            donor = next((one for one in self._retired if one.room == unit.room), None)
        if donor is not None:
            self._retired.remove(donor)
        unit.begin(donor)
        present = sum(one.phase != "out" for one in self.units.values())
        while self._retired and present + len(self._retired) > self.limit:
            self._retired.pop(0).clear()

    def _retire(self, unit: PagedUnit) -> None:
        if unit.retire():
            self._retired.append(unit)

    def _used(self, unit: PagedUnit) -> None:
        self._clock += 1
        unit.last_use = self._clock

    def _make_room(self, spare: int) -> bool:
        """Drop units that are not in use until ``spare`` of them are left; False if that cannot be.

        A shared home may go when all ranks have met once more: they are then done with it.
        """
        idle = [unit for unit in self.units.values() if unit.phase != "out" and not unit.in_use]
        excess = len(idle) - max(spare, 0)
        free = [unit for unit in idle if self._meet is None or unit.closed_at < self._num_meets]
        for unit in sorted(free, key=lambda unit: unit.last_use)[: max(0, excess)]:
            self._retire(unit)
        return spare >= 0 and len(free) >= excess

    def _look_ahead(self) -> None:
        """Follow the learnt order while there is room."""
        past = self._past
        for _ in range(max(1, (self.limit - 1) // 2)):
            name = self._order.get(past, "")
            if not name:
                return
            self.read_ahead(name)
            past = (past[1], name)
