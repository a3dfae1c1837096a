"""Adafactor on shards: second moments as a row and a column factor (Shazeer and Stern, 2018).

The rule is that of ``torch.optim.Adafactor``. It is not elementwise: rows and columns are averaged, and the
norms of the parameter and of its update are taken. For a parameter cut along dim d, a mean along d and every
norm need the other ranks; everything else is local. Phases of a step, for all parameters at once:

    1  sums of squares of rows and columns, and |p|^2     local, then one all-reduce for each process group
    2  the factors; the mean of the row factor            local, then one all-reduce
    3  the update, and |u|^2                              local, then one all-reduce
    4  p -= alpha u                                       local

State: ``step`` and, of two dims or more, ``row_var`` [..., rows, 1] and ``col_var`` [..., 1, cols], logical
tensors that are cut as the parameter is and whole where the cut dim was averaged away; else ``variance``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate

from thalweg.optim.algorithms.lion import evaluate_closure
from thalweg.optim.dtensor_local import (
    AllReduce,
    Fp32StateMixin,
    ShardGroups,
    all_reduce_tensors_,
    default_all_reduce,
    default_state_dtype,
    get_sharded_axes,
    sharded_dim,
    to_local,
    working_copies,
    zeros_state_like,
)
from thalweg.optim.norms import square_sums


@dataclass
class _AdafactorParam:
    """One parameter in a step: its group, its local piece and gradient, its state, and its cut dims."""

    group: dict[str, Any]
    param: Tensor
    work: Tensor
    grad: Tensor
    state: dict[str, Any]
    update: Tensor

    def shard_groups(self, dim: int | None = None) -> ShardGroups:
        """Return the groups over which a sum along ``dim`` (None: over everything) has to be completed."""
        return tuple(
            group
            for group, sharded_dim in get_sharded_axes(self.param)
            if dim is None or sharded_dim == dim % self.param.ndim
        )

    @property
    def factored(self) -> bool:
        return self.param.ndim > 1

    @property
    def decay(self) -> float:
        """Return 1 - beta2 of this step."""
        return float(self.state["step"]) ** self.group["beta2_decay"]

    @property
    def eps1(self) -> float:
        eps1 = self.group["eps"][0]
        return torch.finfo(self.work.dtype).eps if eps1 is None else eps1


class Adafactor(Fp32StateMixin, torch.optim.Adafactor):
    """``torch.optim.Adafactor`` with its means and norms taken over logical parameters."""

    def __init__(self, params: Any, lr: float = 1e-2, **hyper: Any) -> None:
        super().__init__(params, lr, **hyper)
        self.all_reduce: AllReduce = default_all_reduce

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; returns the closure's loss if one is given.

        All ranks of a process group must have gradients for the same parameters.
        """
        loss = evaluate_closure(closure)
        with ExitStack() as stack:
            items = []
            for group in self.param_groups:
                params = [p for p in group["params"] if p.grad is not None]
                work, grads = stack.enter_context(working_copies(params))
                for param, piece, grad in zip(params, work, grads, strict=True):
                    grad = -grad if group["maximize"] else grad
                    items.append(_AdafactorParam(group, param, piece, grad, self._get_state(param), grad))
            if items:
                self._step(items)
        return loss

    def _get_state(self, param: Tensor) -> dict[str, Any]:
        state = self.state[param]
        if "step" not in state:
            state["step"] = torch.tensor(0.0, device="cpu")
            if param.ndim > 1:
                state["row_var"], state["col_var"] = _new_factor(param, -1), _new_factor(param, -2)
            else:
                state["variance"] = zeros_state_like(param)
        if param.ndim > 1:
            state["row_var"] = _match_layout(state["row_var"], param, -1)
            state["col_var"] = _match_layout(state["col_var"], param, -2)
        state["step"] += 1
        return state

    def _step(self, items: Sequence[_AdafactorParam]) -> None:
        matrices = [item for item in items if item.factored]
        rows = [torch.linalg.vector_norm(m.grad, dim=-1, keepdim=True).square_() for m in matrices]
        cols = [torch.linalg.vector_norm(m.grad, dim=-2, keepdim=True).square_() for m in matrices]
        weights = _square_sums([item.work for item in items])
        self._sum_over_shards(
            [*rows, *cols, *weights],
            [
                *(m.shard_groups(-1) for m in matrices),
                *(m.shard_groups(-2) for m in matrices),
                *(i.shard_groups() for i in items),
            ],
        )
        means = []
        for item, row, col in zip(matrices, rows, cols, strict=True):
            row_var, col_var = to_local(item.state["row_var"]), to_local(item.state["col_var"])
            row_var.lerp_(row.div_(item.param.shape[-1]), item.decay)
            col_var.lerp_(col.div_(item.param.shape[-2]), item.decay)
            means.append(row_var.sum(dim=-2, keepdim=True).div_(item.param.shape[-2]))
        self._sum_over_shards(means, [m.shard_groups(-2) for m in matrices])
        estimates = iter(means)
        for item in items:
            item.update = self._update(item, next(estimates) if item.factored else None)
        sizes = _square_sums([item.update for item in items])
        self._sum_over_shards(sizes, [item.shard_groups() for item in items])
        for item, weight, size in zip(items, weights, sizes, strict=True):
            self._apply(item, float(weight), float(size))

    def _sum_over_shards(self, tensors: Sequence[Tensor], shard_groups: Sequence[ShardGroups]) -> None:
        all_reduce_tensors_(tensors, shard_groups, self.all_reduce)

    @staticmethod
    def _update(item: _AdafactorParam, row_mean: Tensor | None) -> Tensor:
        if row_mean is None:
            variance = to_local(item.state["variance"])
            variance.lerp_(item.grad.square(), item.decay)
            estimate = variance.clone()
        else:
            estimate = to_local(item.state["row_var"]) @ to_local(item.state["col_var"])
            estimate.div_(row_mean.clamp(min=item.eps1))
        return estimate.clamp_(min=item.eps1**2).rsqrt_().mul_(item.grad)

    @staticmethod
    def _apply(item: _AdafactorParam, weight: float, size: float) -> None:
        lr, step, group = float(item.group["lr"]), float(item.state["step"]), item.group
        count = item.param.numel()
        alpha = max(group["eps"][1], (weight / count) ** 0.5) * min(lr, step**-0.5)
        if group["weight_decay"]:
            item.work.mul_(1 - lr * group["weight_decay"])
        clip = max(1.0, (size / count) ** 0.5 / group["d"])
        item.work.add_(item.update, alpha=-alpha / clip)


