"""Sums over the pieces of sharded parameters: a few numbers, one all-reduce for each process group.

*Shard groups* of a parameter: the process groups over which its pieces are spread, one for each axis of its mesh
that shards it. A plain tensor, or a ``DTensor`` replicated everywhere, has none: each rank holds all
of it, and adding up over ranks would count it more than once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard

ShardGroups = tuple[dist.ProcessGroup, ...]
AllReduce = Callable[[Tensor, dist.ReduceOp.RedOpType, dist.ProcessGroup], object]


def default_all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    """The default collective: ``torch.distributed.all_reduce`` in place."""
    dist.all_reduce(tensor, op=op, group=group)


def sharded_dim(placement: Placement) -> int | None:
    """Return the tensor dim that ``placement`` cuts over its mesh axis, or None."""
    not_sharded = placement.is_replicate() or placement.is_partial()
    return None if not_sharded else placement.dim  # pyright: ignore[reportAttributeAccessIssue]


def is_chunk_sharded(placement: Placement) -> bool:
    """Return whether ``placement`` cuts a dim as ``torch.chunk`` does."""
    return type(placement) is Shard or bool(getattr(placement, "chunked", False))


def get_sharded_axes(param: Tensor) -> tuple[tuple[dist.ProcessGroup, int], ...]:
    """Return (process group, tensor dim) for each mesh axis of more than one rank that cuts ``param``."""
    if not isinstance(param, DTensor):
        return ()
    mesh = param.device_mesh
    dims = [(axis, sharded_dim(placement)) for axis, placement in enumerate(param.placements)]
    return tuple((mesh.get_group(axis), dim) for axis, dim in dims if dim is not None and mesh.size(axis) > 1)


def get_shard_groups(params: Iterable[Tensor]) -> list[ShardGroups]:
    """Return the shard groups of each parameter; equal layouts share one look-up."""
    cache: dict[tuple[object, object], ShardGroups] = {}
    shard_groups = []
    for param in params:
        if not isinstance(param, DTensor):
            shard_groups.append(())
            continue
        key = (param.device_mesh, param.placements)
        if key not in cache:
            cache[key] = tuple(group for group, _ in get_sharded_axes(param))
        shard_groups.append(cache[key])
    return shard_groups


def all_reduce_rows(
    rows: Tensor,
    shard_groups: Sequence[ShardGroups],
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    all_reduce: AllReduce = default_all_reduce,
) -> Tensor:
    """Complete each row of partial results over its shard groups.

    ``rows`` is [n, ...], row i belonging to a tensor with ``shard_groups[i]``. All rows of one group travel in one
    all-reduce; a row that has two groups (two axes of a mesh) passes through both. Every rank of a
    group must hold the same shard groups in the same order, which it does if the ranks hold the same parameters.
    """
    groups = list(dict.fromkeys(group for row_groups in shard_groups for group in row_groups))
    for group in groups:
        chosen = [i for i, row_groups in enumerate(shard_groups) if group in row_groups]
        if len(chosen) == len(shard_groups):
            all_reduce(rows, op, group)
            continue
        index = torch.tensor(chosen, device=rows.device)
        group_rows = rows.index_select(0, index)
        all_reduce(group_rows, op, group)
        rows.index_copy_(0, index, group_rows)
    return rows


def all_reduce_tensors_(
    tensors: Sequence[Tensor], shard_groups: Sequence[ShardGroups], all_reduce: AllReduce = default_all_reduce
) -> None:
    """Add up each tensor over its shard groups, in place; shapes may differ, the dtype may not.

    All tensors of one group travel in one all-reduce. Same condition as :func:`all_reduce_rows`.
    """
    for group in dict.fromkeys(group for tensor_groups in shard_groups for group in tensor_groups):
        chosen = [tensor for tensor, its_groups in zip(tensors, shard_groups, strict=True) if group in its_groups]
        flat = torch.cat([tensor.reshape(-1) for tensor in chosen])
        all_reduce(flat, dist.ReduceOp.SUM, group)
        for tensor, total in zip(chosen, flat.split([t.numel() for t in chosen]), strict=True):
            tensor.copy_(total.view_as(tensor))
