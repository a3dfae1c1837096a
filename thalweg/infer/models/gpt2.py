"""GPT-2."""

from __future__ import annotations

from typing import Any

from thalweg.infer.models.spec import (
    AttentionSpec,
    DecoderLayerSpec,
    DecoderSpec,
    MLPSpec,
    UnsupportedModelError,
    activation_name,
    build_layer_norm,
    build_linear,
)


def build_decoder(model: Any) -> DecoderSpec:
    """Describe the model."""
    c, m = model.config, model.transformer
    if c.add_cross_attention:
        raise UnsupportedModelError("GPT-2 with cross attention")
    dim = c.n_embd // c.n_head
    layers = []
    for number, block in enumerate(m.h):
        scale = dim**-0.5 if c.scale_attn_weights else 1.0
        if c.scale_attn_by_inverse_layer_idx:
            scale /= number + 1
        attention = AttentionSpec(
            num_heads=c.n_head, num_kv_heads=c.n_head, head_dim=dim, qkv=build_linear(block.attn.c_attn),
            out=build_linear(block.attn.c_proj), scale=scale,
        )  # fmt: skip
        act = activation_name(c.activation_function)
        mlp = MLPSpec(build_linear(block.mlp.c_fc), build_linear(block.mlp.c_proj), act, gated=False)
        layers.append(DecoderLayerSpec(build_layer_norm(block.ln_1), attention, mlp, build_layer_norm(block.ln_2)))
    return DecoderSpec(
        vocab_size=c.vocab_size,
        hidden_size=c.n_embd,
        max_length=c.n_positions,
        embed=m.wte.weight.detach(),
        layers=layers,
        final_norm=build_layer_norm(m.ln_f),
        lm_head=build_linear(model.lm_head),
        position_embeddings=m.wpe.weight.detach(),
    )
