"""What the gradient of a window is the mean over: its micro-batches, or their tokens.

    micro-batches   the mean over ranks and micro-batches of their losses, each a mean by itself
    tokens          the sum of all token losses of all ranks and micro-batches, over their number, as one
                    process would have it that saw them in one batch (transformers' ``num_items_in_batch``)

Tokens, of window k with micro-batches i on data ranks d, n(d, i) targets each, D ranks:

    agree    before the first backward pass: N1 = sum over d of n(d, 1)
    weigh    each loss by n(d, i) D / (N1 size), so that where all are alike nothing is left to do
    close    multiply the gradient by N1 size / N, N the number of targets of the whole window

so the numbers of micro-batches to come need not be known.  With one micro-batch a window the last factor
is 1 and no second sum is taken.  Ranks that share a sequence count its targets together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thalweg.config import Config
from thalweg.ops.losses import TargetCountMode
from thalweg.optim.accumulation import AccumulationWindow
from thalweg.parallel_dims import ParallelMeshes
from thalweg.utils.dtypes import HALF_DTYPES
from thalweg.utils.trees import iter_tensors
from thalweg.zero.shard import ShardedModel


class LossNormalizer(Protocol):
    """How losses of micro-batches become the loss and the gradient of a window."""

    @property
    def on_token_count(self) -> Callable[[Tensor], None] | None:
        """Takes the number of targets of a loss that a group of ranks computes together, if that matters."""
        ...

    def forward_context(self) -> AbstractContextManager[None]:
        """Around a forward pass that may compute a loss."""
        ...

    def scale_loss(self, loss: Tensor, divide_by_window: bool = True, num_items: int | None = None) -> Tensor:
        """The loss at hand as it is to be differentiated; undivided by the size of the window if the
        caller has done so.  ``num_items``: what it is a mean over, if it was not computed in the forward."""
        ...

    def scale_pipeline_loss(self, loss: Tensor, num_micro_batches: int) -> Tensor:
        """The loss at hand as it is to be differentiated, one of ``num_micro_batches`` that make a window."""
        ...

    def user_backward_scale(self) -> Tensor | float:
        """The factor of a gradient that does not come from :meth:`scale_loss`, whose loss the caller divides."""
        ...

    def loss_and_weight(self, loss: Tensor, num_items: int | None = None) -> Tensor:
        """The loss at hand and its weight, to be added up: (2,), fp64."""
        ...

    def mean(self, total: Tensor) -> Tensor:
        """Of a sum of :meth:`loss_and_weight`, the loss (0-dim, fp32) whose mean over data ranks is the window's;
        collective over them."""
        ...


class MicroBatchMean:
    """Every micro-batch counts alike."""

    on_token_count: Callable[[Tensor], None] | None = None

    def __init__(self, window: AccumulationWindow) -> None:
        self._window = window

    def forward_context(self) -> AbstractContextManager[None]:
        """Nothing is looked at."""
        return nullcontext()

    def scale_loss(self, loss: Tensor, divide_by_window: bool = True, num_items: int | None = None) -> Tensor:
        """Its part of the mean over a full window."""
        size = self._window.num_micro_batches
        return loss / size if divide_by_window and size > 1 else loss

    def scale_pipeline_loss(self, loss: Tensor, num_micro_batches: int) -> Tensor:
        """An equal part."""
        return loss / num_micro_batches

    def user_backward_scale(self) -> Tensor | float:
        """As it comes."""
        return 1.0

    def loss_and_weight(self, loss: Tensor, num_items: int | None = None) -> Tensor:
        """The loss, once."""
        value = loss.detach().double()
        return torch.stack([value, torch.ones_like(value)])

    def mean(self, total: Tensor) -> Tensor:
        """Over this rank's micro-batches."""
        return (total[0] / total[1]).float()