def _square_sums(pieces: Sequence[Tensor]) -> list[Tensor]:
    """Return the sum of squares of each piece as a tensor of the piece's dtype and device."""
    return [square_sums([piece])[0].to(piece.dtype) for piece in pieces]


def _factor_placements(param: DTensor, mean_dim: int) -> list[Placement]:
    removed_dim = mean_dim % param.ndim
    return [Replicate() if sharded_dim(p) == removed_dim else p for p in param.placements]


def _factor_shape(param: Tensor, mean_dim: int) -> torch.Size:
    shape = list(param.shape)
    shape[mean_dim] = 1
    return torch.Size(shape)


def _new_factor(param: Tensor, mean_dim: int) -> Tensor:
    """Return zeros for the factor that has ``param``'s dim ``mean_dim`` averaged away."""
    piece = to_local(param).new_zeros(_factor_shape(to_local(param), mean_dim), dtype=default_state_dtype(param))
    if not isinstance(param, DTensor):
        return piece
    shape = _factor_shape(param, mean_dim)
    stride = torch.empty(shape, device="meta").stride()
    placements = _factor_placements(param, mean_dim)
    return DTensor.from_local(piece, param.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def _match_layout(factor: Tensor, param: Tensor, mean_dim: int) -> Tensor:
    """Return ``factor`` in the layout that the step expects; a checkpoint may have brought it in another."""
    if not isinstance(param, DTensor):
        return factor
    if not isinstance(factor, DTensor):
        mesh = param.device_mesh
        factor = DTensor.from_local(factor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    placements = _factor_placements(param, mean_dim)
    return factor if list(factor.placements) == placements else factor.redistribute(param.device_mesh, placements)
