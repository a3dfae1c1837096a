"""Gemma 1 to 3: scaled embeddings, norms that store weight - 1, norms after each part, capped logits."""

from dataclasses import replace
from functools import partial
from typing import Any

from thalweg.infer.models.llama import build_mlp, build_self_attention
from thalweg.infer.models.spec import DecoderLayerSpec, DecoderSpec, assemble_decoder, build_rms_norm, build_rope

_build_norm = partial(build_rms_norm, offset=1.0)


def build_decoder(model: Any) -> DecoderSpec:
    """Describe the model."""
    c, m, length = model.config, model.model, model.config.max_position_embeddings
    layer_types = sorted(set(getattr(c, "layer_types", None) or [])) if c.model_type == "gemma3_text" else []
    ropes = {kind: build_rope(m.rotary_emb, length, kind) for kind in layer_types}
    rope = None if ropes else build_rope(m.rotary_emb, length)
    layers = []
    for layer in m.layers:
        attention = build_self_attention(layer.self_attn, c, rope or ropes[layer.self_attn.layer_type], _build_norm)
        if c.model_type == "gemma2":  # Gemma 3 has the setting and does nothing with it
            attention = replace(attention, softcap=c.attn_logit_softcapping or 0.0)
        mlp, first, second = build_mlp(layer.mlp, c), layer.input_layernorm, _build_norm(layer.post_attention_layernorm)
        if c.model_type == "gemma":
            layers.append(DecoderLayerSpec(_build_norm(first), attention, mlp, second))
            continue
        third, fourth = _build_norm(layer.pre_feedforward_layernorm), _build_norm(layer.post_feedforward_layernorm)
        layer_spec = DecoderLayerSpec(_build_norm(first), attention, mlp, third)
        layers.append(replace(layer_spec, post_attn_norm=second, post_mlp_norm=fourth))
    return assemble_decoder(
        model, layers, _build_norm(m.norm), embed_scale=float(c.hidden_size) ** 0.5,
        logit_softcap=getattr(c, "final_logit_softcapping", None) or 0.0,
    )  # fmt: skip
