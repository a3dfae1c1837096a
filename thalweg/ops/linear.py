"""Linear layers whose three products are each computed by what this processor does fastest.

``linear`` and ``conv1d`` stand in for ``F.linear`` and Hugging Face's Conv1D.  Whatever
they do not know to be safe goes to torch's own operator: tensor subclasses (DTensor,
fake tensors), other devices and dtypes, autocast, ``torch.func`` transforms, forward-mode
derivatives, tracing and compiling, and products too small to gain.  A second derivative
(``create_graph``) is taken through torch's operators in the backward pass.

Only the parameter and the input themselves are saved for the backward pass, never a copy
or a packed form: FSDP frees and refills a parameter's storage between the passes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thalweg.ops._private import forward_ad_active, functorch_active, tracing
from thalweg.ops.products import CANDIDATES, DTYPES, REFERENCE
from thalweg.ops.table import default_table

_PLAIN_TYPES = (Tensor, nn.Parameter)
_MIN_FLOPS = 4e6  # below it (some 40 us) the Python of an autograd.Function costs what a kernel gains

_NT, _NN, _TN = CANDIDATES["nt"], CANDIDATES["nn"], CANDIDATES["tn"]


class _LinearFunction(torch.autograd.Function):
    """y = x @ weight.T + bias; x (..., K), weight (N, K); ``picks`` names forward, grad x, grad weight."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, picks: tuple[str, str, str]
    ) -> Tensor:
        _save(ctx, x, weight)
        ctx.picks = picks
        return _NT[picks[0]](x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        x, weight = ctx.saved_tensors
        _, pick_x, pick_weight = _differentiable(ctx.picks)
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        grad_2d = grad.reshape(-1, grad.shape[-1])
        grad_x = _NN[pick_x](grad_2d, weight).view(*grad.shape[:-1], -1) if need_x else None
        grad_weight = _TN[pick_weight](grad_2d, x.reshape(-1, x.shape[-1])) if need_weight else None
        return grad_x, grad_weight, grad_2d.sum(0) if need_bias else None, None


class _Conv1DFunction(torch.autograd.Function):
    """y = x @ weight + bias; x (M, K), weight (K, N)."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, picks: tuple[str, str, str]
    ) -> Tensor:
        _save(ctx, x, weight)
        ctx.picks = picks
        return _NN[picks[0]](x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        x, weight = ctx.saved_tensors
        _, pick_x, pick_weight = _differentiable(ctx.picks)
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        grad_x = _NT[pick_x](grad, weight) if need_x else None
        grad_weight = _TN[pick_weight](x, grad) if need_weight else None
        return grad_x, grad_weight, grad.sum(0) if need_bias else None, None


def _save(ctx: Any, x: Tensor, weight: Tensor) -> None:
    ctx.save_for_backward(x if weight.requires_grad else None, weight if x.requires_grad else None)


def _differentiable(picks: tuple[str, str, str]) -> tuple[str, str, str]:
    # Gradients are recorded in a backward pass only under create_graph.
    return (REFERENCE, REFERENCE, REFERENCE) if torch.is_grad_enabled() else picks


def _eligible(x: Tensor, weight: Tensor, bias: Tensor | None, features: int) -> bool:
    return (
        type(x) in _PLAIN_TYPES
        and type(weight) in _PLAIN_TYPES
        and (bias is None or (type(bias) in _PLAIN_TYPES and bias.dtype == x.dtype))
        and x.is_cpu
        and weight.is_cpu
        and x.dtype == weight.dtype
        and x.dtype in DTYPES
        and x.layout == weight.layout == torch.strided
        and x.dim() >= 2
        and weight.dim() == 2
        and x.shape[-1] == features
        and 2.0 * x.numel() * (weight.numel() // features if features else 0) >= _MIN_FLOPS
        and not torch.is_autocast_enabled("cpu")
        and not functorch_active()
        and not forward_ad_active()
        and not tracing()
    )


def _needs_grad(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias`` as ``F.linear`` does, equal to it up to rounding.

    x (..., K), weight (N, K), bias (N,) or None; the result (..., N) in the dtype of x.
    """
    if torch.compiler.is_compiling() or not _eligible(x, weight, bias, weight.shape[-1]):
        return F.linear(x, weight, bias)
    n, k = weight.shape
    rows = x.numel() // k
    table = default_table()
    forward = table.pick("nt", x.dtype, rows, k, n)
    if not _needs_grad(x, weight, bias):
        return _NT[forward](x, weight, bias)
    picks = (
        forward,
        table.pick("nn", x.dtype, rows, n, k) if x.requires_grad else REFERENCE,
        table.pick("tn", x.dtype, rows, n, k) if weight.requires_grad else REFERENCE,
    )
    if picks == (REFERENCE, REFERENCE, REFERENCE):
        return F.linear(x, weight, bias)
    return _LinearFunction.apply(x, weight, bias, picks)  # type: ignore[return-value]


def conv1d(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return ``x @ weight + bias``, Hugging Face's Conv1D; x (..., K), weight (K, N), bias (N,)."""
    rows_x = x.reshape(-1, x.shape[-1])
    shape = (*x.shape[:-1], weight.shape[-1])
    if torch.compiler.is_compiling() or not _eligible(rows_x, weight, bias, weight.shape[0]):
        return torch.addmm(bias, rows_x, weight).view(shape)
    k, n = weight.shape
    rows = rows_x.shape[0]
    table = default_table()
    forward = table.pick("nn", x.dtype, rows, k, n)
    if not _needs_grad(x, weight, bias):
        return _NN[forward](rows_x, weight, bias).view(shape)
    picks = (
        forward,
        table.pick("nt", x.dtype, rows, n, k) if x.requires_grad else REFERENCE,
        table.pick("tn", x.dtype, rows, k, n) if weight.requires_grad else REFERENCE,
    )
    if picks == (REFERENCE, REFERENCE, REFERENCE):
        return torch.addmm(bias, rows_x, weight).view(shape)
    return _Conv1DFunction.apply(rows_x, weight, bias, picks).view(shape)  # type: ignore[union-attr]
