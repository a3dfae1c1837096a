"""The accumulation window: the micro-batches between two updates, and what its gradient is the mean over.

Only a step closes a window.  ``engine.step()`` is called after every micro-batch and
closes it when it is full; the optimizer's own ``step()`` closes it whatever it holds, and so does every
``engine.step()`` where the program manages its windows (``managed_gradient_accumulation: false``).
A window closed early (the ragged tail of an epoch) still means the mean over the
micro-batches that it did see, as one big batch of them would.

The gradient of a window is a mean over its micro-batches, or over their tokens:

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

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thalweg.config import Config
from thalweg.device import pin, widest_float
from thalweg.nn.losses.lazy_logits import LazyLogits
from thalweg.ops._torch_private import functorch_active, is_fake
from thalweg.ops.autograd import with_backward
from thalweg.ops.losses import TargetCountMode
from thalweg.parallel.tensor.vocab_parallel import VocabParallelLogits
from thalweg.parallel_dims import ParallelMeshes
from thalweg.utils.dtypes import HALF_DTYPES
from thalweg.utils.trees import map_tensors


class StepResult:
    """What became of a window: ``grad_norm`` before clipping (nan if not finite), and whether it was ``skipped``.

    ``rejected``: the gradient is finite, and yet nothing was updated.  ``norm``: 0-dim, of the ``step``-th window.
    From an accelerator it is on its way when this is made, and who reads it first waits for it.
    """

    def __init__(self, norm: Tensor, step: int = 0) -> None:
        self._norm, self._arrival, self.step, self.rejected = norm, None, step, False
        if norm.device.type != "cpu":
            self._norm = pin(torch.empty_like(norm, device="cpu")).copy_(norm, non_blocking=True)
            self._arrival = torch.accelerator.current_stream(norm.device).record_event()

    @property
    def grad_norm(self) -> float:
        """The 2-norm of the window's gradient."""
        if self._arrival is not None and not self._arrival.query():
            self._arrival.synchronize()
        norm = self._norm.item()
        return norm if math.isfinite(norm) else math.nan

    @property
    def overflowed(self) -> bool:
        """Whether a gradient was not finite."""
        return math.isnan(self.grad_norm)

    @property
    def skipped(self) -> bool:
        """Whether nothing was updated."""
        return self.rejected or self.overflowed


class StepListener(Protocol):
    """What takes part in training steps beside the model and its optimizer; a subclass overrides what it needs."""

    def before_backward(self) -> None:
        """One of the engine's backward passes begins."""

    def after_backward(self) -> None:
        """It has computed and reduced all its gradients."""

    def after_step(self, result: StepResult) -> None:
        """A window has ended, with an update or a skipped one."""

    def discard(self) -> None:
        """The gradients at hand are dropped (``zero_grad``)."""

    def close(self) -> None:
        """The engine is closed."""


@dataclass
class StepCallbacks(StepListener):
    """A listener made of functions."""

    on_step: Callable[[StepResult], object] = lambda result: None
    on_close: Callable[[], object] = lambda: None

    def after_step(self, result: StepResult) -> None:
        self.on_step(result)

    def close(self) -> None:
        self.on_close()


