"""Cohere's Command R: attention and MLP side by side, neighbouring dims rotated, scaled logits."""

from __future__ import annotations

from typing import Any

import torch

from thalweg.infer.models.llama import build_llama_like, build_mlp, scale_norm
from thalweg.infer.models.spec import (
    AttentionSpec,
    DecoderLayerSpec,
    DecoderSpec,
    NormSpec,
    UnsupportedModelError,
    build_linear,
    build_rope,
)


def build_decoder(model: Any) -> DecoderSpec:
    """Describe the model."""
    c, m = model.config, model.model
    if c.use_qk_norm:
        raise UnsupportedModelError("Cohere with layer norms on queries and keys")
    rope = build_rope(m.rotary_emb, c.max_position_embeddings, interleaved=True)
    layers = []
    for block in m.layers:
        a, norm = block.self_attn, _build_norm(block.input_layernorm)
        attention = AttentionSpec(
            num_heads=c.num_attention_heads, num_kv_heads=c.num_key_value_heads, head_dim=a.head_dim,
            qkv=build_linear(a.q_proj, a.k_proj, a.v_proj), out=build_linear(a.o_proj), scale=a.scaling, rope=rope,
        )  # fmt: skip
        layers.append(DecoderLayerSpec(norm, attention, build_mlp(block.mlp, c), norm, parallel_residual=True))
    return build_llama_like(model, layers, scale_norm(_build_norm(m.norm), float(c.logit_scale)))


def _build_norm(module: Any) -> NormSpec:
    weight = module.weight.detach()
    return NormSpec("layer", weight, torch.zeros_like(weight), module.variance_epsilon)
