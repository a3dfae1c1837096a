"""The loss of ranks that share a sequence: each sums over its own targets, the team's number of them divides.

So the mean over ranks is the mean over tokens, also where a part of the sequence has no target at all.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from thalweg.ops.autograd import with_backward
from thalweg.ops.losses import LossCall
from thalweg.parallel.comm_group import ParallelGroup


def mean_over_group(loss: Tensor, sp_group: ParallelGroup) -> Tensor:
    """The team's mean of ``loss`` (0-dim), for everybody to see; the gradient is that of the own part."""
    return with_backward(loss, lambda x: sp_group.all_reduce_copy(x, "loss") / sp_group.size, lambda grad: grad)


def replace_loss_by_mean(output: Any, sp_group: ParallelGroup) -> Any:
    """A model's output with the team's loss in it."""
    if isinstance(output, Tensor):
        return mean_over_group(output, sp_group) if output.dim() == 0 else output
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor) and output[0].dim() == 0:
        return (mean_over_group(output[0], sp_group), *output[1:])
    result: Any = output
    if isinstance(getattr(result, "loss", None), Tensor):
        result.loss = mean_over_group(result.loss, sp_group)
    return result


def token_mean_loss(total: Tensor, count: Tensor, total_count: Tensor, sp_group: ParallelGroup) -> Tensor:
    """A loss whose mean over the team's ranks is the mean over the team's tokens.

    ``total``: the sum of this rank's token losses (0-dim); ``count``, ``total_count``: its number of targets, and
    the team's.
    """
    return total * (sp_group.size / total_count).to(total.dtype)


class SequenceParallelLoss(TorchFunctionMode):
    """While the model runs: ``F.cross_entropy`` and ``F.nll_loss`` weigh tokens alike across parts.

    ``on_token_count``, if there is one, hears of the team's number of targets (0-dim, fp64); a loss without any is
    0 then, not NaN.
    """

    def __init__(self, sp_group: ParallelGroup, on_token_count: Callable[[Tensor], None] | None = None) -> None:
        super().__init__()
        self._sp_group, self._on_token_count = sp_group, on_token_count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        loss = LossCall.from_call(func, args, kwargs)
        if loss is None or loss.reduction == "none":
            return func(*args, **kwargs)
        if loss.reduction == "sum":
            return loss.summed_loss() * self._sp_group.size
        count = loss.num_targets()
        total_count = self._sp_group.all_reduce(count.clone(), "loss")
        if self._on_token_count is not None:
            self._on_token_count(total_count)
            total_count = torch.where(total_count > 0, total_count, torch.ones_like(total_count))
        return token_mean_loss(loss.summed_loss(), count, total_count, self._sp_group)
