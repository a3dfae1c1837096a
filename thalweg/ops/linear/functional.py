"""Linear layers whose three products are each computed by what this processor does fastest.

``linear`` and ``conv1d`` stand in for ``F.linear`` and Hugging Face's Conv1D.  Whatever
they do not know to be safe goes to torch's own operator: tensor subclasses (DTensor,
fake tensors), other devices and dtypes, autocast, ``torch.func`` transforms, forward-mode
derivatives, tracing and compiling, and products too small to gain.  A second derivative
(``create_graph``) is taken through torch's operators in the backward pass.

Only the parameter and the input themselves are saved for the backward pass, never a copy
or a packed form: FSDP frees and refills a parameter's storage between the passes.

:func:`patch_linear_layers` moves a model's layers over to these functions, layer by layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thalweg.ops import _torch_private
from thalweg.ops._torch_private import (
    forward_ad_active,
    functorch_active,
    is_jit_tracing,
    onednn_linear_op,
    unsafe_view,
)
from thalweg.ops.dynamic_subclass import DynamicSubclass, make_subclass
from thalweg.ops.linear.autotune_cache import get_autotune_cache
from thalweg.ops.linear.kernels import KERNELS, REFERENCE, SUPPORTED_DTYPES, MatmulKernel

_PLAIN_TYPES = (Tensor, nn.Parameter)
MIN_FLOPS = 4e6  # below it (some 40 us) the Python of an autograd.Function costs what a kernel gains

_NT, _NN, _TN = KERNELS["nt"], KERNELS["nn"], KERNELS["tn"]


def get_matmul_ops() -> frozenset[Any]:
    """Return the operators beyond torch's usual ones that a dispatch mode sees in a switched layer."""
    operator = onednn_linear_op()
    return frozenset() if operator is None else frozenset({operator})


@dataclass(frozen=True)
class _KernelChoice:
    """How one layer computes: whether its weight is (N, K) or (K, N), and the three candidates."""

    out_features_first: bool
    forward: str
    grad_x: str
    grad_weight: str


class _LinearFunction(torch.autograd.Function):
    """y = x @ W + bias; x (M, K), weight (N, K) or (K, N), y (M, N)."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, choice: _KernelChoice
    ) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight if x.requires_grad else None)
        ctx.choice = choice
        return (_NT if choice.out_features_first else _NN)[choice.forward](x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        choice: _KernelChoice = ctx.choice
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        grad_x = grad_weight = None
        if need_x:
            name = REFERENCE if _needs_double_backward(grad) else choice.grad_x
            grad_x = (_NN if choice.out_features_first else _NT)[name](grad, weight)
        if need_weight:
            name = REFERENCE if _needs_double_backward(grad) else choice.grad_weight
            grad_weight = _TN[name](grad, x) if choice.out_features_first else _TN[name](x, grad)
        return grad_x, grad_weight, grad.sum(0) if need_bias else None, None


def _needs_double_backward(grad: Tensor) -> bool:
    # A backward pass records only under create_graph; batched gradients (is_grads_batched,
    # jacobians) arrive inside a vmap.
    return torch.is_grad_enabled() or functorch_active() or type(grad) not in _PLAIN_TYPES


def _is_eligible(x: Tensor, weight: Tensor, bias: Tensor | None, in_features: int) -> bool:
    if type(x) not in _PLAIN_TYPES or type(weight) not in _PLAIN_TYPES or not (x.is_cpu and weight.is_cpu):
        return False
    if bias is not None and (type(bias) not in _PLAIN_TYPES or bias.dtype != x.dtype or bias.dim() != 1):
        return False
    if x.dtype != weight.dtype or x.dtype not in SUPPORTED_DTYPES or not x.layout == weight.layout == torch.strided:
        return False
    if x.dim() < 2 or weight.dim() != 2 or x.shape[-1] != in_features or x.numel() == 0:
        return False
    if 2.0 * x.numel() * (weight.numel() // in_features) < MIN_FLOPS:
        return False
    return not (torch.is_autocast_enabled("cpu") or functorch_active() or forward_ad_active())


def must_use_plain_ops() -> bool:
    """Whether something watches operators that an autograd.Function or a subclass would hide from it."""
    return torch.compiler.is_compiling() or is_jit_tracing() or functorch_active() or forward_ad_active()


def _choose_kernels(x: Tensor, weight: Tensor, k: int, n: int, out_features_first: bool, grad: bool) -> _KernelChoice:
    rows = x.numel() // k
    autotune_cache, dtype = get_autotune_cache(), x.dtype
    forward, backward = ("nt", "nn") if out_features_first else ("nn", "nt")
    weight_dims = (n, k) if out_features_first else (k, n)
    return _KernelChoice(
        out_features_first,
        autotune_cache.best_kernel(forward, dtype, rows, k, n),
        autotune_cache.best_kernel(backward, dtype, rows, n, k) if grad and x.requires_grad else REFERENCE,
        autotune_cache.best_kernel("tn", dtype, rows, *weight_dims) if grad and weight.requires_grad else REFERENCE,
    )


def _run_kernels(x: Tensor, weight: Tensor, bias: Tensor | None, out_features_first: bool) -> Tensor | None:
    """Return the layer's output, or None where torch's own operator is the choice."""
    n, k = weight.shape if out_features_first else reversed(weight.shape)
    tensors = (x, weight) if bias is None else (x, weight, bias)
    grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    choice = _choose_kernels(x, weight, k, n, out_features_first, grad)
    if choice.forward == choice.grad_x == choice.grad_weight == REFERENCE:
        return None
    rows = x.reshape(-1, k)
    if grad:
        y = _LinearFunction.apply(rows, weight, bias, choice)
    else:
        y = (_NT if out_features_first else _NN)[choice.forward](rows, weight, bias)
    return y if x.dim() == 2 else unsafe_view(y, [*x.shape[:-1], n])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias`` as ``F.linear`` does, equal to it up to rounding.

    x (..., K), weight (N, K), bias (N,) or None; the result (..., N) in the dtype of x.
    """
    if torch.compiler.is_compiling() or is_jit_tracing() or not _is_eligible(x, weight, bias, weight.shape[-1]):
        return F.linear(x, weight, bias)
    y = _run_kernels(x, weight, bias, out_features_first=True)
    return F.linear(x, weight, bias) if y is None else y


