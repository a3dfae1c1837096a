"""OLMo: Llama with layer norms that have no weights."""

from __future__ import annotations

from typing import Any

import torch

from thalweg.infer.models.llama import build_llama_like, build_mlp
from thalweg.infer.models.spec import (
    AttentionSpec,
    DecoderLayerSpec,
    DecoderSpec,
    NormSpec,
    UnsupportedModelError,
    build_linear,
    build_rope,
)

_EPS = 1e-5  # as in the model's own code, which has no setting for it


def build_decoder(model: Any) -> DecoderSpec:
    """Describe the model."""
    c, m = model.config, model.model
    if c.clip_qkv is not None:
        raise UnsupportedModelError("OLMo with queries, keys and values that are clipped")
    rope = build_rope(m.rotary_emb, c.max_position_embeddings)
    norm = NormSpec("layer", torch.ones(c.hidden_size), torch.zeros(c.hidden_size), _EPS)
    layers = []
    for block in m.layers:
        a = block.self_attn
        attention = AttentionSpec(
            num_heads=c.num_attention_heads, num_kv_heads=c.num_key_value_heads, head_dim=a.head_dim,
            qkv=build_linear(a.q_proj, a.k_proj, a.v_proj), out=build_linear(a.o_proj), scale=a.scaling, rope=rope,
        )  # fmt: skip
        layers.append(DecoderLayerSpec(norm, attention, build_mlp(block.mlp, c), norm))
    return build_llama_like(model, layers, norm)