class AccumulationWindow:
    """Counts micro-batches, ``num_micro_batches`` (``gradient_accumulation_steps``) to a window, and calls the
    listeners of the step, in the order in which they were added.

    Not ``managed``: a backward pass is a micro-batch, however many there are, and a step ends the window."""

    def __init__(
        self, num_micro_batches: int, normalizer: LossNormalizer | None = None, *, managed: bool = True
    ) -> None:
        self.num_micro_batches, self.managed = num_micro_batches, managed
        self.normalizer: LossNormalizer = normalizer or LossNormalizer(num_micro_batches)
        self.listeners: list[StepListener] = []
        self.micro_steps = 0
        self.num_steps = 0
        # Micro-batches of the window closed last; a loop that never counts them is taken to fill it.
        self.last_num_micro_batches = num_micro_batches
        self._num_ended = 0
        self._backward_started = False
        self._loss_divided = False
        self._is_last_override: bool | None = None
        # True while the engine itself runs a backward pass, whose loss it has scaled.
        self.in_backward = False
        # Whether that pass keeps its graph, so that another may follow on it.
        self.retain_graph = False
        # The loss of that pass as it came from the model, on this rank.
        self.loss: Tensor | None = None

    def add_listener(self, listener: StepListener) -> None:
        """Call ``listener`` in every step from now on."""
        self.listeners.append(listener)

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch at hand is expected to be the window's last."""
        if self._is_last_override is not None:
            return self._is_last_override
        # A program that manages its windows says so by its step, when the backward passes are over.
        return self.managed and self._num_ended + 1 >= self.num_micro_batches

    @property
    def mean_factor(self) -> float:
        """What the accumulated gradient must be multiplied by to be the mean over the window's micro-batches.

        Losses were divided by ``num_micro_batches`` in the backward pass, when the number that would
        come was not known yet.
        """
        return self.num_micro_batches / self._num_done if self._loss_divided and self._num_done else 1.0

    @property
    def needs_no_rescale(self) -> bool:
        """Whether the gradient will be the window's mean as soon as its last backward pass has run."""
        return self.mean_factor == 1.0 and not self.normalizer.rescales_at_end

    def final_factor(self) -> float | Tensor:
        """What the gradient of a window that ends now must be multiplied by; collective."""
        return self.normalizer.final_factor(self.mean_factor)

    @property
    def _num_done(self) -> int:
        return self._num_ended + (1 if self._backward_started else 0)

    def resize(self, num_micro_batches: int) -> None:
        """From the next window on, so many micro-batches."""
        self.num_micro_batches = self.last_num_micro_batches = num_micro_batches
        self.normalizer.resize(num_micro_batches)

    def set_is_last(self, is_last: bool | None) -> None:
        """Declare that the micro-batch at hand is (not) the window's last; None counts again.

        Raises:
            ValueError: ``managed_gradient_accumulation`` is false.
        """
        if not self.managed:
            raise ValueError(
                "set_gradient_accumulation_boundary() does not go with managed_gradient_accumulation: false, where "
                "every step() ends the window: leave the call out"
            )
        self._is_last_override = is_last

    @contextmanager
    def backward(
        self, *, loss_divided: bool, retain_graph: bool, num_micro_batches: int = 0, loss: Tensor | None = None
    ) -> Iterator[None]:
        """The engine's backward pass of the micro-batch at hand, its loss divided by the window's size or not.

        ``num_micro_batches``: those of as many micro-batches at once, which it then counts too.
        """
        self.loss = None if loss is None else loss.detach()
        for listener in self.listeners:
            listener.before_backward()
        self._backward_started = True
        self._loss_divided = self._loss_divided or loss_divided
        self.in_backward, self.retain_graph = True, retain_graph
        try:
            yield
            for listener in self.listeners:
                listener.after_backward()
            for _ in range(num_micro_batches if self.managed else 1):
                self._count_micro_batch()
        finally:
            self.in_backward, self.loss = False, None

    def end_micro_batch(self) -> bool:
        """Count the micro-batch; whether it completes the window."""
        if not self.managed:
            return True
        last = self.is_last
        self._count_micro_batch()
        return last

    def _count_micro_batch(self) -> None:
        self._num_ended += 1
        self.micro_steps += 1
        self._backward_started = False

    def restart(self) -> None:
        """Begin a new window."""
        self.last_num_micro_batches = self._num_done or self.num_micro_batches
        self._num_ended = 0
        self._backward_started = self._loss_divided = False
        self._is_last_override = None
        self.normalizer.reset()

    def end_step(self, result: StepResult) -> None:
        """The window has ended with ``result``: begin a new one."""
        self.restart()
        self.num_steps += 1
        for listener in self.listeners:
            listener.after_step(result)

    def discard(self) -> None:
        """The gradients at hand are dropped; what was counted of the window stays."""
        for listener in self.listeners:
            listener.discard()


