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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from thalweg.ops._torch_private import is_fake
from thalweg.ops.linear.functional import get_linear_kernels

Reduction = Literal["mean", "sum", "none"]
LogitTransform = Callable[[Tensor], Tensor]

_TILE_BYTES, _ACCELERATOR_TILE_BYTES = 16 * 2**20, 256 * 2**20
_MIN_ROWS = 64


def tile_rows(num_rows: int, vocab_size: int, device: str) -> int:
    """How many rows a tile takes: fp32 logits of 16 MiB on a CPU, 256 MiB elsewhere, at least 64 rows."""
    budget_rows = (_TILE_BYTES if device == "cpu" else _ACCELERATOR_TILE_BYTES) // (4 * vocab_size)
    return max(1, min(num_rows, max(_MIN_ROWS, budget_rows)))


@dataclass(frozen=True)
class _TileOptions:
    """What does not change from tile to tile.  ``logit_transform`` goes from the product to the logits."""

    num_rows: int
    ignore_index: int
    label_smoothing: float
    logit_transform: LogitTransform | None
    grad_in_forward: bool
    is_scalar: bool
    measured_kernels: bool


_GradSums = list[Tensor | None]  # of hidden (N, D), weight (V, D), bias (V,); None where nobody wants them


class _TiledCrossEntropy(torch.autograd.Function):
    """The operands, labels (N,), row weights (N,) fp32 and options, to fp32 (N,) or ()."""

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
        operands, needs_grad = (hidden, weight, bias), ctx.needs_input_grad[:3]
        sums = _zero_grad_sums(operands, needs_grad) if options.grad_in_forward and any(needs_grad) else None
        losses = torch.zeros(hidden.shape[0], dtype=row_weights.dtype, device=hidden.device)
        _run_tiles(operands, labels, row_weights, options, losses, sums)
        ctx.save_for_backward(hidden, weight, bias, labels, row_weights)
        ctx.options, ctx.sums, ctx.needs_grad = options, sums, needs_grad
        # Adding 0 x the factors makes a mean over no token NaN, as torch has it.
        return losses.sum() + 0 * row_weights.sum() if options.is_scalar else losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *operands, labels, row_weights = ctx.saved_tensors
        grad = grads[0].to(row_weights.dtype)
        sums, ctx.sums = ctx.sums, None  # handed out once: whoever gets a gradient may keep its memory
        if sums is None:
            sums = _zero_grad_sums(operands, ctx.needs_grad)
            _run_tiles(operands, labels, row_weights * grad, ctx.options, None, sums)
        else:
            sums = [None if total is None else total.mul_(grad) for total in sums]
        pairs = zip(sums, operands, strict=True)
        return *(None if total is None else total.to(operand.dtype) for total, operand in pairs), None, None, None


def _zero_grad_sums(operands: Sequence[Tensor | None], needs_grad: Sequence[bool]) -> _GradSums:
    """Of hidden in its own dtype, as each row is written once."""
    return [
        None
        if x is None or not want
        else torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32) if index else x.dtype)
        for index, (x, want) in enumerate(zip(operands, needs_grad, strict=True))
    ]


def _run_tiles(
    operands: Sequence[Any],
    labels: Tensor,
    row_weights: Tensor,
    options: _TileOptions,
    losses: Tensor | None,
    sums: _GradSums | None,
) -> None:
    """Fill ``losses`` and add to ``sums``, whichever is there.  Tiles of ignored rows are passed over."""
    hidden, weight, bias = operands
    product = get_linear_kernels(hidden[: options.num_rows], weight, autotuned=options.measured_kernels)
    for start in range(0, hidden.shape[0], options.num_rows):
        rows = slice(start, start + options.num_rows)
        valid = labels[rows] != options.ignore_index
        if hidden.is_cpu and not is_fake(hidden) and not bool(valid.any()):
            continue
        with torch.autocast(hidden.device.type, enabled=False):
            raw = product.forward(hidden[rows], weight, bias)
            tile_labels = torch.where(valid, labels[rows], 0).unsqueeze(1)
            tile_weights = torch.where(valid, row_weights[rows], 0.0)
            tile_losses, grad = _run_tile(raw, tile_labels, tile_weights, options, losses is not None, sums is not None)
            if losses is not None and tile_losses is not None:
                losses[rows] = torch.where(valid, tile_losses, 0.0).to(losses.dtype)
            if sums is None or grad is None:
                continue
            grad_hidden, grad_weight, grad_bias = sums
            if grad_hidden is not None:
                grad_hidden[rows] = product.grad_x(grad, weight)
            if grad_weight is not None:
                product.accumulate_grad_weight(grad_weight, grad, hidden[rows])
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=grad_bias.dtype)


