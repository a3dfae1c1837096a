"""Cross-entropy of a linear head, tile by tile: full logits never exist.

The picture, for N tokens of width D and a vocabulary of V:

    hidden [N, D] --n rows--> logits [n, V] --> loss [n], d logits [n, V] --> d hidden [n, D], d weight += ...

Logits and their gradient live for one tile at a time: the peak is 2 n V elements instead of 2 N V or 3 N V.
After Cut Cross-Entropy (Wijmans et al. 2024) and Liger's fused linear cross-entropy (Hsu et al. 2024).

Phases.  *Forward*: for each tile the logits, the row losses and, where gradients are wanted and the result is
one number, at once the gradients of hidden, weight and bias for an incoming gradient of 1.  *Backward*: those
times the incoming gradient.  Where they are not there (fp16, where an unscaled gradient would underflow; one
loss per token; a second backward pass of a retained graph) the tiles are computed again.

Invariants: the result and its gradients equal ``F.cross_entropy(F.linear(hidden, weight, bias))`` up to the
order of fp32 sums; row losses, softmax and the sums over tiles are fp32 whatever the operands are; each of
hidden, weight and bias gets one gradient by autograd, so a sharded weight is reduced once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from thalweg.ops._torch_private import is_fake
from thalweg.ops.linear.functional import LinearKernels, get_linear_kernels

Reduction = Literal["mean", "sum", "none"]
LogitTransform = Callable[[Tensor], Tensor]

_TILE_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
_MIN_ROWS = 64


def tile_rows(num_rows: int, vocab_size: int, device: str) -> int:
    """How many rows a tile takes: fp32 logits of 16 MiB on a CPU, 256 MiB elsewhere, at least 64 rows."""
    budget_rows = _TILE_BYTES.get(device, _TILE_BYTES["cuda"]) // (4 * vocab_size)
    return max(1, min(num_rows, max(_MIN_ROWS, budget_rows)))


@dataclass(frozen=True)
class _TileOptions:
    """What does not change from tile to tile.  ``logit_transform`` goes from the product to the logits."""

    num_rows: int
    ignore_index: int
    label_smoothing: float
    z_loss: float
    logit_transform: LogitTransform | None
    grad_in_forward: bool
    is_scalar: bool
    measured_kernels: bool


@dataclass
class _GradSums:
    """The gradients being added up; None where nobody wants them."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    def scaled(self, factor: Tensor | None, like: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Each sum times ``factor``, in place, in the dtype of its operand."""
        scaled: list[Tensor | None] = []
        for total, operand in zip((self.hidden, self.weight, self.bias), like, strict=True):
            if total is not None and operand is not None:
                total = (total if factor is None else total.mul_(factor)).to(operand.dtype)
            scaled.append(total)
        return tuple(scaled)


@dataclass(frozen=True)
class _LossInputs:
    """hidden (N, D), weight (V, D), bias (V,) or None, labels (N,), factors (N,) fp32."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    row_weights: Tensor
    options: _TileOptions


class _TiledCrossEntropy(torch.autograd.Function):
    """The fields of :class:`_LossInputs`, to fp32 (N,) or ()."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        row_weights: Tensor,
        options: _TileOptions,
    ) -> Tensor:
        inputs = _LossInputs(hidden, weight, bias, labels, row_weights, options)
        needs_grad = ctx.needs_input_grad[:3]
        sums = _zero_grad_sums(inputs, needs_grad) if options.grad_in_forward and any(needs_grad) else None
        losses = torch.zeros(hidden.shape[0], dtype=row_weights.dtype, device=hidden.device)
        _run_tiles(inputs, losses, sums)
        ctx.save_for_backward(hidden, weight, bias, labels, row_weights)
        ctx.options, ctx.sums, ctx.needs_grad = options, sums, needs_grad
        # Adding 0 x the factors makes a mean over no token NaN, as torch has it.
        return losses.sum() + 0 * row_weights.sum() if options.is_scalar else losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, row_weights = ctx.saved_tensors
        grad = grads[0].to(row_weights.dtype)
        sums, ctx.sums = ctx.sums, None  # handed out once: whoever gets a gradient may keep its memory
        if sums is None:
            inputs = _LossInputs(hidden, weight, bias, labels, row_weights * grad, ctx.options)
            sums, grad = _zero_grad_sums(inputs, ctx.needs_grad), None
            _run_tiles(inputs, None, sums)
        return (*sums.scaled(grad, (hidden, weight, bias)), None, None, None)