class LossNormalizer:
    """How losses of micro-batches become the loss and the gradient of a window; here every micro-batch counts alike.

    ``rescales_at_end``: whether only the end of a window tells the last factor of its gradient.
    ``on_token_count`` takes the number of targets of a loss that a group of ranks computes together, if that matters.
    """

    on_token_count: Callable[[Tensor], None] | None = None
    rescales_at_end = False
    # Whether the loss of a plain ``loss.backward()`` has been divided by the window's size by the program.
    user_divides = True

    def __init__(self, num_micro_batches: int) -> None:
        self._num_micro_batches = num_micro_batches

    def resize(self, num_micro_batches: int) -> None:
        """From the next window on, so many micro-batches."""
        self._num_micro_batches = num_micro_batches

    def forward_context(self) -> AbstractContextManager[None]:
        """Around a forward pass that may compute a loss."""
        return nullcontext()

    def scale_loss(self, loss: Tensor, divide_by_window: bool = True, num_items: int | None = None) -> Tensor:
        """The loss at hand as it is to be differentiated; undivided by the size of the window if the
        caller has done so.  ``num_items``: what it is a mean over, if it was not computed in the forward."""
        size = self._num_micro_batches
        return loss / size if divide_by_window and size > 1 else loss

    def scale_pipeline_loss(self, loss: Tensor, num_micro_batches: int) -> Tensor:
        """The loss at hand as it is to be differentiated, one of ``num_micro_batches`` that make a window."""
        return loss / num_micro_batches

    def user_backward_scale(self) -> Tensor | float:
        """The factor of a gradient that does not come from :meth:`scale_loss`."""
        return 1.0 if self.user_divides else 1.0 / self._num_micro_batches

    def loss_and_weight(self, loss: Tensor, num_items: int | None = None) -> Tensor:
        """The loss at hand and its weight, to be added up: (2,), fp64."""
        value = loss.detach().to(widest_float(loss.device))
        return torch.stack([value, torch.ones_like(value)])

    def mean(self, total: Tensor) -> Tensor:
        """Of a sum of :meth:`loss_and_weight`, the loss (0-dim, fp32) whose mean over data ranks is the window's;
        collective over them."""
        return (total[0] / total[1]).float()

    def final_factor(self, mean_factor: float) -> float | Tensor:
        """By what the gradient of a window that ends is multiplied (0-dim, fp64, if a tensor); collective.
        ``mean_factor``: by what it would be for the mean over micro-batches."""
        return mean_factor

    def reset(self) -> None:
        """A new window begins."""


