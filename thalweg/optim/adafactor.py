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

from thalweg.optim.lion import loss_of
from thalweg.optim.local import Fp32State, local, new_state, state_dtype, working_copies
from thalweg.optim.norms import square_sums
from thalweg.optim.reduce import AllReduce, Span, cut_dim, cuts_of, plain_all_reduce, reduce_tensors_


@dataclass
class _Item:
    """One parameter in a step: its group, its local piece and gradient, its state, and its cut dims."""

    group: dict[str, Any]
    param: Tensor
    work: Tensor
    grad: Tensor
    state: dict[str, Any]
    update: Tensor

    def span(self, dim: int | None = None) -> Span:
        """Return the groups over which a sum along ``dim`` (None: over everything) has to be completed."""
        return tuple(
            group for group, cut in cuts_of(self.param) if dim is None or cut == dim % self.param.ndim
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


class Adafactor(Fp32State, torch.optim.Adafactor):
    """``torch.optim.Adafactor`` with its means and norms taken over logical parameters."""

    def __init__(self, params: Any, lr: float = 1e-2, **hyper: Any) -> None:
        super().__init__(params, lr, **hyper)
        self.all_reduce: AllReduce = plain_all_reduce

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; returns the closure's loss if one is given.

        All ranks of a process group must have gradients for the same parameters.
        """
        loss = loss_of(closure)
        with ExitStack() as stack:
            items = []
            for group in self.param_groups:
                params = [p for p in group["params"] if p.grad is not None]
                work, grads = stack.enter_context(working_copies(params))
                for param, piece, grad in zip(params, work, grads, strict=True):
                    grad = -grad if group["maximize"] else grad
                    items.append(_Item(group, param, piece, grad, self._state_of(param), grad))
            if items:
                self._step(items)
        return loss

    def _state_of(self, param: Tensor) -> dict[str, Any]:
        state = self.state[param]
        if "step" not in state:
            state["step"] = torch.tensor(0.0, device="cpu")
            if param.ndim > 1:
                state["row_var"], state["col_var"] = _new_factor(param, -1), _new_factor(param, -2)
            else:
                state["variance"] = new_state(param)
        if param.ndim > 1:
            state["row_var"] = _laid_out(state["row_var"], param, -1)
            state["col_var"] = _laid_out(state["col_var"], param, -2)
        state["step"] += 1
        return state

    def _step(self, items: Sequence[_Item]) -> None:
        matrices = [item for item in items if item.factored]
        rows = [torch.linalg.vector_norm(m.grad, dim=-1, keepdim=True).square_() for m in matrices]
        cols = [torch.linalg.vector_norm(m.grad, dim=-2, keepdim=True).square_() for m in matrices]
        weights = _squares([item.work for item in items])
        self._complete(
            [*rows, *cols, *weights],
            [*(m.span(-1) for m in matrices), *(m.span(-2) for m in matrices), *(i.span() for i in items)],
        )
        means = []
        for item, row, col in zip(matrices, rows, cols, strict=True):
            row_var, col_var = local(item.state["row_var"]), local(item.state["col_var"])
            row_var.lerp_(row.div_(item.param.shape[-1]), item.decay)
            col_var.lerp_(col.div_(item.param.shape[-2]), item.decay)
            means.append(row_var.sum(dim=-2, keepdim=True).div_(item.param.shape[-2]))
        self._complete(means, [m.span(-2) for m in matrices])
        estimates = iter(means)
        for item in items:
            item.update = self._update(item, next(estimates) if item.factored else None)
        sizes = _squares([item.update for item in items])
        self._complete(sizes, [item.span() for item in items])
        for item, weight, size in zip(items, weights, sizes, strict=True):
            self._apply(item, float(weight), float(size))

    def _complete(self, tensors: Sequence[Tensor], spans: Sequence[Span]) -> None:
        reduce_tensors_(tensors, spans, self.all_reduce)

    @staticmethod
    def _update(item: _Item, row_mean: Tensor | None) -> Tensor:
        if row_mean is None:
            variance = local(item.state["variance"])
            variance.lerp_(item.grad.square(), item.decay)
            estimate = variance.clone()
        else:
            estimate = local(item.state["row_var"]) @ local(item.state["col_var"])
            estimate.div_(row_mean.clamp(min=item.eps1))
        return estimate.clamp_(min=item.eps1**2).rsqrt_().mul_(item.grad)

    @staticmethod
    def _apply(item: _Item, weight: float, size: float) -> None:
        lr, step, group = float(item.group["lr"]), float(item.state["step"]), item.group
        count = item.param.numel()
        alpha = max(group["eps"][1], (weight / count) ** 0.5) * min(lr, step**-0.5)
        if group["weight_decay"]:
            item.work.mul_(1 - lr * group["weight_decay"])
        clip = max(1.0, (size / count) ** 0.5 / group["d"])
        item.work.add_(item.update, alpha=-alpha / clip)


def _squares(pieces: Sequence[Tensor]) -> list[Tensor]:
    """Return the sum of squares of each piece as a tensor of the piece's dtype and device."""
    return [square_sums([piece])[0].to(piece.dtype) for piece in pieces]


def _factor_placements(param: DTensor, averaged: int) -> list[Placement]:
    gone = averaged % param.ndim
    return [Replicate() if cut_dim(p) == gone else p for p in param.placements]


def _factor_shape(param: Tensor, averaged: int) -> torch.Size:
    shape = list(param.shape)
    shape[averaged] = 1
    return torch.Size(shape)


def _new_factor(param: Tensor, averaged: int) -> Tensor:
    """Return zeros for the factor that has ``param``'s dim ``averaged`` averaged away."""
    piece = local(param).new_zeros(_factor_shape(local(param), averaged), dtype=state_dtype(param))
    if not isinstance(param, DTensor):
        return piece
    shape = _factor_shape(param, averaged)
    stride = torch.empty(shape, device="meta").stride()
    placements = _factor_placements(param, averaged)
    return DTensor.from_local(
        piece, param.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )


def _laid_out(factor: Tensor, param: Tensor, averaged: int) -> Tensor:
    """Return ``factor`` in the layout that the step expects; a checkpoint may have brought it in another."""
    if not isinstance(param, DTensor):
        return factor
    if not isinstance(factor, DTensor):
        mesh = param.device_mesh
        factor = DTensor.from_local(factor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    wanted = _factor_placements(param, averaged)
    return factor if list(factor.placements) == wanted else factor.redistribute(param.device_mesh, wanted)
