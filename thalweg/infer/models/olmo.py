"""OLMo: Llama with layer norms that have no weights."""

from __future__ import annotations

from typing import Any

import torch

from thalweg.infer.describe import Attention, Decoder, Layer, Norm, Unsupported, linear, rotary
from thalweg.infer.models.llama import around, mlp

_EPS = 1e-5  # as in the model's own code, which has no setting for it


def decoder(model: Any) -> Decoder:
    """Describe the model."""
    c, m = model.config, model.model
    if c.clip_qkv is not None:
        raise Unsupported("OLMo with queries, keys and values that are clipped")
    table = rotary(m.rotary_emb, c.max_position_embeddings)
    norm = Norm("layer", torch.ones(c.hidden_size), torch.zeros(c.hidden_size), _EPS)
    layers = []
    for block in m.layers:
        a = block.self_attn
        attention = Attention(
            heads=c.num_attention_heads, kv_heads=c.num_key_value_heads, dim=a.head_dim,
            qkv=linear(a.q_proj, a.k_proj, a.v_proj), out=linear(a.o_proj), scale=a.scaling, rotary=table,
        )  # fmt: skip
        layers.append(Layer(norm, attention, mlp(block.mlp, c), norm))
    return around(model, layers, norm)
