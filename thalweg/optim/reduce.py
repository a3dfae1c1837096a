"""Sums over the pieces of sharded parameters: a few numbers, one all-reduce for each process group.

``span`` of a parameter: the process groups over which its pieces are spread, one for each axis of its mesh
that shards it. A plain tensor, or a ``DTensor`` replicated everywhere, has an empty span: each rank holds all
of it, and adding up over ranks would count it more than once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard

Span = tuple[dist.ProcessGroup, ...]
AllReduce = Callable[[Tensor, dist.ReduceOp.RedOpType, dist.ProcessGroup], object]


def plain_all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    """The default collective: ``torch.distributed.all_reduce`` in place."""
    dist.all_reduce(tensor, op=op, group=group)


def cut_dim(placement: Placement) -> int | None:
    """Return the tensor dim that ``placement`` cuts over its mesh axis, or None."""
    whole = placement.is_replicate() or placement.is_partial()
    return None if whole else placement.dim  # pyright: ignore[reportAttributeAccessIssue]


def chunked(placement: Placement) -> bool:
    """Return whether ``placement`` cuts a dim as ``torch.chunk`` does."""
    return type(placement) is Shard or bool(getattr(placement, "chunked", False))


def cuts_of(param: Tensor) -> tuple[tuple[dist.ProcessGroup, int], ...]:
    """Return (process group, tensor dim) for each mesh axis of more than one rank that cuts ``param``."""
    if not isinstance(param, DTensor):
        return ()
    mesh = param.device_mesh
    dims = [(axis, cut_dim(placement)) for axis, placement in enumerate(param.placements)]
    return tuple((mesh.get_group(axis), dim) for axis, dim in dims if dim is not None and mesh.size(axis) > 1)


def spans_of(params: Iterable[Tensor]) -> list[Span]:
    """Return the span of each parameter; equal layouts share one look-up."""
    known: dict[tuple[object, object], Span] = {}
    spans = []
    for param in params:
        if not isinstance(param, DTensor):
            spans.append(())
            continue
        key = (param.device_mesh, param.placements)
        if key not in known:
            known[key] = tuple(group for group, _ in cuts_of(param))
        spans.append(known[key])
    return spans


def reduce_over_spans(
    rows: Tensor,
    spans: Sequence[Span],
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    all_reduce: AllReduce = plain_all_reduce,
) -> Tensor:
    """Complete each row of partial results over the groups of its span.

    ``rows`` is [n, ...], row i belonging to a tensor with ``spans[i]``. All rows of one group travel in one
    all-reduce; a row whose span has two groups (two axes of a mesh) passes through both. Every rank of a
    group must hold the same spans in the same order, which it does if the ranks hold the same parameters.
    """
    groups = list(dict.fromkeys(group for span in spans for group in span))
    for group in groups:
        chosen = [i for i, span in enumerate(spans) if group in span]
        if len(chosen) == len(spans):
            all_reduce(rows, op, group)
            continue
        index = torch.tensor(chosen, device=rows.device)
        part = rows.index_select(0, index)
        all_reduce(part, op, group)
        rows.index_copy_(0, index, part)
    return rows


def reduce_tensors_(
    tensors: Sequence[Tensor], spans: Sequence[Span], all_reduce: AllReduce = plain_all_reduce
) -> None:
    """Add up each tensor over the groups of its span, in place; shapes may differ, the dtype may not.

    All tensors of one group travel in one all-reduce. Same condition as :func:`reduce_over_spans`.
    """
    for group in dict.fromkeys(group for span in spans for group in span):
        chosen = [tensor for tensor, span in zip(tensors, spans, strict=True) if group in span]
        flat = torch.cat([tensor.reshape(-1) for tensor in chosen])
        all_reduce(flat, dist.ReduceOp.SUM, group)
        for tensor, total in zip(chosen, flat.split([t.numel() for t in chosen]), strict=True):
            tensor.copy_(total.view_as(tensor))
