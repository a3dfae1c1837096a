"""Attention of fp16 models on a CPU, computed in fp32 where that is faster.

torch's half-precision attention on a processor without half-precision arithmetic is scalar.  Hugging Face's
models look their attention up by name for each call; here is one more name, and a model is told to use it.
"""

import importlib
import sys
import timeit
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thalweg.ops.autograd import run_in_clean_thread

ATTN_IMPLEMENTATION = "thalweg_widened_sdpa"
_MIN_SPEEDUP = 1.1


def upcast_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Any]:
    """Hugging Face's SDPA attention; fp16 on a CPU is computed in fp32 and rounded once."""
    hf_sdpa = importlib.import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward
    if not (query.is_cpu and query.dtype == torch.float16):
        return hf_sdpa(module, query, key, value, attention_mask, **options)
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.float()
    output, weights = hf_sdpa(module, query.float(), key.float(), value.float(), attention_mask, **options)
    return output.to(query.dtype), weights


@cache
def upcast_is_faster() -> bool:
    """Whether fp32 attention is faster than fp16's here, casts included; measured once."""
    return run_in_clean_thread(_benchmark)


def _benchmark() -> bool:
    q = torch.full((1, 4, 128, 64), 0.5, dtype=torch.float16)
    run_fp16 = lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True)
    run_fp32 = lambda: F.scaled_dot_product_attention(q.float(), q.float(), q.float(), is_causal=True).half()
    # The first of each is slower, and so never the least.
    fp16, fp32 = (min(timeit.repeat(call, number=1, repeat=4)) for call in (run_fp16, run_fp32))
    return fp16 > _MIN_SPEEDUP * fp32


def apply_upcast_sdpa(model: nn.Module) -> bool:
    """Let a Hugging Face model that attends by SDPA take :func:`upcast_sdpa`; tells whether it does."""
    library: Any = sys.modules.get("transformers.modeling_utils")
    hub_model: Any = model
    if library is None or not isinstance(model, library.PreTrainedModel):
        return False
    if getattr(hub_model.config, "_attn_implementation", None) != "sdpa" or not upcast_is_faster():
        return False
    masks: Any = importlib.import_module("transformers.masking_utils")
    library.ALL_ATTENTION_FUNCTIONS.register(ATTN_IMPLEMENTATION, upcast_sdpa)
    masks.ALL_MASK_ATTENTION_FUNCTIONS.register(ATTN_IMPLEMENTATION, masks.sdpa_mask)
    hub_model.set_attn_implementation(ATTN_IMPLEMENTATION)
    return True