def _zero_grad_sums(inputs: _LossInputs, needs_grad: tuple[bool, ...]) -> _GradSums:
    def zeros(tensor: Tensor | None, want: bool) -> Tensor | None:
        if tensor is None or not want:
            return None
        return torch.zeros_like(tensor, dtype=_accumulation_dtype(tensor.dtype))

    hidden = torch.zeros_like(inputs.hidden) if needs_grad[0] else None
    return _GradSums(hidden, zeros(inputs.weight, needs_grad[1]), zeros(inputs.bias, needs_grad[2]))


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _run_tiles(inputs: _LossInputs, losses: Tensor | None, sums: _GradSums | None) -> None:
    """Fill ``losses`` and add to ``sums``, whichever is there.  Tiles of ignored rows are passed over."""
    options, hidden = inputs.options, inputs.hidden
    product = get_linear_kernels(hidden[: options.num_rows], inputs.weight, autotuned=options.measured_kernels)
    for start in range(0, hidden.shape[0], options.num_rows):
        rows = slice(start, start + options.num_rows)
        valid = inputs.labels[rows] != options.ignore_index
        if hidden.is_cpu and not is_fake(hidden) and not bool(valid.any()):
            continue
        with torch.autocast(hidden.device.type, enabled=False):
            raw = product.forward(hidden[rows], inputs.weight, inputs.bias)
            grad = _run_tile(raw, inputs, rows, valid, losses, sums is not None)
            if sums is not None and grad is not None:
                _add_gradients(sums, product, grad, inputs, rows)


def _run_tile(
    raw: Tensor, inputs: _LossInputs, rows: slice, valid: Tensor, losses: Tensor | None, want_grad: bool
) -> Tensor | None:
    """One tile's losses into ``losses``; returns the gradient of ``raw``, factors applied."""
    options, logits = inputs.options, raw
    if options.logit_transform is not None:
        with torch.set_grad_enabled(want_grad):
            raw = raw.detach().requires_grad_(want_grad)
            logits = options.logit_transform(raw)
    z = logits.detach().to(_accumulation_dtype(logits.dtype))
    if options.logit_transform is not None and z.dtype == logits.dtype:
        z = z.clone()  # the curve's own backward may need its result; ours works in place
    labels = torch.where(valid, inputs.labels[rows], 0).unsqueeze(1)
    row_weights = torch.where(valid, inputs.row_weights[rows], 0.0).to(z.dtype)
    smoothing_per_class = options.label_smoothing / z.shape[1]
    target = z.gather(1, labels)
    total = z.sum(1, keepdim=True) if losses is not None and options.label_smoothing else None
    max_logit = z.amax(1, keepdim=True)
    z.sub_(max_logit).exp_()
    exp_sum = z.sum(1, keepdim=True)
    log_sum_exp = exp_sum.log().add_(max_logit)
    if losses is not None:
        row_losses = log_sum_exp - (1 - options.label_smoothing) * target
        if total is not None:
            row_losses -= total * smoothing_per_class
        if options.z_loss:
            row_losses += options.z_loss * log_sum_exp.square()
        losses[rows] = torch.where(valid, row_losses.squeeze(1) * row_weights, 0.0).to(losses.dtype)
    if not want_grad:
        return None
    grad_scale = row_weights.unsqueeze(1) / exp_sum
    if options.z_loss:
        grad_scale *= 1 + 2 * options.z_loss * log_sum_exp
    z.mul_(grad_scale)
    if options.label_smoothing:
        z.sub_(smoothing_per_class * row_weights.unsqueeze(1))
    z.scatter_add_(1, labels, (options.label_smoothing - 1) * row_weights.unsqueeze(1))
    grad = z.to(logits.dtype)
    return grad if options.logit_transform is None else torch.autograd.grad(logits, raw, grad)[0]


def _add_gradients(sums: _GradSums, product: LinearKernels, grad: Tensor, inputs: _LossInputs, rows: slice) -> None:
    if sums.hidden is not None:
        sums.hidden[rows] = product.grad_x(grad, inputs.weight)
    if sums.weight is not None:
        product.accumulate_grad_weight(sums.weight, grad, inputs.hidden[rows])
    if sums.bias is not None:
        sums.bias += grad.sum(0, dtype=sums.bias.dtype)


