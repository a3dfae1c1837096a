"""Attention as a GPU's kernels do it, on fake tensors that say they are on a processor."""

from __future__ import annotations

from typing import Any

from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_SDPA_ARGS = ("query", "key", "value", "attn_mask", "dropout_p")


class GpuAttentionMode(TorchFunctionMode):
    """``scaled_dot_product_attention`` without dropout.

    The processor's fused kernel knows no dropout, and the plain one that takes its place keeps the weights of
    all pairs of tokens; a GPU's kernels draw it again in the backward pass and keep none.
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
        return func(*args, **kwargs)
