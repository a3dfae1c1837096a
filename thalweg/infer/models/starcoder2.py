"""StarCoder 2: Llama with layer norms and an MLP without a gate."""

from __future__ import annotations

from typing import Any

from thalweg.infer.describe import MLP, Attention, Decoder, Layer, activation, layer_norm, linear, rotary
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
            qkv=linear(a.q_proj, a.k_proj, a.v_proj), out=linear(a.o_proj), scale=a.scaling, rotary=table,
            window=window(a, c),
        )  # fmt: skip
        inner = MLP(linear(block.mlp.c_fc), linear(block.mlp.c_proj), activation(c.hidden_act), gated=False)
        norms = layer_norm(block.input_layernorm), layer_norm(block.post_attention_layernorm)
        layers.append(Layer(norms[0], attention, inner, norms[1]))
    return around(model, layers, layer_norm(m.norm))
