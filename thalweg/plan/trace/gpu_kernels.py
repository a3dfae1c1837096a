"""What a GPU's kernels save for the backward pass, on fake tensors that say they are on a processor.

A processor has other kernels, or none, for some operators, and then autograd keeps what their parts make.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_NORM_ARGS = ("input", "normalized_shape", "weight", "eps")
_ARGS: dict[Any, tuple[str, ...]] = {
    F.scaled_dot_product_attention: ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
    F.rms_norm: _NORM_ARGS,
    torch.rms_norm: _NORM_ARGS,
    F.dropout: ("input", "p", "training", "inplace"),
}


class _FusedRmsNorm(torch.autograd.Function):
    """``aten::_fused_rms_norm``: it saves its input and one number a row, where a processor widens to fp32 and keeps
    two tensors of the input's shape in that."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, num_dims: int) -> Tensor:  # type: ignore[override]
        rstd = input.new_empty(input.shape[: input.ndim - num_dims], dtype=torch.float32)
        ctx.save_for_backward(input, weight, rstd)
        return torch.empty_like(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        input, weight, _ = ctx.saved_tensors
        return torch.empty_like(input), None if weight is None else torch.empty_like(weight), None


class GpuKernelMode(TorchFunctionMode):
    """Attention with dropout, ``rms_norm`` and dropout.

    ``scaled_dot_product_attention``: a processor's fused kernel knows no dropout, and the plain one that takes its
    place keeps the weights of all pairs of tokens; a GPU's kernels draw it again in the backward pass and keep none.
    ``rms_norm``: fused where the weight has the input's dtype.  ``dropout``: a GPU's keeps a byte for each element.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _ARGS:
            return func(*args, **kwargs)
        given = dict(zip(_ARGS[func], args, strict=False)) | kwargs
        if func is F.scaled_dot_product_attention:
            return func(**given | {"dropout_p": 0.0})
        if func is F.dropout:
            p, is_kernel = given.get("p", 0.5), given.get("training", True) and not given.get("inplace")
            return torch.native_dropout(given["input"], p, True)[0] if is_kernel and 0 < p < 1 else func(**given)
        input, weight = given["input"], given.get("weight")
        if weight is not None and weight.dtype != input.dtype:
            return func(**given)
        return _FusedRmsNorm.apply(input, weight, len(given["normalized_shape"]))
