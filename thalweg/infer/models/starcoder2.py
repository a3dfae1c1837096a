"""StarCoder 2: Llama with layer norms and an MLP without a gate."""

from __future__ import annotations

from typing import Any

from thalweg.infer.models.llama import build_llama_like, get_sliding_window
from thalweg.infer.models.spec import (
    AttentionSpec,
    DecoderLayerSpec,
    DecoderSpec,
    MLPSpec,
    activation_name,
    build_layer_norm,
    build_linear,
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
            qkv=build_linear(a.q_proj, a.k_proj, a.v_proj), out=build_linear(a.o_proj), scale=a.scaling, rope=rope,
            sliding_window=get_sliding_window(a, c),
        )  # fmt: skip
        inner = MLPSpec(
            build_linear(block.mlp.c_fc), build_linear(block.mlp.c_proj), activation_name(c.hidden_act), gated=False
        )
        norms = build_layer_norm(block.input_layernorm), build_layer_norm(block.post_attention_layernorm)
        layers.append(DecoderLayerSpec(norms[0], attention, inner, norms[1]))
    return build_llama_like(model, layers, build_layer_norm(m.norm))
