"""Phi 3: Llama with queries, keys and values in one weight, gate and up in another."""

from __future__ import annotations

from typing import Any

from thalweg.infer.describe import MLP, Attention, Decoder, Layer, activation, linear, rms_norm, rotary
from thalweg.infer.models.llama import around, window


def decoder(model: Any) -> Decoder:
    """Describe the model."""
    c, m = model.config, model.model
    table = rotary(m.rotary_emb, c.max_position_embeddings)
    layers = []
    for block in m.layers:
        a = block.self_attn
        attention = Attention(
            heads=c.num_attention_heads, kv_heads=c.num_key_value_heads, dim=a.head_dim,
            qkv=linear(a.qkv_proj), out=linear(a.o_proj), scale=a.scaling, rotary=table, window=window(a, c),
        )  # fmt: skip
        up, down = linear(block.mlp.gate_up_proj), linear(block.mlp.down_proj)
        mlp = MLP(up, down, activation(c.hidden_act), gated=True)
        norms = rms_norm(block.input_layernorm), rms_norm(block.post_attention_layernorm)
        layers.append(Layer(norms[0], attention, mlp, norms[1]))
    return around(model, layers, rms_norm(m.norm))
