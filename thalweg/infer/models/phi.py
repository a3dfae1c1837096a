"""Phi 1 and 2: attention and MLP side by side behind one norm, part of each head rotated."""

from __future__ import annotations

from typing import Any

from thalweg.infer.describe import (
    MLP,
    Attention,
    Decoder,
    Layer,
    Unsupported,
    activation,
    layer_norm,
    linear,
    rotary,
)
from thalweg.infer.models.llama import around


def decoder(model: Any) -> Decoder:
    """Describe the model."""
    c, m = model.config, model.model
    if c.qk_layernorm:
        raise Unsupported("Phi with layer norms on queries and keys")
    table = rotary(m.rotary_emb, c.max_position_embeddings)
    layers = []
    for block in m.layers:
        a, norm = block.self_attn, layer_norm(block.input_layernorm)
        attention = Attention(
            heads=c.num_attention_heads, kv_heads=c.num_key_value_heads, dim=a.head_dim,
            qkv=linear(a.q_proj, a.k_proj, a.v_proj), out=linear(a.dense), scale=a.scaling, rotary=table,
        )  # fmt: skip
        mlp = MLP(linear(block.mlp.fc1), linear(block.mlp.fc2), activation(c.hidden_act), gated=False)
        layers.append(Layer(norm, attention, mlp, norm, parallel=True))
    return around(model, layers, layer_norm(m.final_layernorm))
