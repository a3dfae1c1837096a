"""Phi 1 and 2: attention and MLP side by side behind one norm, part of each head rotated."""

from __future__ import annotations

from typing import Any

from thalweg.infer.models.llama import build_llama_like
from thalweg.infer.models.spec import (
    AttentionSpec,
    DecoderLayerSpec,
    DecoderSpec,
    MLPSpec,
    UnsupportedModelError,
    activation_name,
    build_layer_norm,
    build_linear,
    build_rope,
)


def build_decoder(model: Any) -> DecoderSpec:
    """Describe the model."""
    c, m = model.config, model.model
    if c.qk_layernorm:
        raise UnsupportedModelError("Phi with layer norms on queries and keys")
    rope = build_rope(m.rotary_emb, c.max_position_embeddings)
    layers = []
    for block in m.layers:
        a, norm = block.self_attn, build_layer_norm(block.input_layernorm)
        attention = AttentionSpec(
            num_heads=c.num_attention_heads, num_kv_heads=c.num_key_value_heads, head_dim=a.head_dim,
            qkv=build_linear(a.q_proj, a.k_proj, a.v_proj), out=build_linear(a.dense), scale=a.scaling, rope=rope,
        )  # fmt: skip
        mlp = MLPSpec(
            build_linear(block.mlp.fc1), build_linear(block.mlp.fc2), activation_name(c.hidden_act), gated=False
        )
        layers.append(DecoderLayerSpec(norm, attention, mlp, norm, parallel_residual=True))
    return build_llama_like(model, layers, build_layer_norm(m.final_layernorm))
