"""GPT-J: attention and MLP side by side behind one norm, neighbouring dims of part of each head rotated."""

from __future__ import annotations

from typing import Any

from thalweg.infer.models.spec import (
    AttentionSpec,
    DecoderLayerSpec,
    DecoderSpec,
    MLPSpec,
    RopeTable,
    activation_name,
    build_layer_norm,
    build_linear,
)


def build_decoder(model: Any) -> DecoderSpec:
    """Describe the model."""
    c, m = model.config, model.transformer
    dim = c.n_embd // c.n_head
    layers, rope = [], None
    for block in m.h:
        a, norm = block.attn, build_layer_norm(block.ln_1)
        if rope is None:  # (length, sines then cosines), the same in every layer
            sin, cos = a.embed_positions[: c.n_positions].chunk(2, dim=-1)
            rope = RopeTable(cos.contiguous(), sin.contiguous(), interleaved=True)
        attention = AttentionSpec(
            num_heads=c.n_head, num_kv_heads=c.n_head, head_dim=dim, qkv=build_linear(a.q_proj, a.k_proj, a.v_proj),
            out=build_linear(a.out_proj), scale=dim**-0.5, rope=rope,
        )  # fmt: skip
        act = activation_name(c.activation_function)
        inner = MLPSpec(build_linear(block.mlp.fc_in), build_linear(block.mlp.fc_out), act, gated=False)
        layers.append(DecoderLayerSpec(norm, attention, inner, norm, parallel_residual=True))
    return DecoderSpec(
        vocab_size=c.vocab_size,
        hidden_size=c.n_embd,
        max_length=c.n_positions,
        embed=m.wte.weight.detach(),
        layers=layers,
        final_norm=build_layer_norm(m.ln_f),
        lm_head=build_linear(model.lm_head),
    )
