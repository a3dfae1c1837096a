"""StableLM: Llama with layer norms, part of each head rotated, attention and MLP side by side where asked."""

from __future__ import annotations

from typing import Any

from thalweg.infer.models.llama import build_llama_like, build_mlp
from thalweg.infer.models.spec import (
    AttentionSpec,
    DecoderLayerSpec,
    DecoderSpec,
    UnsupportedModelError,
    build_layer_norm,
    build_linear,
    build_rope,
)


def build_decoder(model: Any) -> DecoderSpec:
    """Describe the model."""
    c, m = model.config, model.model
    if c.qk_layernorm:
        raise UnsupportedModelError("StableLM with layer norms on queries and keys")
    rope = build_rope(m.rotary_emb, c.max_position_embeddings)
    layers = []
    for block in m.layers:
        a, first = block.self_attn, build_layer_norm(block.input_layernorm)
        attention = AttentionSpec(
            num_heads=c.num_attention_heads, num_kv_heads=c.num_key_value_heads, head_dim=a.head_dim,
            qkv=build_linear(a.q_proj, a.k_proj, a.v_proj), out=build_linear(a.o_proj), scale=a.head_dim**-0.5,
            rope=rope,
        )  # fmt: skip
        parallel = c.use_parallel_residual
        second = first if parallel else build_layer_norm(block.post_attention_layernorm)
        layers.append(DecoderLayerSpec(first, attention, build_mlp(block.mlp, c), second, parallel_residual=parallel))
    return build_llama_like(model, layers, build_layer_norm(m.norm))