class TokenMean:
    """Every target counts alike, wherever it is.

    ``dp_group``: the ranks whose gradients are averaged; ``pp_group``: the ranks of a pipeline, of which the
    last alone sees losses.

    Raises (in :meth:`scale_loss` and :meth:`loss_and_weight`):
        ValueError: nothing is known of the number of targets.
    """

    def __init__(
        self,
        window: AccumulationWindow,
        dp_group: dist.ProcessGroup,
        pp_group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._window, self._dp_group, self._pp_group, self._device = window, dp_group, pp_group, device
        self._dp_size = dist.get_world_size(dp_group)
        self._num_tokens: Tensor | None = None  # targets of the forward at hand
        self._loss_used = False  # whether its loss has been differentiated
        self._reset()
        window.on_close.append(self._reset)
        window.final_factor_fn = self._final_factor

    def _reset(self) -> None:
        self._reference_count: Tensor | None = None  # N1 size
        self._total_tokens = torch.zeros((), dtype=torch.float64, device=self._device)
        self._num_losses = 0

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Count the targets of the losses within; several forwards before a backward add up."""
        if self._loss_used or not torch.is_grad_enabled():
            self._num_tokens, self._loss_used = None, False
        with TargetCountMode(self.on_token_count):
            yield

    def on_token_count(self, num_tokens: Tensor) -> None:
        """The loss at hand is a mean over so many targets (0-dim)."""
        num_tokens = num_tokens.detach().to(self._device, torch.float64)
        self._num_tokens = num_tokens if self._num_tokens is None else self._num_tokens + num_tokens

    def _get_num_tokens(self, num_items: int | None) -> Tensor:
        if num_items is not None:
            return torch.tensor(float(num_items), dtype=torch.float64, device=self._device)
        if self._num_tokens is None:
            raise ValueError(
                "token_weighted_loss is true, but the model computed no F.cross_entropy or F.nll_loss with "
                "reduction='mean' in its forward: call engine.backward(loss, num_items=...) with the number "
                "of targets that the loss is a mean over, or set token_weighted_loss to false"
            )
        return self._num_tokens

    def _loss_weight(self, num_items: int | None = None) -> Tensor:
        num_tokens = self._get_num_tokens(num_items)
        self._loss_used = True
        if self._reference_count is None:
            reference_count = self._all_reduce(num_tokens.clone()) * self._window.num_micro_batches
            self._reference_count = torch.where(reference_count > 0, reference_count, torch.ones_like(reference_count))
        self._total_tokens += num_tokens
        self._num_losses += 1
        return num_tokens * (self._dp_size / self._reference_count)

    def scale_loss(self, loss: Tensor, divide_by_window: bool = True, num_items: int | None = None) -> Tensor:
        """Its part of the mean over the window's targets, as far as they are known."""
        weight = self._loss_weight(num_items) * (1 if divide_by_window else self._window.num_micro_batches)
        loss = loss.float() if loss.dtype in HALF_DTYPES else loss
        return loss * weight.to(loss.dtype)

    def scale_pipeline_loss(self, loss: Tensor, num_micro_batches: int) -> Tensor:
        """As :meth:`scale_loss`: it is targets that count."""
        return self.scale_loss(loss)

    def user_backward_scale(self) -> Tensor | float:
        """The same, for a loss that the caller has divided by the size of the window."""
        return self._loss_weight() * self._window.num_micro_batches

    def loss_and_weight(self, loss: Tensor, num_items: int | None = None) -> Tensor:
        """The sum over targets, and their number."""
        num_tokens = self._get_num_tokens(num_items)
        if not torch.is_grad_enabled():
            self._loss_used = True
        return torch.stack([loss.detach().to(num_tokens) * num_tokens, num_tokens])

    def mean(self, total: Tensor) -> Tensor:
        """The sum of this rank's token losses over the mean number of targets of a rank."""
        num_tokens = self._all_reduce(total[1].clone())
        num_tokens = torch.where(num_tokens > 0, num_tokens, torch.ones_like(num_tokens))
        return (total[0] * self._dp_size / num_tokens).float()

    def _all_reduce(self, value: Tensor) -> Tensor:
        if self._dp_size > 1:
            dist.all_reduce(value, group=self._dp_group)
        return value

    def _final_factor(self) -> float:
        """By what the window's gradient is multiplied when it ends; collective."""
        if self._window.num_micro_batches == 1 and self._num_losses == 1 and self._pp_group is None:
            return 1.0
        reference_count = (
            torch.zeros_like(self._total_tokens)
            if self._reference_count is None
            else self._reference_count / self._dp_size
        )
        counts = self._all_reduce(torch.stack([reference_count, self._total_tokens]))
        if self._pp_group is not None:
            dist.all_reduce(counts, group=self._pp_group)
        total_reference, total = counts.tolist()
        return total_reference / total if total > 0 else 1.0


def build_loss_normalizer(
    config: Config, window: AccumulationWindow, axes: ParallelMeshes, device: torch.device
) -> LossNormalizer:
    """What the config asks for."""
    if not config.token_weighted_loss:
        return MicroBatchMean(window)
    pp_group = None if axes.pp is None else axes.pp.get_group()
    return TokenMean(window, axes.fsdp.get_group(), pp_group, device)


def register_loss_scale_hooks(
    model: nn.Module, window: AccumulationWindow, sharded: ShardedModel, normalizer: LossNormalizer
) -> None:
    """Scale the gradients of a plain ``loss.backward()`` where they enter the model: by the loss scale, which
    the reduction divides by in any case, and by the loss's part of the window.

    ``engine.backward`` scales the loss itself.
    """

    def hook_outputs(module: nn.Module, args: Any, output: Any) -> None:
        factor: list[Tensor | float] = []  # one for all outputs of a forward

        def scale(grad: Tensor) -> Tensor:
            if window.in_backward:
                return grad
            if not factor:
                factor.append(normalizer.user_backward_scale() * sharded.loss_scale)
            return (grad * factor[0]).to(grad.dtype)

        for tensor in iter_tensors(output):
            if tensor.requires_grad and tensor.is_floating_point():
                tensor.register_hook(scale)

    model.register_forward_hook(hook_outputs)
