"""Gemma 1 to 3: scaled embeddings, norms that store weight - 1, norms after each part, capped logits."""

from __future__ import annotations

from typing import Any

from thalweg.infer.models.llama import get_sliding_window
from thalweg.infer.models.spec import (
    AttentionSpec,
    DecoderLayerSpec,
    DecoderSpec,
    MLPSpec,
    RopeTable,
    activation_name,
    build_linear,
    build_rms_norm,
    build_rope,
)


def build_decoder(model: Any) -> DecoderSpec:
    """Describe the model."""
    c, m = model.config, model.model
    layer_types = sorted(set(getattr(c, "layer_types", None) or [])) if c.model_type == "gemma3_text" else []
    length = c.max_position_embeddings
    ropes = {kind: build_rope(m.rotary_emb, length, kind) for kind in layer_types} or {
        "": build_rope(m.rotary_emb, length)
    }
    return DecoderSpec(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        max_length=length,
        embed=m.embed_tokens.weight.detach(),
        embed_scale=float(c.hidden_size) ** 0.5,
        layers=[_build_layer(layer, c, ropes) for layer in m.layers],
        final_norm=build_rms_norm(m.norm, 1.0),
        lm_head=build_linear(model.lm_head),
        logit_softcap=getattr(c, "final_logit_softcapping", None) or 0.0,
    )


def _build_layer(layer: Any, c: Any, ropes: dict[str, RopeTable]) -> DecoderLayerSpec:
    a = layer.self_attn
    has_qk_norm = hasattr(a, "q_norm")
    attention = AttentionSpec(
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        head_dim=a.head_dim,
        qkv=build_linear(a.q_proj, a.k_proj, a.v_proj),
        out=build_linear(a.o_proj),
        scale=a.scaling,
        rope=ropes[a.layer_type] if "" not in ropes else ropes[""],
        q_norm=build_rms_norm(a.q_norm, 1.0) if has_qk_norm else None,
        k_norm=build_rms_norm(a.k_norm, 1.0) if has_qk_norm else None,
        sliding_window=0 if c.model_type == "gemma" else get_sliding_window(a, c),
        # Gemma 3 has the setting and does nothing with it.
        softcap=(c.attn_logit_softcapping or 0.0) if c.model_type == "gemma2" else 0.0,
    )
    act = activation_name(getattr(c, "hidden_activation", None) or getattr(c, "hidden_act", None))
    mlp = MLPSpec(
        build_linear(layer.mlp.gate_proj, layer.mlp.up_proj), build_linear(layer.mlp.down_proj), act, gated=True
    )
    first, second = (build_rms_norm(layer.input_layernorm, 1.0), build_rms_norm(layer.post_attention_layernorm, 1.0))
    if c.model_type == "gemma":
        return DecoderLayerSpec(first, attention, mlp, second)
    third = build_rms_norm(layer.pre_feedforward_layernorm, 1.0)
    fourth = build_rms_norm(layer.post_feedforward_layernorm, 1.0)
    return DecoderLayerSpec(first, attention, mlp, third, post_attn_norm=second, post_mlp_norm=fourth)
