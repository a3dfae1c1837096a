"""GPT-2."""

from __future__ import annotations

from typing import Any

from thalweg.infer.describe import MLP, Attention, Decoder, Layer, Unsupported, activation, layer_norm, linear


def decoder(model: Any) -> Decoder:
    """Describe the model."""
    c, m = model.config, model.transformer
    if c.add_cross_attention:
        raise Unsupported("GPT-2 with cross attention")
    dim = c.n_embd // c.n_head
    layers = []
    for number, block in enumerate(m.h):
        scale = dim**-0.5 if c.scale_attn_weights else 1.0
        if c.scale_attn_by_inverse_layer_idx:
            scale /= number + 1
        attention = Attention(
            heads=c.n_head, kv_heads=c.n_head, dim=dim, qkv=linear(block.attn.c_attn),
            out=linear(block.attn.c_proj), scale=scale,
        )  # fmt: skip
        act = activation(c.activation_function)
        mlp = MLP(linear(block.mlp.c_fc), linear(block.mlp.c_proj), act, gated=False)
        layers.append(Layer(layer_norm(block.ln_1), attention, mlp, layer_norm(block.ln_2)))
    return Decoder(
        vocab=c.vocab_size,
        width=c.n_embd,
        max_length=c.n_positions,
        embed=m.wte.weight.detach(),
        layers=layers,
        norm=layer_norm(m.ln_f),
        head=linear(model.lm_head),
        positions=m.wpe.weight.detach(),
    )
