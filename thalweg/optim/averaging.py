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
from thalweg.mesh import Axes
from thalweg.ops.losses import Counting
from thalweg.optim.window import Window
from thalweg.utils.dtypes import HALF_DTYPES
from thalweg.utils.trees import tensors_of
from thalweg.zero.shard import Sharded


class Averaging(Protocol):
    """How losses of micro-batches become the loss and the gradient of a window."""

    @property
    def hears(self) -> Callable[[Tensor], None] | None:
        """Takes the number of targets of a loss that a team of ranks computes together, if that matters."""
        ...

    def forward(self) -> AbstractContextManager[None]:
        """Around a forward pass that may compute a loss."""
        ...

    def share(self, loss: Tensor, divided: bool = True, num_items: int | None = None) -> Tensor:
        """The loss at hand as it is to be differentiated; not ``divided`` by the size of the window if the
        caller has done so.  ``num_items``: what it is a mean over, if it was not computed in the forward."""
        ...

    def part(self, loss: Tensor, count: int) -> Tensor:
        """The loss at hand as it is to be differentiated, one of ``count`` that make a window."""
        ...

    def share_of_plain(self) -> Tensor | float:
        """The factor of a gradient that does not come from :meth:`share`, whose loss the caller divides."""
        ...

    def noted(self, loss: Tensor, num_items: int | None = None) -> Tensor:
        """The loss at hand and its weight, to be added up: (2,), fp64."""
        ...

    def mean(self, noted: Tensor) -> Tensor:
        """Of a sum of :meth:`noted`, the loss (0-dim, fp32) whose mean over data ranks is the window's;
        collective over them."""
        ...


class OverMicroBatches:
    """Every micro-batch counts alike."""

    hears: Callable[[Tensor], None] | None = None

    def __init__(self, window: Window) -> None:
        self._window = window

    def forward(self) -> AbstractContextManager[None]:
        """Nothing is looked at."""
        return nullcontext()

    def share(self, loss: Tensor, divided: bool = True, num_items: int | None = None) -> Tensor:
        """Its part of the mean over a full window."""
        size = self._window.size
        return loss / size if divided and size > 1 else loss

    def part(self, loss: Tensor, count: int) -> Tensor:
        """An equal part."""
        return loss / count

    def share_of_plain(self) -> Tensor | float:
        """As it comes."""
        return 1.0

    def noted(self, loss: Tensor, num_items: int | None = None) -> Tensor:
        """The loss, once."""
        value = loss.detach().double()
        return torch.stack([value, torch.ones_like(value)])

    def mean(self, noted: Tensor) -> Tensor:
        """Over this rank's micro-batches."""
        return (noted[0] / noted[1]).float()


