"""Attention of fp16 models on a CPU, computed in fp32 where that is faster.

torch's half-precision attention on a processor without half-precision arithmetic is scalar.  Hugging Face's
models look their attention up by name for each call; here is one more name, and a model is told to use it.
"""

from __future__ import annotations

import importlib
import sys
import time
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thalweg.ops.isolation import isolated

NAME = "thalweg_widened_sdpa"
_GAIN = 1.1


def widened_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Hugging Face's SDPA attention; fp16 on a CPU is computed in fp32 and rounded once."""
    plain = importlib.import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward
    if not (query.is_cpu and query.dtype == torch.float16):
        return plain(module, query, key, value, attention_mask, **options)
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.float()
    output, weights = plain(module, query.float(), key.float(), value.float(), attention_mask, **options)
    return output.to(query.dtype), weights


@cache
def widening_pays() -> bool:
    """Whether fp32 attention is faster than fp16's here, casts included; measured once."""
    return isolated(_measure)


def _measure() -> bool:
    q = torch.full((1, 4, 128, 64), 0.5, dtype=torch.float16)

    def narrow() -> None:
        F.scaled_dot_product_attention(q, q, q, is_causal=True)

    def wide() -> None:
        F.scaled_dot_product_attention(q.float(), q.float(), q.float(), is_causal=True).half()

    best = []
    for call in (narrow, wide):
        call()
        times = []
        for _ in range(3):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        best.append(min(times))
    return best[0] > _GAIN * best[1]


def widen_attention(model: nn.Module) -> bool:
    """Let a Hugging Face model that attends by SDPA take :func:`widened_attention`; tells whether it does."""
    library: Any = sys.modules.get("transformers.modeling_utils")
    hub_model: Any = model
    if library is None or not isinstance(model, library.PreTrainedModel):
        return False
    if getattr(hub_model.config, "_attn_implementation", None) != "sdpa" or not widening_pays():
        return False
    masks: Any = importlib.import_module("transformers.masking_utils")
    library.ALL_ATTENTION_FUNCTIONS.register(NAME, widened_attention)
    masks.ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, masks.sdpa_mask)
    hub_model.set_attn_implementation(NAME)
    return True
