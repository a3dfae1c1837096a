"""What a GPU's kernels save for the backward pass, on fake tensors that say they are on a processor.

A processor has other kernels, or none, for some operators, and then autograd keeps what their parts make.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_SDPA_ARGS = ("query", "key", "value", "attn_mask", "dropout_p")
_RMS_NORM_ARGS = ("input", "normalized_shape", "weight", "eps")
_DROPOUT_ARGS = ("input", "p", "training", "inplace")


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
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            kwargs = dict(zip(_SDPA_ARGS, args, strict=False)) | kwargs
            rest = args[len(_SDPA_ARGS) :]
            kwargs["dropout_p"] = 0.0
            if rest:
                kwargs["is_causal"] = rest[0]
            args = ()
        elif func is F.rms_norm or func is torch.rms_norm:
            given = dict(zip(_RMS_NORM_ARGS, args, strict=False)) | kwargs
            input, weight = given["input"], given.get("weight")
            if weight is None or weight.dtype == input.dtype:
                return _FusedRmsNorm.apply(input, weight, len(given["normalized_shape"]))
        elif func is F.dropout:
            given = {"p": 0.5, "training": True, "inplace": False} | dict(zip(_DROPOUT_ARGS, args, strict=False)) | kwargs
            if given["training"] and 0.0 < given["p"] < 1.0 and not given["inplace"]:
                return torch.native_dropout(given["input"], given["p"], True)[0]
        return func(*args, **kwargs)
