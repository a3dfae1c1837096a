"""Where parameters rest between uses: the layout of the swap file, and the stores over it.

One file for the parameters of a rank, unit by unit::

    | image of unit 0: parameter 0 | parameter 1 | ... | masters of unit 0 | image of unit 1 | ...

The *image* is what the forward pass needs, this rank's rows in the compute dtype, and is read in one go into
a memory of the same layout.  Where master and compute dtype agree the master *is* the parameter's place in
the image, else it lies behind it.  Each parameter begins at a page, so that all transfers are direct.

Units that ``resident`` elements hold stay in memory for good: the root first, which is in use throughout,
then units from the model's end, whose backward pass follows upon their forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

import torch
from torch import Tensor

from thalweg.comm import Arena
from thalweg.config import Config
from thalweg.store import PagedMemory, Ring, SwapFile
from thalweg.store.paged import HUGE_PAGE
from thalweg.store.regions import round_up
from thalweg.zero.homes import Placement, Slot, Store, shared_home
from thalweg.zero.paging import PagedUnit, Pager, Part

CHUNK_BYTES = 16 << 20
# Addresses for what an optimiser may want to add.
CAPACITY_TO_COME = 1 << 40


@dataclass(frozen=True)
class Offload:
    """The parameters' tier.

    ``folder``: where the swap file goes; ``units_in_memory``: units that may be in memory at once beside the
    root, which is in use throughout (at least 2); ``resident``: elements of this rank's shards that never
    leave memory; ``pin``: page-lock what a GPU copies from; ``states``: where the optimiser's state is (of
    ``ratio`` of the elements), which takes the masters along (below ``state_folder`` on NVMe).
    """

    device: Literal["none", "cpu", "nvme"] = "none"
    folder: str = "."
    units_in_memory: int = 5
    resident: int = 0
    pin: bool = True
    states: Literal["none", "cpu", "nvme"] = "none"
    state_folder: str = "."
    ratio: float = 1.0

    def on_host(self, device: torch.device) -> bool:
        """Whether shards lie in host memory and are copied to ``device`` as they are gathered."""
        return device.type != "cpu" and (self.device != "none" or self.states != "none")

    @property
    def pages(self) -> bool:
        """Whether units come from a swap file."""
        return self.device == "nvme"

    def notes(self, device: torch.device) -> dict[str, str]:
        """What the tiers come to on ``device``, where a user may think of something else."""
        found = {}
        if device.type == "cpu" and self.device == "cpu":
            found["offload_param.device"] = (
                "no effect: the parameters of a rank that computes on the CPU are in host memory already; "
                "nvme takes them out of it"
            )
        if device.type == "cpu" and self.states == "cpu":
            found["offload_optimizer.device"] = (
                "state is in host memory already; updates run within the backward pass where they may, so "
                "that the gradients of all units never exist at once"
            )
        if self.states == "cpu" and self.ratio < 1:
            found["offload_optimizer.ratio"] = (
                "no effect: all of the state is on the host; on nvme the rest of it stays in memory"
            )
        return found


def offload_of(config: Config) -> Offload:
    """The tier that a config asks for."""
    section = config.zero_optimization.offload_param
    return Offload(
        device=section.device,
        folder=section.nvme_path or "",
        units_in_memory=section.buffer_count,
        resident=section.max_in_cpu,
        pin=section.pin_memory,
        states=config.zero_optimization.offload_optimizer.device,
        state_folder=config.zero_optimization.offload_optimizer.nvme_path or "",
        ratio=config.zero_optimization.offload_optimizer.ratio,
    )


def memory_is_short(config: Config) -> bool:
    """Whether the user would rather wait than use memory: something lies on a disk."""
    zero = config.zero_optimization
    return "nvme" in (zero.offload_param.device, zero.offload_optimizer.device)


@dataclass
class Paging:
    """What a model's paging consists of: the swap file, the pager, and the stores by parameter."""

    swap: SwapFile
    pager: Pager
    stores: dict[str, PagedStore] = field(default_factory=dict)

    def close(self) -> None:
        """Give memory and disk back."""
        self.pager.close_all()
        self.swap.close()


class PagedStore(Store):
    """A store whose shard is a view of the swap file."""

    def __init__(
        self,
        slot: Slot,
        rank: int,
        shard: Tensor,
        home: Tensor | None,
        copy: Tensor | None,
        write: Callable[[Tensor], None],
        image: Tensor,
    ) -> None:
        super().__init__(slot, rank, shard, home)
        self.copy = copy  # the compute copy in the file, where that is not the shard itself
        self.image = image  # this rank's rows as they are read
        self._write = write

    def fill(self, full: Tensor) -> None:
        """Set this rank's rows from the full value, past the page cache."""
        self._write(self.own_rows(full))


def choose_paged(units: dict[str, list[Slot]], offload: Offload, keep: Iterable[str] = ()) -> list[str]:
    """Names of the units to page, in order; those in ``keep`` and what ``resident`` has room for are not."""
    budget, names = offload.resident, [name for name in units if name not in set(keep)]
    favoured = [name for name in names if name == ""] + [name for name in reversed(names) if name != ""]
    for name in favoured:
        size = sum(prod(slot.padded_shape) for slot in units[name])
        if size > budget:
            break
        budget -= size
        names.remove(name)
    return names