def _row_weights(
    labels: Tensor, ignore_index: int, reduction: str, token_weights: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """What each row's loss is multiplied with: its weight, divided by their sum for a mean."""
    valid = labels != ignore_index
    row_weights = (
        valid.to(dtype) if token_weights is None else torch.where(valid, token_weights.detach().to(dtype), 0.0)
    )
    return row_weights / row_weights.sum() if reduction == "mean" else row_weights


def tiled_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    token_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    logit_transform: LogitTransform | None = None,
    tile_tokens: int | None = None,
    gradients: Literal["auto", "forward", "backward"] = "auto",
    measured_kernels: bool = False,
) -> Tensor:
    """Cross-entropy in nats of ``hidden @ weight.T + bias`` against ``labels``, in fp32 (fp64 of fp64).

    hidden (..., D), weight (V, D), bias (V,), labels (...) of class numbers, ``token_weights`` (...) or
    None.  ``reduction``: ``"mean"`` over the tokens that are not ``ignore_index``, weighted by
    ``token_weights`` if given; ``"sum"``; ``"none"``, one loss for each token.  Logits are multiplied with
    ``logit_scale``, then capped as ``softcap * tanh(logits / softcap)``; ``logit_transform``, an elementwise function,
    takes the place of both.  ``z_loss`` times the square of log(sum(exp(logits))) is added (PaLM,
    Chowdhery et al. 2022, section 5).  ``tile_tokens``: rows of a tile, by default :func:`tile_rows`.
    ``gradients``: computed in the forward pass (no second product, d weight is held until backward) or in
    the backward pass (one product more); ``"auto"`` is forward, but backward for fp16 and for ``"none"``.
    ``measured_kernels``: let the processor's measured kernels take the products, as ``cpu_kernels`` does.

    ``token_weights`` get no gradient, and there is no second derivative.  Raises ValueError for shapes that
    do not belong together.
    """
    _check_arguments(hidden, weight, labels, bias, reduction, token_weights, label_smoothing, tile_tokens, gradients)
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if logit_transform is None and (logit_scale != 1.0 or softcap is not None):
        logit_transform = _scale_and_softcap(logit_scale, softcap)
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    weights = None if token_weights is None else token_weights.reshape(-1)
    grad_in_forward = gradients == "forward" or (gradients == "auto" and hidden.dtype != torch.float16)
    is_scalar = reduction != "none"
    options = _TileOptions(
        num_rows=tile_tokens or tile_rows(rows.shape[0], weight.shape[0], device),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        logit_transform=logit_transform,
        grad_in_forward=grad_in_forward and is_scalar and torch.is_grad_enabled(),
        is_scalar=is_scalar,
        measured_kernels=measured_kernels,
    )
    row_weights = _row_weights(flat, ignore_index, reduction, weights, _accumulation_dtype(hidden.dtype))
    loss: Any = _TiledCrossEntropy.apply(rows, weight, bias, flat, row_weights, options)
    return loss if is_scalar else loss.view(labels.shape)


def _scale_and_softcap(scale: float, softcap: float | None) -> LogitTransform:
    def transform(logits: Tensor) -> Tensor:
        logits = logits.to(_accumulation_dtype(logits.dtype)) * scale
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    return transform


def _check_arguments(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    reduction: str,
    token_weights: Tensor | None,
    label_smoothing: float,
    tile_tokens: int | None,
    gradients: str,
) -> None:
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not multiply: they must be "
            "(..., D) and (V, D)"
        )
    for name, tensor in (("labels", labels), ("token_weights", token_weights)):
        if tensor is not None and tensor.shape != hidden.shape[:-1]:
            raise ValueError(f"{name} {tuple(tensor.shape)} must have the shape {tuple(hidden.shape[:-1])}")
    if labels.dtype.is_floating_point:
        raise ValueError(f"labels must be class numbers, not {labels.dtype}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} must have the shape {tuple(weight.shape[:1])}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; it must be 'mean', 'sum' or 'none'")
    if gradients not in ("auto", "forward", "backward"):
        raise ValueError(f"gradients is {gradients!r}; it must be 'auto', 'forward' or 'backward'")
    if gradients == "forward" and reduction == "none":
        raise ValueError("gradients='forward' needs one loss: use reduction 'mean' or 'sum'")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing!r}; it must be from 0 to 1")
    if tile_tokens is not None and tile_tokens < 1:
        raise ValueError(f"tile_tokens is {tile_tokens!r}; it must be at least 1")
