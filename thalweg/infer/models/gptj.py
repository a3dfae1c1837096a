"""GPT-J: attention and MLP side by side behind one norm, neighbouring dims of part of each head rotated."""

from __future__ import annotations

from typing import Any

from thalweg.infer.describe import MLP, Attention, Decoder, Layer, Rotary, activation, layer_norm, linear


def decoder(model: Any) -> Decoder:
    """Describe the model."""
    c, m = model.config, model.transformer
    dim = c.n_embd // c.n_head
    layers, table = [], None
    for block in m.h:
        a, norm = block.attn, layer_norm(block.ln_1)
        if table is None:  # (length, sines then cosines), the same in every layer
            sin, cos = a.embed_positions[: c.n_positions].chunk(2, dim=-1)
            table = Rotary(cos.contiguous(), sin.contiguous(), interleaved=True)
        attention = Attention(
            heads=c.n_head, kv_heads=c.n_head, dim=dim, qkv=linear(a.q_proj, a.k_proj, a.v_proj),
            out=linear(a.out_proj), scale=dim**-0.5, rotary=table,
        )  # fmt: skip
        act = activation(c.activation_function)
        inner = MLP(linear(block.mlp.fc_in), linear(block.mlp.fc_out), act, gated=False)
        layers.append(Layer(norm, attention, inner, norm, parallel=True))
    return Decoder(
        vocab=c.vocab_size,
        width=c.n_embd,
        max_length=c.n_positions,
        embed=m.wte.weight.detach(),
        layers=layers,
        norm=layer_norm(m.ln_f),
        head=linear(model.lm_head),
    )
