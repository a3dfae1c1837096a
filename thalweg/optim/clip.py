"""The norm of all gradients, once and the same everywhere, and clipping by it.

    pieces     the local gradient tensors of this rank
    buckets    pieces with the same shard groups (see ``shard_reduce.py``): one partial power sum each, in fp64
    total      the buckets completed over their groups and added up: the same bits on every rank

The engine decides by this norm whether a step is skipped, so two things must hold. A gradient that is not
finite anywhere makes the norm non-finite everywhere (a sum of squares keeps inf and NaN; for the maximum
norm a NaN is turned into inf first, since a maximum may lose it). And a finite gradient never does: squares
of fp32 values above 1.8e19 overflow fp32, so a sum that comes out as inf is done again in fp64 before anyone
believes it.

Accuracy: torch's fp32 norm on a CPU adds up in fp32 along the whole tensor and is off by 6e-5 for 3 M
elements and by 2.6e-3 for 38 M. Taken over rows of 4,096 and added up in fp64 it takes the same time and is
off by 1e-9, so that a clipped run does not depend on how its gradients are cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from thalweg.optim import foreach
from thalweg.optim.dtensor_local import local_grad, to_local
from thalweg.optim.norms import NormInput, PartialNorm, RowNorms, power_sum
from thalweg.optim.shard_reduce import (
    AllReduce,
    ShardGroups,
    all_reduce_rows,
    default_all_reduce,
    get_shard_groups,
)


@torch.no_grad()
def global_grad_norm(
    params: Iterable[Tensor],
    norm_type: float = 2.0,
    *,
    extra_groups: Sequence[dist.ProcessGroup] = (),
    replicate_group: dist.ProcessGroup | None = None,
    all_reduce: AllReduce = default_all_reduce,
    row_norms_fn: Callable[[Tensor], RowNorms] | None = None,
    partial_norms: Mapping[Tensor, PartialNorm] | None = None,
) -> Tensor:
    """Return the norm over all gradients of ``params`` as a 0-dim fp64 tensor, bit-equal on all ranks.

    ``params`` may mix ``DTensor`` s of any mesh and placement with plain, replicated tensors; those without
    a gradient count as zero. All ranks must pass the same parameters in the same order, also where some of
    their gradients are None. ``norm_type`` is a positive number or ``inf``.

    ``extra_groups``: groups whose ranks hold *different* parameters (pipeline stages); the result is then
    over all of them. ``replicate_group``: the ranks that hold the plain parameters as copies; if given, a
    non-finite value in any one copy is noticed by all, and rank 0's copy decides the value.
    ``all_reduce(tensor, op, group)`` is the collective used: one call for each group that any parameter is
    sharded over. ``row_norms_fn(piece)`` replaces :func:`.norms.compute_row_norms` where parts of a norm are
    known already.
    ``partial_norms``: parameters whose gradients have left, with what they add to a 2-norm.

    The result is inf or NaN exactly if some gradient is (fp64 gradients: also if the norm exceeds 1e154).
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type must be a positive number or inf, not {norm_type!r}")
    params = list(params)
    buckets: dict[tuple[ShardGroups, bool], list[NormInput]] = {}
    partial_norms = partial_norms or {}
    for param, shard_groups in zip(params, get_shard_groups(params), strict=True):
        is_replicated = replicate_group is not None and not isinstance(param, DTensor)
        pieces = buckets.setdefault((shard_groups, is_replicated), [])
        if param in partial_norms:
            pieces.append(partial_norms[param])
        elif param.grad is not None:
            pieces.append(local_grad(param))
    device = to_local(params[0]).device if params else torch.device("cpu")
    sums, reduce_groups = [], []
    for (shard_groups, is_replicated), pieces in buckets.items():
        partial = power_sum(pieces, norm_type, device, row_norms_fn)
        if is_replicated and replicate_group is not None:
            partial, shard_groups = _count_one_replica(partial, replicate_group), (replicate_group,)
        sums.append(partial)
        reduce_groups.append(shard_groups)
    op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    rows = torch.stack(sums) if sums else torch.zeros(1, dtype=torch.float64, device=device)
    rows = all_reduce_rows(rows, reduce_groups, op, all_reduce)
    total = rows.max() if math.isinf(norm_type) else rows.sum()
    for group in extra_groups:
        all_reduce(total, op, group)
    return total if math.isinf(norm_type) else total ** (1.0 / norm_type)


def _count_one_replica(total: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Let rank 0 of ``group`` contribute its value, the others only the fact that theirs is not finite."""
    if dist.get_rank(group) == 0:
        return total
    return torch.where(total.isfinite(), torch.zeros_like(total), total)


def clip_factor(norm: float, max_norm: float) -> float:
    """``max_norm / (norm + 1e-6)`` if that is below 1, else 1: the scale of gradients of that norm."""
    return min(1.0, max_norm / (norm + 1e-6))


@torch.no_grad()
def clip_grads_(params: Iterable[Tensor], max_norm: float, norm: Tensor | float) -> float:
    """Scale all gradients in place by ``max_norm / (norm + 1e-6)`` if that is below 1; returns the factor
    used.

    The rule of ``torch.nn.utils.clip_grad_norm_``, with the norm that :func:`global_grad_norm` gave.
    Gradients are left untouched (and 1.0 returned) where there is nothing to clip. ``max_norm`` must be
    positive.
    """
    if not max_norm > 0:
        raise ValueError(f"gradient_clipping must be a positive norm, not {max_norm!r}; leave it out for no clipping")
    value = float(norm)
    if not math.isfinite(value):
        raise ValueError(f"gradients with a norm of {value} cannot be clipped: skip the step")
    factor = clip_factor(value, max_norm)
    if factor == 1.0:
        return factor
    pieces = [to_local(p.grad) for p in params if p.grad is not None]
    if pieces:
        foreach.mul_(pieces, factor)
    return factor
