"""StableLM: Llama with layer norms, part of each head rotated, attention and MLP side by side where asked."""

from __future__ import annotations

from typing import Any

from thalweg.infer.describe import Attention, Decoder, Layer, Unsupported, layer_norm, linear, rotary
from thalweg.infer.models.llama import around, mlp


def decoder(model: Any) -> Decoder:
    """Describe the model."""
    c, m = model.config, model.model
    if c.qk_layernorm:
        raise Unsupported("StableLM with layer norms on queries and keys")
    table = rotary(m.rotary_emb, c.max_position_embeddings)
    layers = []
    for block in m.layers:
        a, first = block.self_attn, layer_norm(block.input_layernorm)
        attention = Attention(
            heads=c.num_attention_heads, kv_heads=c.num_key_value_heads, dim=a.head_dim,
            qkv=linear(a.q_proj, a.k_proj, a.v_proj), out=linear(a.o_proj), scale=a.head_dim**-0.5,
            rotary=table,
        )  # fmt: skip
        parallel = c.use_parallel_residual
        second = first if parallel else layer_norm(block.post_attention_layernorm)
        layers.append(Layer(first, attention, mlp(block.mlp, c), second, parallel=parallel))
    return around(model, layers, layer_norm(m.norm))
