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

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thalweg.ops import _torch_private
from thalweg.ops._torch_private import (
    ONEDNN_LINEAR,
    forward_ad_active,
    functorch_active,
    hook_ids,
    is_jit_tracing,
    unsafe_view,
)
from thalweg.ops.dynamic_subclass import DynamicSubclass, cached_subclass
from thalweg.ops.linear.autotune_cache import get_autotune_cache
from thalweg.ops.linear.kernels import KERNELS, REFERENCE, SUPPORTED_DTYPES, MatmulKernel

_PLAIN_TYPES = (Tensor, nn.Parameter)
MIN_FLOPS = 4e6  # below it (some 40 us) the Python of an autograd.Function costs what a kernel gains


def get_matmul_ops() -> frozenset[Any]:
    """Return the operators beyond torch's usual ones that a dispatch mode sees in a switched layer."""
    return frozenset() if ONEDNN_LINEAR is None else frozenset({ONEDNN_LINEAR})


@dataclass(frozen=True)
class LinearKernels:
    """The three products of a linear layer ``x @ weight.T``, none of them recorded by autograd.

    Or of one ``x @ weight``, with a weight (K, N): then ``out_features_first`` is false.
    """

    forward: MatmulKernel
    grad_x: MatmulKernel
    grad_weight: MatmulKernel
    out_features_first: bool

    def accumulate_grad_weight(self, total: Tensor, grad: Tensor, x: Tensor) -> None:
        """Add ``grad.T @ x`` to ``total`` (N, K), which may be wider than the operands."""
        if total.dtype == grad.dtype and self.grad_weight is KERNELS["tn"][REFERENCE]:
            total.addmm_(grad.t(), x)
        elif grad.is_cuda and total.dtype == torch.float32 and grad.dtype != torch.float32:
            total.add_(torch.mm(grad.t(), x, out_dtype=torch.float32))
        else:
            total.add_(self.grad_weight(grad, x))


_REFERENCES = {
    first: LinearKernels(*(KERNELS[kind][REFERENCE] for kind in kinds), out_features_first=first)
    for first, kinds in ((True, ("nt", "nn", "tn")), (False, ("nn", "nt", "tn")))
}


class _LinearFunction(torch.autograd.Function):
    """y = x @ W + bias; x (M, K), weight (N, K) or (K, N), y (M, N)."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kernels: LinearKernels
    ) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight if x.requires_grad else None)
        ctx.kernels = kernels
        return kernels.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        kernels: LinearKernels = ctx.kernels
        # A backward pass records only under create_graph; batched gradients (is_grads_batched,
        # jacobians) arrive inside a vmap.
        if torch.is_grad_enabled() or functorch_active() or type(grad) not in _PLAIN_TYPES:
            kernels = _REFERENCES[kernels.out_features_first]
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        grad_x = kernels.grad_x(grad, weight) if need_x else None
        grad_weight = None
        if need_weight:
            grad_weight = kernels.grad_weight(*((grad, x) if kernels.out_features_first else (x, grad)))
        return grad_x, grad_weight, grad.sum(0) if need_bias else None, None


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


def _choose_kernels(
    x: Tensor, weight: Tensor, out_features_first: bool, *, need_x: bool = True, need_weight: bool = True
) -> LinearKernels:
    n, k = weight.shape if out_features_first else reversed(weight.shape)
    forward, backward = ("nt", "nn") if out_features_first else ("nn", "nt")
    products = (forward, True, k, n), (backward, need_x, n, k), ("tn", need_weight, *weight.shape)
    autotune_cache, rows = get_autotune_cache(), x.numel() // k
    chosen = (
        KERNELS[kind][autotune_cache.best_kernel(kind, x.dtype, rows, *dims) if needed else REFERENCE]
        for kind, needed, *dims in products
    )
    return LinearKernels(*chosen, out_features_first=out_features_first)


def _run_kernels(x: Tensor, weight: Tensor, bias: Tensor | None, out_features_first: bool) -> Tensor | None:
    """Return the layer's output, or None where torch's own operator is the choice."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    need_x, need_weight = grad and x.requires_grad, grad and weight.requires_grad
    kernels = _choose_kernels(x, weight, out_features_first, need_x=need_x, need_weight=need_weight)
    if kernels == _REFERENCES[out_features_first]:
        return None
    rows = x.reshape(-1, x.shape[-1])
    y = _LinearFunction.apply(rows, weight, bias, kernels) if grad else kernels.forward(rows, weight, bias)
    return y if x.dim() == 2 else unsafe_view(y, [*x.shape[:-1], y.shape[-1]])


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


def get_linear_kernels(x: Tensor, weight: Tensor, *, autotuned: bool = True) -> LinearKernels:
    """The candidates for ``x`` (M, K) and ``weight`` (N, K); torch's own where nothing is measured."""
    if not autotuned or not _is_eligible(x, weight, None, weight.shape[-1]):
        return _REFERENCES[True]
    return _choose_kernels(x, weight, out_features_first=True)


# Moving a model's layers over


class _PatchedLinear(DynamicSubclass):
    pass


def _linear_forward(self: Any, input: Tensor) -> Tensor:
    return linear(input, self.weight, self.bias)


def _conv1d_forward(self: Any, x: Tensor) -> Tensor:
    return conv1d(x, self.weight, self.bias)


def _forward_for(module: nn.Module) -> Callable[..., Tensor] | None:
    if type(module) is nn.Linear:
        return _linear_forward
    # Only a model that has such layers can have loaded the library that defines them.
    library = sys.modules.get("transformers.pytorch_utils")
    if library is not None and type(module) is getattr(library, "Conv1D", None):
        return _conv1d_forward
    return None


def patch_linear_layers(model: nn.Module, mode: str = "auto") -> int:
    """Let the model's linear layers choose their kernels and return how many were switched.

    ``"auto"`` switches every ``nn.Linear`` and Hugging Face ``Conv1D`` in the model whose type
    is exactly that, and that has neither hooks nor a replaced forward nor a computed weight;
    ``"torch"`` switches none.  Layers that are not on a CPU go on through torch's operator.
    Switch before sharding: FSDP gives the modules it wraps a class of its own.
    """
    if mode == "torch" or ONEDNN_LINEAR is None:
        return 0
    _torch_private.register_onednn_flops()
    num_patched = 0
    for module in model.modules():
        forward = _forward_for(module)
        is_replaced = "forward" in module.__dict__ or "weight" not in module._parameters or hook_ids(module)
        if forward is not None and not is_replaced:
            module.__class__ = cached_subclass(type(module), _PatchedLinear, forward=forward)
            num_patched += 1
    return num_patched


def is_patched(layer: nn.Module) -> bool:
    """Whether this layer's kernels are chosen by measurement."""
    return isinstance(layer, _PatchedLinear)
