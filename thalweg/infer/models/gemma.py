"""Gemma 1 to 3: scaled embeddings, norms that store weight - 1, norms after each part, capped logits."""

from __future__ import annotations

from typing import Any

from thalweg.infer.describe import (
    MLP,
    Attention,
    Decoder,
    Layer,
    Rotary,
    activation,
    linear,
    rms_norm,
    rotary,
)
from thalweg.infer.models.llama import window


def decoder(model: Any) -> Decoder:
    """Describe the model."""
    c, m = model.config, model.model
    kinds = sorted(set(getattr(c, "layer_types", None) or [])) if c.model_type == "gemma3_text" else []
    length = c.max_position_embeddings
    tables = {kind: rotary(m.rotary_emb, length, kind) for kind in kinds} or {
        "": rotary(m.rotary_emb, length)
    }
    return Decoder(
        vocab=c.vocab_size,
        width=c.hidden_size,
        max_length=length,
        embed=m.embed_tokens.weight.detach(),
        embed_scale=float(c.hidden_size) ** 0.5,
        layers=[_layer(layer, c, tables) for layer in m.layers],
        norm=rms_norm(m.norm, 1.0),
        head=linear(model.lm_head),
        logit_softcap=getattr(c, "final_logit_softcapping", None) or 0.0,
    )


def _layer(layer: Any, c: Any, tables: dict[str, Rotary]) -> Layer:
    a = layer.self_attn
    normed = hasattr(a, "q_norm")
    attention = Attention(
        heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads,
        dim=a.head_dim,
        qkv=linear(a.q_proj, a.k_proj, a.v_proj),
        out=linear(a.o_proj),
        scale=a.scaling,
        rotary=tables[a.layer_type] if "" not in tables else tables[""],
        q_norm=rms_norm(a.q_norm, 1.0) if normed else None,
        k_norm=rms_norm(a.k_norm, 1.0) if normed else None,
        window=0 if c.model_type == "gemma" else window(a, c),
        # Gemma 3 has the setting and does nothing with it.
        softcap=(c.attn_logit_softcapping or 0.0) if c.model_type == "gemma2" else 0.0,
    )
    act = activation(getattr(c, "hidden_activation", None) or getattr(c, "hidden_act", None))
    mlp = MLP(linear(layer.mlp.gate_proj, layer.mlp.up_proj), linear(layer.mlp.down_proj), act, gated=True)
    first, second = rms_norm(layer.input_layernorm, 1.0), rms_norm(layer.post_attention_layernorm, 1.0)
    if c.model_type == "gemma":
        return Layer(first, attention, mlp, second)
    third = rms_norm(layer.pre_feedforward_layernorm, 1.0)
    fourth = rms_norm(layer.post_feedforward_layernorm, 1.0)
    return Layer(first, attention, mlp, third, post1=second, post2=fourth)
