"""Phi 3: Llama with queries, keys and values in one weight, gate and up in another."""

from __future__ import annotations

from typing import Any

from thalweg.infer.models.llama import build_llama_like, get_sliding_window
from thalweg.infer.models.spec import (
    AttentionSpec,
    DecoderLayerSpec,
    DecoderSpec,
    MLPSpec,
    activation_name,
    build_linear,
    build_rms_norm,
    build_rope,
)


def build_decoder(model: Any) -> DecoderSpec:
    """Describe the model."""
    c, m = model.config, model.model
    rope = build_rope(m.rotary_emb, c.max_position_embeddings)
    layers = []
    for block in m.layers:
        a = block.self_attn
        attention = AttentionSpec(
            num_heads=c.num_attention_heads, num_kv_heads=c.num_key_value_heads, head_dim=a.head_dim,
            qkv=build_linear(a.qkv_proj), out=build_linear(a.o_proj), scale=a.scaling, rope=rope,
            sliding_window=get_sliding_window(a, c),
        )  # fmt: skip
        up, down = build_linear(block.mlp.gate_up_proj), build_linear(block.mlp.down_proj)
        mlp = MLPSpec(up, down, activation_name(c.hidden_act), gated=True)
        norms = build_rms_norm(block.input_layernorm), build_rms_norm(block.post_attention_layernorm)
        layers.append(DecoderLayerSpec(norms[0], attention, mlp, norms[1]))
    return build_llama_like(model, layers, build_rms_norm(m.norm))