class OverTokens:
    """Every target counts alike, wherever it is.

    ``data``: the ranks whose gradients are averaged; ``stages``: the ranks of a pipeline, of which the
    last alone sees losses.

    Raises (in :meth:`share` and :meth:`noted`):
        ValueError: nothing is known of the number of targets.
    """

    def __init__(
        self, window: Window, data: dist.ProcessGroup, stages: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self._window, self._data, self._stages, self._device = window, data, stages, device
        self._ranks = dist.get_world_size(data)
        self._count: Tensor | None = None  # targets of the forward at hand
        self._used = False  # whether its loss has been differentiated
        self._begin()
        window.at_close.append(self._begin)
        window.factor_at_end = self._factor

    def _begin(self) -> None:
        self._unit: Tensor | None = None  # N1 size
        self._total = torch.zeros((), dtype=torch.float64, device=self._device)
        self._taken = 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Count the targets of the losses within; several forwards before a backward add up."""
        if self._used or not torch.is_grad_enabled():
            self._count, self._used = None, False
        with Counting(self.hears):
            yield

    def hears(self, count: Tensor) -> None:
        """The loss at hand is a mean over so many targets (0-dim)."""
        count = count.detach().to(self._device, torch.float64)
        self._count = count if self._count is None else self._count + count

    def _counted(self, num_items: int | None) -> Tensor:
        if num_items is not None:
            return torch.tensor(float(num_items), dtype=torch.float64, device=self._device)
        if self._count is None:
            raise ValueError(
                "token_weighted_loss is true, but the model computed no F.cross_entropy or F.nll_loss with "
                "reduction='mean' in its forward: call engine.backward(loss, num_items=...) with the number "
                "of targets that the loss is a mean over, or set token_weighted_loss to false"
            )
        return self._count

    def _weight(self, num_items: int | None = None) -> Tensor:
        count = self._counted(num_items)
        self._used = True
        if self._unit is None:
            unit = self._sum(count.clone()) * self._window.size
            self._unit = torch.where(unit > 0, unit, torch.ones_like(unit))
        self._total += count
        self._taken += 1
        return count * (self._ranks / self._unit)

    def share(self, loss: Tensor, divided: bool = True, num_items: int | None = None) -> Tensor:
        """Its part of the mean over the window's targets, as far as they are known."""
        weight = self._weight(num_items) * (1 if divided else self._window.size)
        loss = loss.float() if loss.dtype in HALF_DTYPES else loss
        return loss * weight.to(loss.dtype)

    def part(self, loss: Tensor, count: int) -> Tensor:
        """As :meth:`share`: it is targets that count."""
        return self.share(loss)

    def share_of_plain(self) -> Tensor | float:
        """The same, for a loss that the caller has divided by the size of the window."""
        return self._weight() * self._window.size

    def noted(self, loss: Tensor, num_items: int | None = None) -> Tensor:
        """The sum over targets, and their number."""
        count = self._counted(num_items)
        if not torch.is_grad_enabled():
            self._used = True
        return torch.stack([loss.detach().to(count) * count, count])

    def mean(self, noted: Tensor) -> Tensor:
        """The sum of this rank's token losses over the mean number of targets of a rank."""
        everywhere = self._sum(noted[1].clone())
        everywhere = torch.where(everywhere > 0, everywhere, torch.ones_like(everywhere))
        return (noted[0] * self._ranks / everywhere).float()

    def _sum(self, value: Tensor) -> Tensor:
        if self._ranks > 1:
            dist.all_reduce(value, group=self._data)
        return value

    def _factor(self) -> float:
        """By what the window's gradient is multiplied when it ends; collective."""
        if self._window.size == 1 and self._taken == 1 and self._stages is None:
            return 1.0
        unit = torch.zeros_like(self._total) if self._unit is None else self._unit / self._ranks
        both = self._sum(torch.stack([unit, self._total]))
        if self._stages is not None:
            dist.all_reduce(both, group=self._stages)
        unit_of_all, total = both.tolist()
        return unit_of_all / total if total > 0 else 1.0


def averaging_of(config: Config, window: Window, axes: Axes, device: torch.device) -> Averaging:
    """What the config asks for."""
    if not config.token_weighted_loss:
        return OverMicroBatches(window)
    stages = None if axes.pipeline is None else axes.pipeline.get_group()
    return OverTokens(window, axes.data.get_group(), stages, device)


def scale_plain_backwards(model: nn.Module, window: Window, sharded: Sharded, averaging: Averaging) -> None:
    """Scale the gradients of a plain ``loss.backward()`` where they enter the model: by the loss scale, which
    the reduction divides by in any case, and by the loss's part of the window.

    ``engine.backward`` scales the loss itself.
    """

    def mark(module: nn.Module, args: Any, output: Any) -> None:
        share: list[Tensor | float] = []  # one for all outputs of a forward

        def scale(grad: Tensor) -> Tensor:
            if window.in_backward:
                return grad
            if not share:
                share.append(averaging.share_of_plain() * sharded.loss_scale)
            return (grad * share[0]).to(grad.dtype)

        for tensor in tensors_of(output):
            if tensor.requires_grad and tensor.is_floating_point():
                tensor.register_hook(scale)

    model.register_forward_hook(mark)