def conv1d(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return ``x @ weight + bias``, Hugging Face's Conv1D; x (..., K), weight (K, N), bias (N,)."""
    if not torch.compiler.is_compiling() and not is_jit_tracing() and _is_eligible(x, weight, bias, weight.shape[0]):
        y = _run_kernels(x, weight, bias, out_features_first=False)
        if y is not None:
            return y
    y = torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight)
    return y.view(*x.shape[:-1], weight.shape[-1])


@dataclass(frozen=True)
class LinearKernels:
    """The three products of a linear layer ``x @ weight.T``, none of them recorded by autograd."""

    forward: MatmulKernel
    grad_x: MatmulKernel
    grad_weight: MatmulKernel

    def accumulate_grad_weight(self, total: Tensor, grad: Tensor, x: Tensor) -> None:
        """Add ``grad.T @ x`` to ``total`` (N, K), which may be wider than the operands."""
        if total.dtype == grad.dtype and self.grad_weight is _TN[REFERENCE]:
            total.addmm_(grad.t(), x)
        elif grad.is_cuda and total.dtype == torch.float32 and grad.dtype != torch.float32:
            total.add_(torch.mm(grad.t(), x, out_dtype=torch.float32))
        else:
            total.add_(self.grad_weight(grad, x))


def get_linear_kernels(x: Tensor, weight: Tensor, *, autotuned: bool = True) -> LinearKernels:
    """The candidates for ``x`` (M, K) and ``weight`` (N, K); torch's own where nothing is measured."""
    if not autotuned or not _is_eligible(x, weight, None, weight.shape[-1]):
        return LinearKernels(_NT[REFERENCE], _NN[REFERENCE], _TN[REFERENCE])
    (n, k), autotune_cache = weight.shape, get_autotune_cache()
    products = (_NT, "nt", k, n), (_NN, "nn", n, k), (_TN, "tn", n, k)
    return LinearKernels(*(t[autotune_cache.best_kernel(kind, x.dtype, len(x), *dims)] for t, kind, *dims in products))


# Moving a model's layers over


class _PatchedLinear(DynamicSubclass):
    pass


def _linear_forward(self: Any, input: Tensor) -> Tensor:
    return linear(input, self.weight, self.bias)


def _conv1d_forward(self: Any, x: Tensor) -> Tensor:
    return conv1d(x, self.weight, self.bias)


@cache
def _patched_class(base_class: type, forward: Callable[..., Tensor]) -> type:
    return make_subclass(base_class, _PatchedLinear, forward=forward)


def _forward_for(module: nn.Module) -> Callable[..., Tensor] | None:
    if type(module) is nn.Linear:
        return _linear_forward
    # Only a model that has such layers can have loaded the library that defines them.
    library = sys.modules.get("transformers.pytorch_utils")
    if library is not None and type(module) is getattr(library, "Conv1D", None):
        return _conv1d_forward
    return None


def _is_unmodified(module: nn.Module) -> bool:
    hook_dicts = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    has_hooks = any(getattr(module, table) for table in hook_dicts)
    return "forward" not in module.__dict__ and "weight" in module._parameters and not has_hooks


def patch_linear_layers(model: nn.Module, mode: str = "auto") -> int:
    """Let the model's linear layers choose their kernels and return how many were switched.

    ``"auto"`` switches every ``nn.Linear`` and Hugging Face ``Conv1D`` in the model whose type
    is exactly that, and that has neither hooks nor a replaced forward nor a computed weight;
    ``"torch"`` switches none.  Layers that are not on a CPU go on through torch's operator.
    Switch before sharding: FSDP gives the modules it wraps a class of its own.
    """
    if mode == "torch" or onednn_linear_op() is None:
        return 0
    _torch_private.register_onednn_flops()
    num_patched = 0
    for module in model.modules():
        forward = _forward_for(module)
        if forward is not None and _is_unmodified(module):
            module.__class__ = _patched_class(type(module), forward)
            num_patched += 1
    return num_patched


def is_patched(layer: nn.Module) -> bool:
    """Whether this layer's kernels are chosen by measurement."""
    return isinstance(layer, _PatchedLinear)
