"""GPT-NeoX and Pythia: attention and MLP side by side behind a norm each, part of each head rotated."""

from __future__ import annotations

from typing import Any

from thalweg.infer.models.spec import (
    AttentionSpec,
    DecoderLayerSpec,
    DecoderSpec,
    MLPSpec,
    activation_name,
    build_layer_norm,
    build_linear,
    build_rope,
    deinterleave_qkv,
)


def build_decoder(model: Any) -> DecoderSpec:
    """Describe the model."""
    c, m = model.config, model.gpt_neox
    num_heads = c.num_attention_heads
    dim = c.hidden_size // num_heads
    rope = build_rope(m.rotary_emb, c.max_position_embeddings)
    layers = []
    for block in m.layers:
        attention = AttentionSpec(
            num_heads=num_heads, num_kv_heads=num_heads, head_dim=dim,
            qkv=deinterleave_qkv(build_linear(block.attention.query_key_value), num_heads, dim),
            out=build_linear(block.attention.dense), scale=dim**-0.5, rope=rope,
        )  # fmt: skip
        up, down = build_linear(block.mlp.dense_h_to_4h), build_linear(block.mlp.dense_4h_to_h)
        mlp = MLPSpec(up, down, activation_name(c.hidden_act), gated=False)
        norms = build_layer_norm(block.input_layernorm), build_layer_norm(block.post_attention_layernorm)
        layers.append(DecoderLayerSpec(norms[0], attention, mlp, norms[1], parallel_residual=c.use_parallel_residual))
    return DecoderSpec(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        max_length=c.max_position_embeddings,
        embed=m.embed_in.weight.detach(),
        layers=layers,
        final_norm=build_layer_norm(m.final_layer_norm),
        lm_head=build_linear(getattr(model, "embed_out", None) or model.lm_head),
    )
