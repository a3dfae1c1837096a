"""OPT: learned positions that start at 2, ReLU.

The 350M form has its norms behind each sum, and embeddings narrower than its layers: what widens and narrows
them is multiplied into embedding and head.
"""

from __future__ import annotations

from typing import Any

from thalweg.infer.models.spec import (
    AttentionSpec,
    DecoderLayerSpec,
    DecoderSpec,
    LinearSpec,
    MLPSpec,
    activation_name,
    build_layer_norm,
    build_linear,
)


def build_decoder(model: Any) -> DecoderSpec:
    """Describe the model."""
    c, m = model.config, model.model.decoder
    num_heads = c.num_attention_heads
    dim = c.hidden_size // num_heads
    layers = []
    for block in m.layers:
        a = block.self_attn
        attention = AttentionSpec(
            num_heads=num_heads, num_kv_heads=num_heads, head_dim=dim, qkv=build_linear(a.q_proj, a.k_proj, a.v_proj),
            out=build_linear(a.out_proj), scale=dim**-0.5,
        )  # fmt: skip
        mlp = MLPSpec(
            build_linear(block.fc1), build_linear(block.fc2), activation_name(c.activation_function), gated=False
        )
        norms = build_layer_norm(block.self_attn_layer_norm), build_layer_norm(block.final_layer_norm)
        if c.do_layer_norm_before:
            layers.append(DecoderLayerSpec(norms[0], attention, mlp, norms[1]))
        else:
            layers.append(
                DecoderLayerSpec(None, attention, mlp, None, attn_residual_norm=norms[0], mlp_residual_norm=norms[1])
            )
    embed, head = m.embed_tokens.weight.detach(), build_linear(model.lm_head)
    if m.project_in is not None:
        embed = embed @ m.project_in.weight.detach().t()
        shape = (head.out_features, c.hidden_size)
        unprojected_head, projection = head, m.project_out.weight.detach()
        head = LinearSpec(lambda: unprojected_head.weight @ projection, None, shape)
    return DecoderSpec(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        max_length=c.max_position_embeddings,
        embed=embed,
        layers=layers,
        final_norm=None if m.final_layer_norm is None else build_layer_norm(m.final_layer_norm),
        lm_head=head,
        position_embeddings=m.embed_positions.weight.detach()[m.embed_positions.offset :],
    )
