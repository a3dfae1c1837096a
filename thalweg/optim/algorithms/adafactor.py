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

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate

from thalweg.device import widest_float
from thalweg.optim import dtensor_local
from thalweg.optim.dtensor_local import all_reduce_tensors_, to_local
from thalweg.optim.norms import square_sums
from thalweg.zero.full_state_dict import make_dtensor


@dataclass
class _AdafactorParam:
    """One parameter in a step: its group, its local piece and gradient, and its state."""

    group: dict[str, Any]
    param: Tensor
    work: Tensor
    grad: Tensor
    state: dict[str, Any]

    def __post_init__(self) -> None:
        self.decay = float(self.state["step"]) ** self.group["beta2_decay"]  # 1 - beta2 of this step
        eps1 = self.group["eps"][0]
        self.eps1 = torch.finfo(self.work.dtype).eps if eps1 is None else eps1

    def shard_groups(self, dim: int | None = None) -> dtensor_local.ShardGroups:
        """Return the groups over which a sum along ``dim`` (None: over everything) has to be completed."""
        axes = dtensor_local.get_sharded_axes(self.param)
        return tuple(group for group, cut in axes if dim is None or cut == dim % self.param.ndim)


class Adafactor(dtensor_local.StepMixin, torch.optim.Adafactor):
    """``torch.optim.Adafactor`` with its means and norms taken over logical parameters."""

    def _update_params(self) -> None:
        with ExitStack() as stack:
            items = []
            for group in self.param_groups:
                params = [p for p in group["params"] if p.grad is not None]
                work, grads = stack.enter_context(dtensor_local.working_copies(params))
                for param, piece, grad in zip(params, work, grads, strict=True):
                    grad = -grad if group["maximize"] else grad
                    items.append(_AdafactorParam(group, param, piece, grad, self._get_state(param)))
            if items:
                self._step(items)

    def _get_state(self, param: Tensor) -> dict[str, Any]:
        state = self.state[param]
        factors = {"row_var": -1, "col_var": -2} if param.ndim > 1 else {}
        if "step" not in state:
            state["step"] = torch.tensor(0.0, device="cpu")
            state.update({key: _new_factor(param, dim) for key, dim in factors.items()})
            if not factors:
                state["variance"] = dtensor_local.zeros_state_like(param)
        for key, dim in factors.items():
            state[key] = dtensor_local.match_layout(state[key], param, _factor_placements(param, dim))
        state["step"] += 1
        return state

    def _step(self, items: Sequence[_AdafactorParam]) -> None:
        matrices = [item for item in items if item.param.ndim > 1]
        rows = [torch.linalg.vector_norm(m.grad, dim=-1, keepdim=True).square_() for m in matrices]
        cols = [torch.linalg.vector_norm(m.grad, dim=-2, keepdim=True).square_() for m in matrices]
        everywhere = [item.shard_groups() for item in items]
        weights = _square_sums([item.work for item in items])
        row_groups, col_groups = ([m.shard_groups(dim) for m in matrices] for dim in (-1, -2))
        all_reduce_tensors_([*rows, *cols, *weights], [*row_groups, *col_groups, *everywhere])
        means = []
        for item, row, col in zip(matrices, rows, cols, strict=True):
            row_var, col_var = to_local(item.state["row_var"]), to_local(item.state["col_var"])
            row_var.lerp_(row.div_(item.param.shape[-1]), item.decay)
            col_var.lerp_(col.div_(item.param.shape[-2]), item.decay)
            means.append(row_var.sum(dim=-2, keepdim=True).div_(item.param.shape[-2]))
        all_reduce_tensors_(means, col_groups)
        estimates = iter(means)
        updates = [self._update(item, next(estimates) if item.param.ndim > 1 else None) for item in items]
        sizes = _square_sums(updates)
        all_reduce_tensors_(sizes, everywhere)
        for item, update, weight, size in zip(items, updates, weights, sizes, strict=True):
            lr, step, group, count = float(item.group["lr"]), float(item.state["step"]), item.group, item.param.numel()
            rms_weight, rms_update = ((total.to(widest_float(total.device)) / count).sqrt() for total in (weight, size))
            alpha = rms_weight.clamp(min=group["eps"][1]) * min(lr, step**-0.5)
            if group["weight_decay"]:
                item.work.mul_(1 - lr * group["weight_decay"])
            clip = (rms_update / group["d"]).clamp(min=1.0)
            item.work.sub_(update.mul_(alpha / clip))

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


def _square_sums(pieces: Sequence[Tensor]) -> list[Tensor]:
    """Return the sum of squares of each piece as a tensor of the piece's dtype and device."""
    return [total.to(piece.dtype) for total, piece in zip(square_sums(pieces), pieces, strict=True)]


def _factor_placements(param: Tensor, mean_dim: int) -> list[Placement]:
    removed_dim, placements = mean_dim % param.ndim, getattr(param, "placements", ())
    return [Replicate() if dtensor_local.sharded_dim(p) == removed_dim else p for p in placements]


def _new_factor(param: Tensor, mean_dim: int) -> Tensor:
    """Return zeros for the factor that has ``param``'s dim ``mean_dim`` averaged away."""
    shape = _with_one(to_local(param).shape, mean_dim)
    piece = to_local(param).new_zeros(shape, dtype=dtensor_local.default_state_dtype(param))
    if not isinstance(param, DTensor):
        return piece
    return make_dtensor(piece, _factor_placements(param, mean_dim), param, _with_one(param.shape, mean_dim))


def _with_one(shape: torch.Size, dim: int) -> torch.Size:
    return torch.Size(1 if i == dim % len(shape) else size for i, size in enumerate(shape))