class TokenMean(LossNormalizer):
    """Every target counts alike, wherever it is.

    ``dp_group``: the ranks whose gradients are averaged; ``pp_group``: the ranks of a pipeline, of which the
    last alone sees losses.

    Raises (in :meth:`scale_loss` and :meth:`loss_and_weight`):
        ValueError: nothing is known of the number of targets.
    """

    def __init__(
        self,
        num_micro_batches: int,
        dp_group: dist.ProcessGroup,
        pp_group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        super().__init__(num_micro_batches)
        self._dp_group, self._pp_group, self._device = dp_group, pp_group, device
        self.rescales_at_end = num_micro_batches > 1
        self._dp_size = dist.get_world_size(dp_group)
        # Targets of the forward at hand, by whether it keeps what its gradients need: an evaluation may come between
        # one that does and its backward pass.
        self._num_tokens = dict[bool, Tensor]()
        self._learns = True
        self._loss_used = False  # whether the loss of one that does has been differentiated
        self.reset()

    def reset(self) -> None:
        """Forget the targets of the window before."""
        self._reference_count: Tensor | None = None  # N1 size
        self._total_tokens = torch.zeros((), dtype=widest_float(self._device), device=self._device)
        self._num_losses = 0

    def resize(self, num_micro_batches: int) -> None:
        super().resize(num_micro_batches)
        self.rescales_at_end = num_micro_batches > 1

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Count the targets of the losses within; several forwards before a backward add up."""
        self._learns = torch.is_grad_enabled()
        if self._loss_used or not self._learns:
            self._num_tokens.pop(self._learns, None)
        self._loss_used = self._loss_used and not self._learns
        with TargetCountMode(self.on_token_count):
            yield

    def on_token_count(self, num_tokens: Tensor) -> None:
        """The loss at hand is a mean over so many targets (0-dim)."""
        if is_fake(num_tokens):  # the plan's, which is made within the first forward pass
            return
        num_tokens = num_tokens.detach().to(self._device, widest_float(self._device))
        self._num_tokens[self._learns] = self._num_tokens.get(self._learns, 0) + num_tokens

    def _get_num_tokens(self, num_items: int | None, learns: bool = True) -> Tensor:
        if num_items is not None:
            # Filled there: a copy would wait for the forward pass.
            return torch.full((), float(num_items), dtype=widest_float(self._device), device=self._device)
        if learns not in self._num_tokens:
            raise ValueError(
                "token_weighted_loss is true, but the model computed no F.cross_entropy or F.nll_loss with "
                "reduction='mean' in its forward: call engine.backward(loss, num_items=...) with the number "
                "of targets that the loss is a mean over, or set token_weighted_loss to false"
            )
        return self._num_tokens[learns]

    def _loss_weight(self, num_items: int | None = None) -> Tensor:
        num_tokens = self._get_num_tokens(num_items)
        is_new = num_items is not None or not self._loss_used  # else another loss over the same targets
        self._loss_used = True
        if self._reference_count is None:
            reference_count = self._all_reduce(num_tokens.clone()) * self._num_micro_batches
            self._reference_count = torch.where(reference_count > 0, reference_count, torch.ones_like(reference_count))
        if is_new:
            self._total_tokens += num_tokens
            self._num_losses += 1
        return num_tokens * (self._dp_size / self._reference_count)

    def scale_loss(self, loss: Tensor, divide_by_window: bool = True, num_items: int | None = None) -> Tensor:
        """Its part of the mean over the window's targets, as far as they are known."""
        weight = self._loss_weight(num_items) * (1 if divide_by_window else self._num_micro_batches)
        loss = loss.float() if loss.dtype in HALF_DTYPES else loss
        return loss * weight.to(loss.dtype)

    def scale_pipeline_loss(self, loss: Tensor, num_micro_batches: int) -> Tensor:
        """As :meth:`scale_loss`: it is targets that count."""
        return self.scale_loss(loss)

    def user_backward_scale(self) -> Tensor | float:
        """The same, for a loss that the caller has divided by the size of the window."""
        return self._loss_weight() * (self._num_micro_batches if self.user_divides else 1)

    def loss_and_weight(self, loss: Tensor, num_items: int | None = None) -> Tensor:
        """The sum over targets, and their number."""
        num_tokens = self._get_num_tokens(num_items, torch.is_grad_enabled())
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

    def final_factor(self, mean_factor: float) -> float | Tensor:
        """The targets that losses were weighed by over those there were; collective."""
        if self._num_micro_batches == 1 and self._num_losses == 1 and self._pp_group is None:
            return 1.0
        reference = self._reference_count
        expected = torch.zeros_like(self._total_tokens) if reference is None else reference / self._dp_size
        counts = self._all_reduce(torch.stack([expected, self._total_tokens]))
        if self._pp_group is not None:
            dist.all_reduce(counts, group=self._pp_group)
        total_reference, total = counts.unbind()
        return torch.where(total > 0, total_reference / total, 1.0)


def build_loss_normalizer(
    config: Config, num_micro_batches: int, meshes: ParallelMeshes, device: torch.device
) -> LossNormalizer:
    """What the config asks for."""
    if not config.token_weighted_loss:
        return LossNormalizer(num_micro_batches)
    pp_group = None if meshes.pp is None else meshes.pp.get_group()
    return TokenMean(num_micro_batches, meshes.fsdp.get_group(), pp_group, device)


def register_loss_scale_hooks(model: nn.Module, window: AccumulationWindow, read_scale: Callable[[], float]) -> None:
    """Scale the gradients of a plain ``loss.backward()`` where they enter the model: by the loss scale as
    ``read_scale`` tells it, which the reduction divides by in any case, and by the loss's part of the window.

    ``engine.backward`` scales the loss itself.
    """

    def enter_outputs(module: nn.Module, args: Any, output: Any) -> Any:
        if functorch_active() or not torch.is_grad_enabled():  # torch.func's gradients are the caller's own
            return output
        factor: list[Tensor | float] = []  # one for all outputs of a forward

        def scale(grad: Tensor) -> Tensor:
            if window.in_backward:
                return grad
            if not factor:
                factor.append(window.normalizer.user_backward_scale() * read_scale())
            return (grad * factor[0]).to(grad.dtype)

        def enter(tensor: Tensor) -> Tensor:
            if isinstance(tensor, VocabParallelLogits):
                return VocabParallelLogits(enter(tensor.local), tensor.tp_group, tensor.shard_sizes)
            if isinstance(tensor, LazyLogits):  # the model's own loss was made without them
                tensor.register_hook(scale)
            elif tensor.requires_grad:
                # A hook on the tensor itself would scale once more what comes from a loss that the model has made of
                # it, and one on a view is passed by where that is changed in place.
                return with_backward(tensor, Tensor.detach, scale)
            return tensor

        return map_tensors(output, enter, in_place=True)

    model.register_forward_hook(enter_outputs)
