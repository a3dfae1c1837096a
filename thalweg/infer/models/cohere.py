"""Cohere's Command R: attention and MLP side by side, neighbouring dims rotated, scaled logits."""

from __future__ import annotations

from typing import Any

import torch

from thalweg.infer.describe import Attention, Decoder, Layer, Norm, Unsupported, linear, rotary
from thalweg.infer.models.llama import around, mlp, scaled


def decoder(model: Any) -> Decoder:
    """Describe the model."""
    c, m = model.config, model.model
    if c.use_qk_norm:
        raise Unsupported("Cohere with layer norms on queries and keys")
    table = rotary(m.rotary_emb, c.max_position_embeddings, interleaved=True)
    layers = []
    for block in m.layers:
        a, norm = block.self_attn, _norm(block.input_layernorm)
        attention = Attention(
            heads=c.num_attention_heads, kv_heads=c.num_key_value_heads, dim=a.head_dim,
            qkv=linear(a.q_proj, a.k_proj, a.v_proj), out=linear(a.o_proj), scale=a.scaling, rotary=table,
        )  # fmt: skip
        layers.append(Layer(norm, attention, mlp(block.mlp, c), norm, parallel=True))
    return around(model, layers, scaled(_norm(m.norm), float(c.logit_scale)))


def _norm(module: Any) -> Norm:
    weight = module.weight.detach()
    return Norm("layer", weight, torch.zeros_like(weight), module.variance_epsilon)
