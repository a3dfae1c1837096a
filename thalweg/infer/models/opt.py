"""OPT: learned positions that start at 2, ReLU."""

from __future__ import annotations

from typing import Any

from thalweg.infer.describe import MLP, Attention, Decoder, Layer, Unsupported, activation, layer_norm, linear


def decoder(model: Any) -> Decoder:
    """Describe the model."""
    c, m = model.config, model.model.decoder
    if not c.do_layer_norm_before or m.project_in is not None or m.final_layer_norm is None:
        raise Unsupported("OPT with norms after each part, or with projected embeddings")
    heads = c.num_attention_heads
    dim = c.hidden_size // heads
    layers = []
    for block in m.layers:
        a = block.self_attn
        attention = Attention(
            heads=heads, kv_heads=heads, dim=dim, qkv=linear(a.q_proj, a.k_proj, a.v_proj),
            out=linear(a.out_proj), scale=dim**-0.5,
        )  # fmt: skip
        mlp = MLP(linear(block.fc1), linear(block.fc2), activation(c.activation_function), gated=False)
        norms = layer_norm(block.self_attn_layer_norm), layer_norm(block.final_layer_norm)
        layers.append(Layer(norms[0], attention, mlp, norms[1]))
    return Decoder(
        vocab=c.vocab_size,
        width=c.hidden_size,
        max_length=c.max_position_embeddings,
        embed=m.embed_tokens.weight.detach(),
        layers=layers,
        norm=layer_norm(m.final_layer_norm),
        head=linear(model.lm_head),
        positions=m.embed_positions.weight.detach()[m.embed_positions.offset :],
    )