def _run_tile(
    raw: Tensor, labels: Tensor, row_weights: Tensor, options: _TileOptions, want_losses: bool, want_grad: bool
) -> tuple[Tensor | None, Tensor | None]:
    """One tile's losses (n,) and the gradient of ``raw``, weights applied; ``labels`` (n, 1)."""
    logits, losses = raw, None
    if options.logit_transform is not None:
        with torch.set_grad_enabled(want_grad):
            raw = raw.detach().requires_grad_(want_grad)
            logits = options.logit_transform(raw)
    z = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
    if options.logit_transform is not None and z.dtype == logits.dtype:
        z = z.clone()  # the curve's own backward may need its result; ours works in place
    row_weights = row_weights.to(z.dtype)
    smoothing_per_class = options.label_smoothing / z.shape[1]
    target = z.gather(1, labels)
    total = z.sum(1, keepdim=True) if want_losses and options.label_smoothing else None
    max_logit = z.amax(1, keepdim=True)
    z.sub_(max_logit).exp_()
    exp_sum = z.sum(1, keepdim=True)
    log_sum_exp = exp_sum.log().add_(max_logit)
    if want_losses:
        row_losses = log_sum_exp - (1 - options.label_smoothing) * target
        if total is not None:
            row_losses -= total * smoothing_per_class
        losses = row_losses.squeeze(1) * row_weights
    if not want_grad:
        return losses, None
    z.mul_(row_weights.unsqueeze(1) / exp_sum)
    if options.label_smoothing:
        z.sub_(smoothing_per_class * row_weights.unsqueeze(1))
    z.scatter_add_(1, labels, (options.label_smoothing - 1) * row_weights.unsqueeze(1))
    grad = z.to(logits.dtype)
    return losses, grad if options.logit_transform is None else torch.autograd.grad(logits, raw, grad)[0]


def tiled_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    logit_transform: LogitTransform | None = None,
    tile_tokens: int | None = None,
    measured_kernels: bool = False,
) -> Tensor:
    """Cross-entropy in nats of ``hidden @ weight.T + bias`` against ``labels``, in fp32 (fp64 of fp64).

    hidden (..., D), weight (V, D), bias (V,), labels (...) of class numbers.  ``reduction``: ``"mean"`` over
    the tokens that are not ``ignore_index``; ``"sum"``; ``"none"``, one loss for each token.
    ``logit_transform``: an elementwise function of the logits, such as a softcap.  ``tile_tokens``: rows of a
    tile, by default :func:`tile_rows`.  ``measured_kernels``: let the processor's measured kernels take the
    products, as ``cpu_kernels`` does.

    There is no second derivative.  Raises ValueError for shapes that do not belong together.
    """
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not multiply: they must be "
            "(..., D) and (V, D)"
        )
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels {tuple(labels.shape)} must have the shape {tuple(hidden.shape[:-1])}")
    if labels.dtype.is_floating_point:
        raise ValueError(f"labels must be class numbers, not {labels.dtype}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} must have the shape {tuple(weight.shape[:1])}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; it must be 'mean', 'sum' or 'none'")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing!r}; it must be from 0 to 1")
    if tile_tokens is not None and tile_tokens < 1:
        raise ValueError(f"tile_tokens is {tile_tokens!r}; it must be at least 1")
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    is_scalar = reduction != "none"
    options = _TileOptions(
        num_rows=tile_tokens or tile_rows(rows.shape[0], weight.shape[0], device),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        logit_transform=logit_transform,
        grad_in_forward=is_scalar and hidden.dtype != torch.float16 and torch.is_grad_enabled(),
        is_scalar=is_scalar,
        measured_kernels=measured_kernels,
    )
    row_weights = (flat != ignore_index).to(torch.promote_types(hidden.dtype, torch.float32))
    if reduction == "mean":
        row_weights /= row_weights.sum()
    loss: Any = _TiledCrossEntropy.apply(rows, weight, bias, flat, row_weights, options)
    return loss if is_scalar else loss.view(labels.shape)