def page_units(
    slots: dict[str, Slot],
    units: Iterable[str],
    offload: Offload,
    fixed: Sequence[str],
    rank: int,
    placement: Placement,
    arena: Arena | None,
) -> Paging | None:
    """The paging of the units that do not stay in memory, or None; those in ``fixed`` always do."""
    if not offload.pages:
        return None
    names = [*fixed, *units]
    members: dict[str, list[Slot]] = {}
    for name, slot in slots.items():
        unit = next((key for key in names if name.startswith(f"{key}.")), "")
        members.setdefault(unit, []).append(slot)
    paged = choose_paged(members, offload, fixed)
    if not paged:
        return None
    return build_paging(members, paged, offload, rank=rank, placement=placement, arena=arena)


def build_paging(
    units: dict[str, list[Slot]],
    paged: Sequence[str],
    offload: Offload,
    *,
    rank: int,
    placement: Placement,
    arena: Arena | None,
) -> Paging:
    """Make the swap file and the stores of the ``paged`` units.

    Raises:
        ValueError: the folder cannot be used, or its disk is too small.
    """
    plans = {name: _Plan(units[name]) for name in paged}
    needed = sum(plan.file_bytes for plan in plans.values())
    swap = SwapFile(offload.folder, needed, capacity=needed + CAPACITY_TO_COME)
    # Units begin on huge pages, so that these stay whole as they go from one unit to another.
    room = sum(round_up(plan.image_bytes, HUGE_PAGE) for plan in plans.values())
    memory = PagedMemory(room, align=HUGE_PAGE)
    writer = Writer(swap)
    stores: dict[str, PagedStore] = {}
    found = []
    for name, plan in plans.items():
        base, start = swap.region(plan.file_bytes), memory.region(plan.image_bytes)
        parts, rows = [], []
        for slot in plan.slots:
            at = plan.at[slot.name]
            image = memory.tensor(start + at, slot.padded_shape, slot.compute)
            home, landing = None, None
            if placement == "private":
                # A tensor of its own over the image's bytes: refreshing those is no change to a parameter.
                home = memory.tensor(start + at, slot.shape, slot.compute)
            elif placement == "shared":
                assert arena is not None
                where = arena.reserve(slot.home_bytes)
                home, landing = shared_home(slot, rank, arena, where)
                size = landing.nbytes
                rows.append((where + rank * size, size))
            master = base + plan.masters.get(slot.name, at)
            shard = swap.view(master, slot.padded_shape, slot.master)
            is_image = slot.name not in plan.masters
            copy = None if is_image else swap.view(base + at, slot.padded_shape, slot.compute)
            write = writer.to(shard, master, base + at, image)
            store = stores[slot.name] = PagedStore(slot, rank, shard, home, copy, write, image)
            parts.append(Part(image, landing, None if is_image else shard, base + at, store.version))
        drop = _dropper(arena, rows) if arena is not None and rows else None
        found.append(
            PagedUnit(
                name,
                swap,
                memory,
                offset=base,
                start=start,
                nbytes=plan.image_bytes,
                parts=parts,
                drop_landings=drop,
            )
        )
    meet = arena.meet if arena is not None and placement == "shared" else None
    return Paging(swap, Pager(found, offload.units_in_memory, meet), stores)


class _Plan:
    """Offsets of one unit's parameters in its image, and of masters behind it."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = slots
        self.at: dict[str, int] = {}
        self.masters: dict[str, int] = {}
        end = 0
        for slot in slots:
            self.at[slot.name] = end
            end += round_up(prod(slot.padded_shape) * slot.compute.itemsize)
        self.image_bytes = end
        for slot in slots:
            if slot.master != slot.compute:
                self.masters[slot.name] = end
                end += round_up(prod(slot.padded_shape) * slot.master.itemsize)
        self.file_bytes = end


class Writer:
    """Writes values into a swap file through two buffers, so that nothing is mapped or cached."""

    def __init__(self, swap: SwapFile) -> None:
        self._swap, self._ring = swap, Ring(2, CHUNK_BYTES)

    def to(self, shard: Tensor, master: int, compute: int, image: Tensor) -> Callable[[Tensor], None]:
        """A function that stores rows at ``master`` in the file and, cast, at ``compute``."""
        targets = [(master, shard.dtype)]
        if master != compute:
            targets.append((compute, image.dtype))

        def write(rows: Tensor) -> None:
            for offset, dtype in targets:
                self._write(rows.reshape(-1), offset, dtype)
            self._ring.drop()

        return write

    @torch.no_grad()
    def _write(self, flat: Tensor, offset: int, dtype: torch.dtype) -> None:
        step = CHUNK_BYTES // dtype.itemsize
        tickets = []
        for turn, first in enumerate(range(0, flat.numel(), step)):
            piece = flat[first : first + step]
            if turn >= len(self._ring):
                tickets[turn - len(self._ring)].wait()
            buffer = self._ring[turn].view(dtype)[: piece.numel()]
            buffer.copy_(piece)
            tickets.append(self._swap.write(offset + first * dtype.itemsize, buffer))
        for ticket in tickets:
            ticket.wait()


def _dropper(arena: Arena, rows: Sequence[tuple[int, int]]) -> Callable[[], None]:
    def drop() -> None:
        for offset, size in rows:
            arena.drop(offset, size)

    return drop
