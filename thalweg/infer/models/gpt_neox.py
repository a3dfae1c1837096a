"""GPT-NeoX and Pythia: attention and MLP side by side behind a norm each, part of each head rotated."""

from __future__ import annotations

from typing import Any

from thalweg.infer.describe import (
    MLP,
    Attention,
    Decoder,
    Layer,
    activation,
    interleaved_heads,
    layer_norm,
    linear,
    rotary,
)


def decoder(model: Any) -> Decoder:
    """Describe the model."""
    c, m = model.config, model.gpt_neox
    heads = c.num_attention_heads
    dim = c.hidden_size // heads
    table = rotary(m.rotary_emb, c.max_position_embeddings)
    layers = []
    for block in m.layers:
        attention = Attention(
            heads=heads, kv_heads=heads, dim=dim,
            qkv=interleaved_heads(linear(block.attention.query_key_value), heads, dim),
            out=linear(block.attention.dense), scale=dim**-0.5, rotary=table,
        )  # fmt: skip
        up, down = linear(block.mlp.dense_h_to_4h), linear(block.mlp.dense_4h_to_h)
        mlp = MLP(up, down, activation(c.hidden_act), gated=False)
        norms = layer_norm(block.input_layernorm), layer_norm(block.post_attention_layernorm)
        layers.append(Layer(norms[0], attention, mlp, norms[1], parallel=c.use_parallel_residual))
    return Decoder(
        vocab=c.vocab_size,
        width=c.hidden_size,
        max_length=c.max_position_embeddings,
        embed=m.embed_in.weight.detach(),
        layers=layers,
        norm=layer_norm(m.final_layer_norm),
        head=linear(getattr(model, "embed_out", None) or model.lm_head),
    )
