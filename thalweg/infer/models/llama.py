"""Llama and those built like it: Mistral, Qwen 2 and 3, SmolLM 3, Granite, Phi 3, StarCoder 2, Mixtral, Qwen's MoEs.

What differs among them is read off their modules: fused weights, norms, the MLP's form, windows, layers without
positions.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from thalweg.infer.models import spec as specs
from thalweg.infer.models.spec import DecoderSpec, LinearSpec, MLPSpec, MoESpec, NormSpec, build_linear

NormBuilder = Callable[[Any], NormSpec]


def build_decoder(model: Any) -> DecoderSpec:
    """Describe the model."""
    c = model.config
    if c.model_type != "granite":
        return build_llama_like(model)
    spec = build_llama_like(model, logit_scale=1 / c.logits_scaling)
    return replace(spec, embed_scale=float(c.embedding_multiplier))


def build_llama_like(
    model: Any,
    build_norm: NormBuilder = specs.build_norm,
    *,
    logit_scale: float = 1.0,
    parallel: bool = False,
    interleaved: bool = False,
) -> DecoderSpec:
    """Return the decoder of a model whose modules are named as Llama's.

    ``logit_scale``: what logits are multiplied by.  ``parallel``: attention and MLP read the same normalised x.
    ``interleaved``: neighbouring dims are rotated.
    """
    c, m = model.config, model.model
    rope = specs.build_rope(m.rotary_emb, c.max_position_embeddings, interleaved=interleaved)
    layers = []
    for block in m.layers:
        attention, inner = build_self_attention(block.self_attn, c, rope, build_norm), build_mlp(block.mlp, c)
        residual_scale = getattr(block, "residual_multiplier", 1.0)
        attention = replace(attention, out=scale_linear(attention.out, residual_scale))
        if isinstance(inner, MLPSpec):
            inner = replace(inner, down=scale_linear(inner.down, residual_scale))
        first = build_norm(block.input_layernorm)
        second = first if parallel else build_norm(block.post_attention_layernorm)
        layers.append(specs.DecoderLayerSpec(first, attention, inner, second, parallel_residual=parallel))
    norm = build_norm(m.norm)
    if logit_scale != 1.0:  # in the norm, where it costs nothing and the head's weight stays the model's own
        bias = None if norm.bias is None else norm.bias.float() * logit_scale
        norm = replace(norm, weight=norm.weight.float() * logit_scale, bias=bias)
    return specs.assemble_decoder(model, layers, norm, final_norm_scale=logit_scale)


def build_self_attention(
    a: Any, c: Any, rope: specs.RopeTable, build_norm: NormBuilder = specs.build_norm
) -> specs.AttentionSpec:
    """Describe a layer's attention; ``build_norm`` describes norms of queries and keys."""
    qkv = [a.qkv_proj] if hasattr(a, "qkv_proj") else [a.q_proj, a.k_proj, a.v_proj]
    norms = [build_norm(norm) for norm in (getattr(a, "q_norm", None), getattr(a, "k_norm", None)) if norm is not None]
    if any(norm.weight.numel() != a.head_dim for norm in norms):
        raise specs.UnsupportedModelError("a norm over all heads together")
    q_norm, k_norm = norms or (None, None)
    return specs.build_attention(
        build_linear(*qkv), a.o_proj if hasattr(a, "o_proj") else a.dense, c.num_attention_heads, a.head_dim,
        num_kv_heads=c.num_key_value_heads, scale=getattr(a, "scaling", None),
        rope=rope if getattr(a, "use_rope", True) else None, q_norm=q_norm, k_norm=k_norm,
        sliding_window=get_sliding_window(a, c),
    )  # fmt: skip


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


def get_sliding_window(attention: Any, c: Any) -> int:
    """Return how many positions a token of this layer sees, 0 for all."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window or 0
    layer_types = getattr(c, "layer_types", None)
    if layer_types is not None and layer_types[attention.layer_idx] != "sliding_attention":
        return 0
    return getattr(c, "sliding_window", None) or 0 if getattr(c, "use_sliding_window", True) else 0


def build_mlp(module: Any, c: Any) -> MLPSpec | MoESpec:
    """Describe an MLP, with a gate or without, or a mixture of gated ones."""
    if hasattr(module, "experts"):
        return _build_moe(module, c)
    act = getattr(c, "hidden_activation", None) or c.hidden_act
    if hasattr(module, "c_fc"):
        return specs.build_plain_mlp(module.c_fc, module.c_proj, act)
    up = [module.gate_up_proj] if hasattr(module, "gate_up_proj") else [module.gate_proj, module.up_proj]
    return MLPSpec(build_linear(*up), build_linear(module.down_proj), specs.activation_name(act), gated=True)


def _build_moe(module: Any, c: Any) -> MoESpec:
    shared_expert = getattr(module, "shared_expert", None)
    shared_expert_gate = getattr(module, "shared_expert_gate", None)
    shared_expert_spec: Any = build_mlp(shared_expert, c) if shared_expert is not None else None
    return MoESpec(
        router=module.gate.weight.detach(),
        up=module.experts.gate_up_proj.detach(),
        down=module.experts.down_proj.detach(),
        top_k=c.num_experts_per_tok,
        norm_topk_prob=getattr(c, "norm_topk_prob", True),
        activation=specs.activation_name(c.hidden_act),
        shared_expert=shared_expert_spec,
        shared_expert_gate=None if shared_expert_gate is None else shared_expert_gate.weight.detach(),
    )
