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

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thalweg.ops._private import forward_ad_active, functorch_active, onednn_linear_op, tracing, unsafe_view
from thalweg.ops.products import CANDIDATES, DTYPES, REFERENCE, Product
from thalweg.ops.table import default_table

_PLAIN_TYPES = (Tensor, nn.Parameter)
_MIN_FLOPS = 4e6  # below it (some 40 us) the Python of an autograd.Function costs what a kernel gains

_NT, _NN, _TN = CANDIDATES["nt"], CANDIDATES["nn"], CANDIDATES["tn"]


def matmul_operators() -> frozenset[Any]:
    """Return the operators beyond torch's usual ones that a dispatch mode sees in a switched layer."""
    operator = onednn_linear_op()
    return frozenset() if operator is None else frozenset({operator})


@dataclass(frozen=True)
class _Plan:
    """How one layer computes: whether its weight is (N, K) or (K, N), and the three candidates."""

    outputs_first: bool
    forward: str
    grad_x: str
    grad_weight: str


class _LinearFunction(torch.autograd.Function):
    """y = x @ W + bias; x (M, K), weight (N, K) or (K, N), y (M, N)."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan
    ) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight if x.requires_grad else None)
        ctx.plan = plan
        return (_NT if plan.outputs_first else _NN)[plan.forward](x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        plan: _Plan = ctx.plan
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        grad_x = grad_weight = None
        if need_x:
            name = REFERENCE if _must_record(grad) else plan.grad_x
            grad_x = (_NN if plan.outputs_first else _NT)[name](grad, weight)
        if need_weight:
            name = REFERENCE if _must_record(grad) else plan.grad_weight
            grad_weight = _TN[name](grad, x) if plan.outputs_first else _TN[name](x, grad)
        return grad_x, grad_weight, grad.sum(0) if need_bias else None, None


def _must_record(grad: Tensor) -> bool:
    # A backward pass records only under create_graph; batched gradients (is_grads_batched,
    # jacobians) arrive inside a vmap.
    return torch.is_grad_enabled() or functorch_active() or type(grad) not in _PLAIN_TYPES


def _eligible(x: Tensor, weight: Tensor, bias: Tensor | None, features: int) -> bool:
    return (
        type(x) in _PLAIN_TYPES
        and type(weight) in _PLAIN_TYPES
        and (bias is None or (type(bias) in _PLAIN_TYPES and bias.dtype == x.dtype and bias.dim() == 1))
        and x.is_cpu
        and weight.is_cpu
        and x.dtype == weight.dtype
        and x.dtype in DTYPES
        and x.layout == weight.layout == torch.strided
        and x.dim() >= 2
        and weight.dim() == 2
        and x.shape[-1] == features
        and x.numel() > 0
        and 2.0 * x.numel() * (weight.numel() // features) >= _MIN_FLOPS
        and not torch.is_autocast_enabled("cpu")
        and not functorch_active()
        and not forward_ad_active()
    )


def plain_only() -> bool:
    """Whether something watches operators that an autograd.Function or a subclass would hide from it."""
    return torch.compiler.is_compiling() or tracing() or functorch_active() or forward_ad_active()


def _plan(x: Tensor, weight: Tensor, k: int, n: int, outputs_first: bool, grad: bool) -> _Plan:
    rows = x.numel() // k
    table, dtype = default_table(), x.dtype
    forward, backward = ("nt", "nn") if outputs_first else ("nn", "nt")
    weight_dims = (n, k) if outputs_first else (k, n)
    return _Plan(
        outputs_first,
        table.pick(forward, dtype, rows, k, n),
        table.pick(backward, dtype, rows, n, k) if grad and x.requires_grad else REFERENCE,
        table.pick("tn", dtype, rows, *weight_dims) if grad and weight.requires_grad else REFERENCE,
    )


def _compute(x: Tensor, weight: Tensor, bias: Tensor | None, outputs_first: bool) -> Tensor | None:
    """Return the layer's output, or None where torch's own operator is the choice."""
    n, k = weight.shape if outputs_first else reversed(weight.shape)
    tensors = (x, weight) if bias is None else (x, weight, bias)
    grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    plan = _plan(x, weight, k, n, outputs_first, grad)
    if plan.forward == plan.grad_x == plan.grad_weight == REFERENCE:
        return None
    rows = x.reshape(-1, k)
    if grad:
        y = _LinearFunction.apply(rows, weight, bias, plan)
    else:
        y = (_NT if outputs_first else _NN)[plan.forward](rows, weight, bias)
    return y if x.dim() == 2 else unsafe_view(y, [*x.shape[:-1], n])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias`` as ``F.linear`` does, equal to it up to rounding.

    x (..., K), weight (N, K), bias (N,) or None; the result (..., N) in the dtype of x.
    """
    if torch.compiler.is_compiling() or tracing() or not _eligible(x, weight, bias, weight.shape[-1]):
        return F.linear(x, weight, bias)
    y = _compute(x, weight, bias, outputs_first=True)
    return F.linear(x, weight, bias) if y is None else y


def conv1d(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return ``x @ weight + bias``, Hugging Face's Conv1D; x (..., K), weight (K, N), bias (N,)."""
    if not torch.compiler.is_compiling() and not tracing() and _eligible(x, weight, bias, weight.shape[0]):
        y = _compute(x, weight, bias, outputs_first=False)
        if y is not None:
            return y
    y = torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight)
    return y.view(*x.shape[:-1], weight.shape[-1])


@dataclass(frozen=True)
class Products:
    """The three products of a linear layer ``x @ weight.T``, none of them recorded by autograd."""

    forward: Product
    grad_x: Product
    grad_weight: Product

    def add_grad_weight(self, total: Tensor, grad: Tensor, x: Tensor) -> None:
        """Add ``grad.T @ x`` to ``total`` (N, K), which may be wider than the operands."""
        if total.dtype == grad.dtype and self.grad_weight is _TN[REFERENCE]:
            total.addmm_(grad.t(), x)
        elif grad.is_cuda and total.dtype == torch.float32 and grad.dtype != torch.float32:
            total.add_(torch.mm(grad.t(), x, out_dtype=torch.float32))
        else:
            total.add_(self.grad_weight(grad, x))


def products_of(x: Tensor, weight: Tensor, *, measured: bool = True) -> Products:
    """The candidates for ``x`` (M, K) and ``weight`` (N, K); torch's own where nothing is measured."""
    if not measured or not _eligible(x, weight, None, weight.shape[-1]):
        return Products(_NT[REFERENCE], _NN[REFERENCE], _TN[REFERENCE])
    (n, k), table = weight.shape, default_table()
    return Products(
        _NT[table.pick("nt", x.dtype, x.shape[0], k, n)],
        _NN[table.pick("nn", x.dtype, x.shape[0], n, k)],
        _TN[table.pick("tn", x.dtype, x.shape[0], n, k)],
    )
