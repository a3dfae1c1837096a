"""Llama and those built like it: Mistral, Qwen 2 and 3, SmolLM 3, Granite, Mixtral, Qwen's mixtures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from thalweg.infer.models.spec import (
    AttentionSpec,
    DecoderLayerSpec,
    DecoderSpec,
    LinearSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
    RopeTable,
    UnsupportedModelError,
    activation_name,
    build_linear,
    build_rms_norm,
    build_rope,
)


def build_decoder(model: Any) -> DecoderSpec:
    """Describe the model."""
    c, m = model.config, model.model
    rope = build_rope(m.rotary_emb, c.max_position_embeddings)
    granite = c.model_type == "granite"
    norm = scale_norm(build_rms_norm(m.norm), 1 / c.logits_scaling if granite else 1.0)
    spec = build_llama_like(model, [_build_layer(layer, c, rope) for layer in m.layers], norm)
    return replace(spec, embed_scale=float(c.embedding_multiplier)) if granite else spec


def _build_layer(layer: Any, c: Any, rope: RopeTable) -> DecoderLayerSpec:
    a = layer.self_attn
    has_qk_norm = hasattr(a, "q_norm")
    residual_scale = getattr(layer, "residual_multiplier", 1.0)
    attention = AttentionSpec(
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        head_dim=a.head_dim,
        qkv=build_linear(a.q_proj, a.k_proj, a.v_proj),
        out=scale_linear(build_linear(a.o_proj), residual_scale),
        scale=a.scaling,
        rope=rope if getattr(a, "use_rope", True) else None,
        q_norm=build_head_norm(a.q_norm, a.head_dim) if has_qk_norm else None,
        k_norm=build_head_norm(a.k_norm, a.head_dim) if has_qk_norm else None,
        sliding_window=get_sliding_window(a, c),
    )
    inner = build_mlp(layer.mlp, c)
    if isinstance(inner, MLPSpec):
        inner = replace(inner, down=scale_linear(inner.down, residual_scale))
    return DecoderLayerSpec(
        build_rms_norm(layer.input_layernorm), attention, inner, build_rms_norm(layer.post_attention_layernorm)
    )


def build_llama_like(model: Any, layers: Sequence[DecoderLayerSpec], norm: NormSpec) -> DecoderSpec:
    """Return the decoder of a model whose table, head and sizes are named as Llama's."""
    c = model.config
    return DecoderSpec(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        max_length=c.max_position_embeddings,
        embed=model.model.embed_tokens.weight.detach(),
        layers=layers,
        final_norm=norm,
        lm_head=build_linear(model.lm_head),
    )


def scale_norm(norm: NormSpec, factor: float) -> NormSpec:
    """Return a norm whose result is multiplied by a factor."""
    if factor == 1.0:
        return norm
    bias = None if norm.bias is None else norm.bias.float() * factor
    return replace(norm, weight=norm.weight.float() * factor, bias=bias)


def scale_linear(layer: LinearSpec, factor: float) -> LinearSpec:
    """Return a layer whose result is multiplied by a factor."""
    if factor == 1.0:
        return layer
    bias = None if layer.bias is None else layer.bias * factor

    def copy(start: int, stop: int, out: Tensor) -> None:
        layer.copy_rows(start, stop, out)
        out *= factor

    return LinearSpec(
        lambda: layer.weight * factor, bias, (layer.out_features, layer.in_features), modules=layer.modules,
        output_permutation=layer.output_permutation, output_scale=layer.output_scale * factor, copy_rows_fn=copy,
    )  # fmt: skip


def build_head_norm(module: Any, head_dim: int) -> NormSpec:
    """Describe a norm of each head."""
    if module.weight.numel() != head_dim:
        raise UnsupportedModelError("a norm over all heads together")
    return build_rms_norm(module)


def get_sliding_window(attention: Any, c: Any) -> int:
    """Return how many positions a token of this layer sees, 0 for all."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window or 0
    layer_types = getattr(c, "layer_types", None)
    if layer_types is not None and layer_types[attention.layer_idx] != "sliding_attention":
        return 0
    return getattr(c, "sliding_window", None) or 0 if getattr(c, "use_sliding_window", True) else 0


def build_mlp(module: Any, c: Any) -> MLPSpec | MoESpec:
    """Describe a gated MLP or a mixture of them."""
    if hasattr(module, "experts"):
        return _build_moe(module, c)
    act = activation_name(getattr(c, "hidden_act", None) or getattr(c, "hidden_activation", None))
    return MLPSpec(build_linear(module.gate_proj, module.up_proj), build_linear(module.down_proj), act, gated=True)


def _build_moe(module: Any, c: Any) -> MoESpec:
    shared_expert = getattr(module, "shared_expert", None)
    shared_expert_gate = getattr(module, "shared_expert_gate", None)
    shared_expert_spec = build_mlp(shared_expert, c) if shared_expert is not None else None
    assert not isinstance(shared_expert_spec, MoESpec)
    return MoESpec(
        router=module.gate.weight.detach(),
        up=module.experts.gate_up_proj.detach(),
        down=module.experts.down_proj.detach(),
        top_k=c.num_experts_per_tok,
        norm_topk_prob=getattr(c, "norm_topk_prob", True),
        activation=activation_name(c.hidden_act),
        shared_expert=shared_expert_spec,
        shared_expert_gate=None if shared_expert_gate is None else shared_expert_gate.weight.detach(),
    )


__all__ = [
    "LinearSpec",
    "build_decoder",
    "build_head_norm",
    "build_llama_like",
    "build_mlp",
    "get_sliding_window",
    "scale_linear",
    "scale_norm",
]
