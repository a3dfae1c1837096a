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

from thalweg.optim.algorithms.newton_schulz import orthogonalize_cost
from thalweg.optim.dtensor_local import get_sharded_axes, is_chunk_sharded, sharded_dim

MAX_ROUND_ELEMENTS = 2**24


@dataclass(frozen=True)
class MatrixSharding:
    """How a matrix lies over a group of ``world_size`` ranks: in chunks along ``dim``, or as copies (None)."""

    shape: torch.Size
    dim: int | None
    world_size: int

    def shard_shape(self, rank: int) -> list[int]:
        """Return the shape of ``rank``'s piece: chunks of equal size, the last ones shorter or empty."""
        shape = list(self.shape)
        if self.dim is not None:
            size = shape[self.dim]
            chunk = -(-size // self.world_size)
            shape[self.dim] = max(0, min(chunk, size - rank * chunk))
        return shape

    def shard_numel(self, rank: int) -> int:
        """Return the number of elements of ``rank``'s piece."""
        return torch.Size(self.shard_shape(rank)).numel()

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the whole of it from the pieces of all ranks, flat, in rank order."""
        assert self.dim is not None
        shaped = [piece.view(self.shard_shape(rank)) for rank, piece in enumerate(shards)]
        return torch.cat(shaped, dim=self.dim)

    def shard(self, matrix: Tensor) -> list[Tensor]:
        """Return the pieces of all ranks, flat, in rank order."""
        if self.dim is None:
            return [matrix.reshape(-1)] * self.world_size
        sizes = [self.shard_shape(rank)[self.dim] for rank in range(self.world_size)]
        return [piece.reshape(-1) for piece in matrix.split(sizes, dim=self.dim)]


@dataclass(frozen=True)
class MatrixPlacement:
    """Where a matrix lies: its group (None: whole on this rank, and nobody to share with) and its cut.

    ``needs_gather`` marks layouts beyond one chunked axis; those are gathered by ``DTensor`` itself, on every
    rank.
    """

    group: dist.ProcessGroup | None
    sharding: MatrixSharding
    needs_gather: bool = False


def get_matrix_placement(param: Tensor, replicate_group: dist.ProcessGroup | None) -> MatrixPlacement:
    """Return where ``param`` lies; plain tensors are copies within ``replicate_group`` if one is given."""
    sharded_axes = get_sharded_axes(param)
    is_supported = all(
        sharded_dim(placement) is None or is_chunk_sharded(placement) for placement in _placements(param)
    )
    if len(sharded_axes) > 1 or not is_supported:
        return MatrixPlacement(None, MatrixSharding(param.shape, None, 1), needs_gather=True)
    group, dim = sharded_axes[0] if sharded_axes else (None if isinstance(param, DTensor) else replicate_group, None)
    world_size = 1 if group is None else dist.get_world_size(group)
    return MatrixPlacement(group, MatrixSharding(param.shape, dim, world_size))


def _placements(param: Tensor) -> tuple[Placement, ...]:
    return param.placements if isinstance(param, DTensor) else ()


@dataclass(frozen=True)
class ExchangeRound:
    """The matrices (by index into the caller's list) of one exchange, each with its owner's rank."""

    indices: tuple[int, ...]
    owners: tuple[int, ...]


def plan_rounds(
    shapes: Sequence[torch.Size], world_size: int, capacity: int = MAX_ROUND_ELEMENTS
) -> list[ExchangeRound]:
    """Cut the matrices into rounds of at most ``capacity`` elements (or one matrix) and give each an owner.

    Largest first, each to the rank with the least work so far in its round (then in all): the greedy rule of
    longest processing time. Deterministic.
    """
    cost = [orthogonalize_cost(shape[0], shape[1:].numel()) for shape in shapes]
    order = sorted(range(len(shapes)), key=lambda i: (-cost[i], i))
    batches: list[list[int]] = []
    elements_left = 0
    for i in order:
        if not batches or shapes[i].numel() > elements_left:
            batches.append([])
            elements_left = capacity
        batches[-1].append(i)
        elements_left -= shapes[i].numel()
    total = [0] * world_size
    rounds = []
    for batch in batches:
        load = [0] * world_size
        owners = []
        for i in batch:
            owner = min(range(world_size), key=lambda rank: (load[rank], total[rank], rank))
            load[owner] += cost[i]
            total[owner] += cost[i]
            owners.append(owner)
        rounds.append(ExchangeRound(tuple(batch), tuple(owners)))
    return rounds


def compute_on_owners(
    shardings: Sequence[MatrixSharding],
    group: dist.ProcessGroup | None,
    get_shard: Callable[[int], Tensor],
    compute: Callable[[int, Tensor], Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[int, Tensor]]:
    """Yield (i, this rank's piece of ``compute(i, matrix i)``) for every matrix, in the order of the plan.

    ``get_shard(i)`` is this rank's piece, asked for once; ``compute`` maps a whole matrix (of its logical
    shape) to one of the same shape and runs on the owner only. Pieces travel in ``dtype``. All ranks of
    ``group`` must iterate to the end, over the same ``shardings``.
    """
    world_size = 1 if group is None else dist.get_world_size(group)
    if group is None or world_size == 1:
        for i in range(len(shardings)):
            yield i, compute(i, get_shard(i).view(shardings[i].shape))
        return
    my_rank = dist.get_rank(group)
    for exchange_round in plan_rounds([sharding.shape for sharding in shardings], world_size):
        my_indices = [
            i for i, owner in zip(exchange_round.indices, exchange_round.owners, strict=True) if owner == my_rank
        ]
        matrices = _gather_to_owners(exchange_round, my_indices, shardings, group, my_rank, get_shard, dtype, device)
        results = {i: compute(i, matrices.pop(i)) for i in my_indices}
        yield from _scatter_results(exchange_round, results, shardings, group, my_rank, dtype, device)


def _gather_to_owners(
    exchange_round: ExchangeRound,
    my_indices: Sequence[int],
    shardings: Sequence[MatrixSharding],
    group: dist.ProcessGroup,
    my_rank: int,
    get_shard: Callable[[int], Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[int, Tensor]:
    """Phase 1: the whole matrices that this rank owns."""
    world_size = dist.get_world_size(group)
    matrices: dict[int, Tensor] = {}
    outgoing: list[list[Tensor]] = [[] for _ in range(world_size)]
    for i, owner in zip(exchange_round.indices, exchange_round.owners, strict=True):
        if shardings[i].dim is None:
            if owner == my_rank:
                matrices[i] = get_shard(i)
        else:
            outgoing[owner].append(get_shard(i).reshape(-1).to(dtype))
    my_sharded_indices = [i for i in my_indices if shardings[i].dim is not None]
    sizes = [[shardings[i].shard_numel(rank) for i in my_sharded_indices] for rank in range(world_size)]
    received = _all_to_all(outgoing, sizes, group, dtype, device)
    for k, i in enumerate(my_sharded_indices):
        matrices[i] = shardings[i].unshard([received[rank][k] for rank in range(world_size)])
    return matrices


def _scatter_results(
    exchange_round: ExchangeRound,
    results: dict[int, Tensor],
    shardings: Sequence[MatrixSharding],
    group: dist.ProcessGroup,
    my_rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[int, Tensor]]:
    """Phase 3: this rank's pieces of all results of the round."""
    world_size = dist.get_world_size(group)
    outgoing: list[list[Tensor]] = [[] for _ in range(world_size)]
    indices_by_owner: list[list[int]] = [[] for _ in range(world_size)]
    for i, owner in zip(exchange_round.indices, exchange_round.owners, strict=True):
        indices_by_owner[owner].append(i)
        if owner == my_rank:
            for rank, piece in enumerate(shardings[i].shard(results[i])):
                outgoing[rank].append(piece.to(dtype))
    sizes = [[shardings[i].shard_numel(my_rank) for i in indices] for indices in indices_by_owner]
    received = _all_to_all(outgoing, sizes, group, dtype, device)
    for indices, pieces in zip(indices_by_owner, received, strict=True):
        for i, piece in zip(indices, pieces, strict=True):
            yield i, piece.view(shardings[i].shard_shape(my_rank))


def _all_to_all(
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
        list(received_part.split(list(pieces)))
        for received_part, pieces in zip(received.split(counts), sizes, strict=True)
    ]
