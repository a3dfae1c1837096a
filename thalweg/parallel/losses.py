"""The loss of ranks that share a sequence: each sums over its own targets, the team's number of them divides.

So the mean over ranks is the mean over tokens, also where a part of the sequence has no target at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from thalweg.ops.losses import MeanLoss
from thalweg.parallel.team import Team


class _Averaged(torch.autograd.Function):
    """The team's mean of a loss, for everybody to see; the gradient is that of the own part."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, team: Team) -> Tensor:  # type: ignore[override]
        return team.all_reduce(loss.detach().clone(), "loss") / team.size

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


def averaged(loss: Tensor, team: Team) -> Tensor:
    """The team's mean of ``loss`` (0-dim), with the gradient of the own one."""
    return _Averaged.apply(loss, team)  # type: ignore[return-value]


def with_mean_loss(output: Any, team: Team) -> Any:
    """A model's output with the team's loss in it."""
    if isinstance(output, Tensor):
        return averaged(output, team) if output.dim() == 0 else output
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor) and output[0].dim() == 0:
        return (averaged(output[0], team), *output[1:])
    result: Any = output
    if isinstance(getattr(result, "loss", None), Tensor):
        result.loss = averaged(result.loss, team)
    return result


def token_mean(total: Tensor, count: Tensor, whole: Tensor, team: Team) -> Tensor:
    """A loss whose mean over the team's ranks is the mean over the team's tokens.

    ``total``: the sum of this rank's token losses (0-dim); ``count``, ``whole``: its number of targets, and
    the team's.
    """
    return total * (team.size / whole).to(total.dtype)


class TeamLosses(TorchFunctionMode):
    """While the model runs: ``F.cross_entropy`` and ``F.nll_loss`` weigh tokens alike across parts.

    ``tell``, if there is one, hears of the team's number of targets (0-dim, fp64); a loss without any is
    0 then, not NaN.
    """

    def __init__(self, team: Team, tell: Callable[[Tensor], None] | None = None) -> None:
        super().__init__()
        self._team, self._tell = team, tell

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        loss = MeanLoss.of(func, args, kwargs)
        if loss is None or loss.reduction == "none":
            return func(*args, **kwargs)
        if loss.reduction == "sum":
            return loss.total() * self._team.size
        count = loss.count()
        whole = self._team.all_reduce(count.clone(), "loss")
        if self._tell is not None:
            self._tell(whole)
            whole = torch.where(whole > 0, whole, torch.ones_like(whole))
        return token_mean(loss.total(), count, whole, self._team)
