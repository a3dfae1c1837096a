"""Logical matrices that are cut over ranks, brought whole to one owner each, and their results taken back.

The picture, for the matrices of one process group of n ranks:

    piece     what a rank holds of a matrix: its rows (``Shard``), or a full copy (a replicated parameter)
    owner     the one rank that sees the matrix whole and computes on it
    round     as many matrices as fit a buffer, one for each rank at least; every rank owns about the same work of it

    phase 1   all-to-all: every rank sends each owner its pieces of the owner's matrices
    phase 2   the owner joins the pieces and computes, once
    phase 3   all-to-all: every owner sends each rank the rank's pieces of the results

So the work is done once and not n times, every rank receives bits from the same computation, and the buffers
are a round's share and not the model. A replicated matrix needs no phase 1: the owner has it all.

The plan (rounds, owners) is a function of shapes and layouts, hence the same on every rank. On gloo an
all-to-all is three times as fast as its gather or reduce-scatter.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from thalweg.optim.algorithms.newton_schulz import orthogonalize_cost
from thalweg.optim.dtensor_local import get_sharded_axes, is_chunk_sharded, sharded_dim
from thalweg.parallel_dims import control_group

MAX_ROUND_ELEMENTS = 2**24  # or one of the largest matrices for each rank


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


def get_matrix_sharding(
    param: Tensor, replicate_group: dist.ProcessGroup | None
) -> tuple[dist.ProcessGroup | None, MatrixSharding] | None:
    """Return where ``param`` lies: its group (None: whole on this rank, and nobody to share with) and its cut.

    Plain tensors are copies within ``replicate_group`` if one is given.  None for layouts beyond one chunked axis;
    those are gathered by ``DTensor`` itself, on every rank.
    """
    sharded_axes = get_sharded_axes(param)
    placements: Sequence[Placement] = getattr(param, "placements", ())
    if len(sharded_axes) > 1 or not all(sharded_dim(p) is None or is_chunk_sharded(p) for p in placements):
        return None
    group, dim = sharded_axes[0] if sharded_axes else (None if isinstance(param, DTensor) else replicate_group, None)
    return group, MatrixSharding(param.shape, dim, 1 if group is None else dist.get_world_size(group))


def plan_rounds(shapes: list[torch.Size], world_size: int, capacity: int | None = None) -> list[dict[int, int]]:
    """Cut the matrices into rounds of at most ``capacity`` elements (or one matrix) and give each an owner.

    By default a round has room for a matrix of the largest kind on each rank: none waits for another's.
    A round: the owner's rank by the matrix's index.  Largest first, each to the rank with the least work so far in
    its round (then in all): the greedy rule of longest processing time. Deterministic.
    """
    cost = [orthogonalize_cost(shape[0], shape[1:].numel()) for shape in shapes]
    capacity = capacity or max(MAX_ROUND_ELEMENTS, world_size * max(shape.numel() for shape in shapes))
    rounds: list[dict[int, int]] = []
    load, total, elements_left = [0] * world_size, [0] * world_size, 0
    for i in sorted(range(len(shapes)), key=lambda i: (-cost[i], i)):
        if not rounds or shapes[i].numel() > elements_left:
            rounds.append({})
            load, elements_left = [0] * world_size, capacity
        owner = min(range(world_size), key=lambda rank: (load[rank], total[rank], rank))
        rounds[-1][i] = owner
        load[owner] += cost[i]
        total[owner] += cost[i]
        elements_left -= shapes[i].numel()
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
    my_rank, ranks = dist.get_rank(group), range(world_size)
    for exchange_round in plan_rounds([sharding.shape for sharding in shardings], world_size):
        by_owner: list[list[int]] = [[] for _ in ranks]
        for i, owner in exchange_round.items():
            by_owner[owner].append(i)
        mine = by_owner[my_rank]
        # Phase 1: the whole matrices that this rank owns.
        matrices = {i: get_shard(i) for i in mine if shardings[i].dim is None}
        outgoing = [
            [get_shard(i).reshape(-1).to(dtype) for i in indices if shardings[i].dim is not None]
            for indices in by_owner
        ]
        sharded = [i for i in mine if shardings[i].dim is not None]
        sizes = [[shardings[i].shard_numel(rank) for i in sharded] for rank in ranks]
        received = _all_to_all(outgoing, sizes, group, dtype, device)
        for k, i in enumerate(sharded):
            matrices[i] = shardings[i].unshard([received[rank][k] for rank in ranks])
        del outgoing, received  # not beside the computation
        # Phase 2.
        results = [shardings[i].shard(compute(i, matrices.pop(i))) for i in mine]
        # Phase 3: this rank's pieces of all results of the round.
        outgoing = [[pieces[rank].to(dtype) for pieces in results] for rank in ranks]
        sizes = [[shardings[i].shard_numel(my_rank) for i in indices] for indices in by_owner]
        received = _all_to_all(outgoing, sizes, group, dtype, device)
        for indices, pieces in zip(by_owner, received, strict=True):
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
    dist.all_to_all_single(received, sent, counts, send_counts, group=control_group(group, sent.device))
    return [
        list(received_part.split(list(pieces)))
        for received_part, pieces in zip(received.split(counts), sizes, strict=True)
    ]
