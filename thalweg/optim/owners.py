"""Logical matrices that are cut over ranks, brought whole to one owner each, and their results taken back.

The picture, for the matrices of one process group of n ranks:

    piece     what a rank holds of a matrix: its rows (``Shard``), or a full copy (a replicated parameter)
    owner     the one rank that sees the matrix whole and computes on it
    round     as many matrices as fit a buffer; in each, every rank owns about the same amount of work

    phase 1   all-to-all: every rank sends each owner its pieces of the owner's matrices
    phase 2   the owner joins the pieces and computes, once
    phase 3   all-to-all: every owner sends each rank the rank's pieces of the results

So the work is done once and not n times, every rank receives bits from the same computation, and the buffers
are a round's share and not the model. A replicated matrix needs no phase 1: the owner has it all.

The plan (rounds, owners) is a function of shapes and layouts, hence the same on every rank. On gloo an
all-to-all is three times as fast as its gather or reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from thalweg.optim.newton_schulz import multiply_adds
from thalweg.optim.reduce import chunked, cut_dim, cuts_of

ROUND_ELEMENTS = 2**24


@dataclass(frozen=True)
class Cut:
    """How a matrix lies over a group of ``world`` ranks: in chunks along ``dim``, or as copies (None)."""

    shape: torch.Size
    dim: int | None
    world: int

    def piece_shape(self, rank: int) -> list[int]:
        """Return the shape of ``rank``'s piece: chunks of equal size, the last ones shorter or empty."""
        shape = list(self.shape)
        if self.dim is not None:
            size = shape[self.dim]
            chunk = -(-size // self.world)
            shape[self.dim] = max(0, min(chunk, size - rank * chunk))
        return shape

    def num_elements(self, rank: int) -> int:
        """Return the number of elements of ``rank``'s piece."""
        return torch.Size(self.piece_shape(rank)).numel()

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the whole of it from the pieces of all ranks, flat, in rank order."""
        assert self.dim is not None
        shaped = [piece.view(self.piece_shape(rank)) for rank, piece in enumerate(pieces)]
        return torch.cat(shaped, dim=self.dim)

    def split(self, whole: Tensor) -> list[Tensor]:
        """Return the pieces of all ranks, flat, in rank order."""
        if self.dim is None:
            return [whole.reshape(-1)] * self.world
        sizes = [self.piece_shape(rank)[self.dim] for rank in range(self.world)]
        return [piece.reshape(-1) for piece in whole.split(sizes, dim=self.dim)]


@dataclass(frozen=True)
class Place:
    """Where a matrix lies: its group (None: whole on this rank, and nobody to share with) and its cut.

    ``general`` marks layouts beyond one chunked axis; those are gathered by ``DTensor`` itself, on every
    rank.
    """

    group: dist.ProcessGroup | None
    cut: Cut
    general: bool = False


def place_of(param: Tensor, replicate_group: dist.ProcessGroup | None) -> Place:
    """Return where ``param`` lies; plain tensors are copies within ``replicate_group`` if one is given."""
    cuts = cuts_of(param)
    known = all(cut_dim(placement) is None or chunked(placement) for placement in _placements(param))
    if len(cuts) > 1 or not known:
        return Place(None, Cut(param.shape, None, 1), general=True)
    group, dim = cuts[0] if cuts else (None if isinstance(param, DTensor) else replicate_group, None)
    world = 1 if group is None else dist.get_world_size(group)
    return Place(group, Cut(param.shape, dim, world))


def _placements(param: Tensor) -> tuple[Placement, ...]:
    return param.placements if isinstance(param, DTensor) else ()


@dataclass(frozen=True)
class Round:
    """The matrices (by index into the caller's list) of one exchange, each with its owner's rank."""

    indices: tuple[int, ...]
    owners: tuple[int, ...]


def plan_rounds(shapes: Sequence[torch.Size], world: int, capacity: int = ROUND_ELEMENTS) -> list[Round]:
    """Cut the matrices into rounds of at most ``capacity`` elements (or one matrix) and give each an owner.

    Largest first, each to the rank with the least work so far in its round (then in all): the greedy rule of
    longest processing time. Deterministic.
    """
    cost = [multiply_adds(shape[0], shape[1:].numel()) for shape in shapes]
    order = sorted(range(len(shapes)), key=lambda i: (-cost[i], i))
    batches: list[list[int]] = []
    room = 0
    for i in order:
        if not batches or shapes[i].numel() > room:
            batches.append([])
            room = capacity
        batches[-1].append(i)
        room -= shapes[i].numel()
    total = [0] * world
    rounds = []
    for batch in batches:
        load = [0] * world
        owners = []
        for i in batch:
            owner = min(range(world), key=lambda rank: (load[rank], total[rank], rank))
            load[owner] += cost[i]
            total[owner] += cost[i]
            owners.append(owner)
        rounds.append(Round(tuple(batch), tuple(owners)))
    return rounds


def on_owners(
    cuts: Sequence[Cut],
    group: dist.ProcessGroup | None,
    piece_of: Callable[[int], Tensor],
    compute: Callable[[int, Tensor], Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[int, Tensor]]:
    """Yield (i, this rank's piece of ``compute(i, matrix i)``) for every matrix, in the order of the plan.

    ``piece_of(i)`` is this rank's piece, asked for once; ``compute`` maps a whole matrix (of its logical
    shape) to one of the same shape and runs on the owner only. Pieces travel in ``dtype``. All ranks of
    ``group`` must iterate to the end, over the same ``cuts``.
    """
    world = 1 if group is None else dist.get_world_size(group)
    if group is None or world == 1:
        for i in range(len(cuts)):
            yield i, compute(i, piece_of(i).view(cuts[i].shape))
        return
    me = dist.get_rank(group)
    for plan in plan_rounds([cut.shape for cut in cuts], world):
        mine = [i for i, owner in zip(plan.indices, plan.owners, strict=True) if owner == me]
        wholes = _bring(plan, mine, cuts, group, me, piece_of, dtype, device)
        results = {i: compute(i, wholes.pop(i)) for i in mine}
        yield from _take_back(plan, results, cuts, group, me, dtype, device)


def _bring(
    plan: Round,
    mine: Sequence[int],
    cuts: Sequence[Cut],
    group: dist.ProcessGroup,
    me: int,
    piece_of: Callable[[int], Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[int, Tensor]:
    """Phase 1: the whole matrices that this rank owns."""
    world = dist.get_world_size(group)
    wholes: dict[int, Tensor] = {}
    outgoing: list[list[Tensor]] = [[] for _ in range(world)]
    for i, owner in zip(plan.indices, plan.owners, strict=True):
        if cuts[i].dim is None:
            if owner == me:
                wholes[i] = piece_of(i)
        else:
            outgoing[owner].append(piece_of(i).reshape(-1).to(dtype))
    cut_mine = [i for i in mine if cuts[i].dim is not None]
    sizes = [[cuts[i].num_elements(rank) for i in cut_mine] for rank in range(world)]
    received = _exchange(outgoing, sizes, group, dtype, device)
    for k, i in enumerate(cut_mine):
        wholes[i] = cuts[i].join([received[rank][k] for rank in range(world)])
    return wholes


def _take_back(
    plan: Round,
    results: dict[int, Tensor],
    cuts: Sequence[Cut],
    group: dist.ProcessGroup,
    me: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[int, Tensor]]:
    """Phase 3: this rank's pieces of all results of the round."""
    world = dist.get_world_size(group)
    outgoing: list[list[Tensor]] = [[] for _ in range(world)]
    owned: list[list[int]] = [[] for _ in range(world)]
    for i, owner in zip(plan.indices, plan.owners, strict=True):
        owned[owner].append(i)
        if owner == me:
            for rank, piece in enumerate(cuts[i].split(results[i])):
                outgoing[rank].append(piece.to(dtype))
    sizes = [[cuts[i].num_elements(me) for i in indices] for indices in owned]
    received = _exchange(outgoing, sizes, group, dtype, device)
    for indices, pieces in zip(owned, received, strict=True):
        for i, piece in zip(indices, pieces, strict=True):
            yield i, piece.view(cuts[i].piece_shape(me))


def _exchange(
    outgoing: Sequence[Sequence[Tensor]],
    sizes: Sequence[Sequence[int]],
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    device: torch.device,
) -> list[list[Tensor]]:
    """Send ``outgoing[rank]`` to each rank; returns what each sent here, as ``sizes[rank]`` elements."""
    flat = [piece for pieces in outgoing for piece in pieces]
    sent = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device)
    send_counts = [sum(piece.numel() for piece in pieces) for pieces in outgoing]
    counts = [sum(pieces) for pieces in sizes]
    received = torch.empty(sum(counts), dtype=dtype, device=device)
    dist.all_to_all_single(received, sent, counts, send_counts, group=group)
    return [
        list(part.split(list(pieces))) for part, pieces in zip(received.split(counts), sizes, strict=True)
    ]
