"""Llama and those built like it: Mistral, Qwen 2 and 3, SmolLM 3, Granite, Mixtral, Qwen's mixtures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from thalweg.infer.describe import (
    MLP,
    Attention,
    Decoder,
    Experts,
    Layer,
    Linear,
    Norm,
    Rotary,
    Unsupported,
    activation,
    linear,
    rms_norm,
    rotary,
)


def decoder(model: Any) -> Decoder:
    """Describe the model."""
    c, m = model.config, model.model
    table = rotary(m.rotary_emb, c.max_position_embeddings)
    granite = c.model_type == "granite"
    norm = scaled(rms_norm(m.norm), 1 / c.logits_scaling if granite else 1.0)
    made = around(model, [_layer(layer, c, table) for layer in m.layers], norm)
    return replace(made, embed_scale=float(c.embedding_multiplier)) if granite else made


def _layer(layer: Any, c: Any, table: Rotary) -> Layer:
    a = layer.self_attn
    normed = hasattr(a, "q_norm")
    factor = getattr(layer, "residual_multiplier", 1.0)
    attention = Attention(
        heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads,
        dim=a.head_dim,
        qkv=linear(a.q_proj, a.k_proj, a.v_proj),
        out=weakened(linear(a.o_proj), factor),
        scale=a.scaling,
        rotary=table if getattr(a, "use_rope", True) else None,
        q_norm=per_head(a.q_norm, a.head_dim) if normed else None,
        k_norm=per_head(a.k_norm, a.head_dim) if normed else None,
        window=window(a, c),
    )
    inner = mlp(layer.mlp, c)
    if isinstance(inner, MLP):
        inner = replace(inner, down=weakened(inner.down, factor))
    return Layer(rms_norm(layer.input_layernorm), attention, inner, rms_norm(layer.post_attention_layernorm))


def around(model: Any, layers: Sequence[Layer], norm: Norm) -> Decoder:
    """Return the decoder of a model whose table, head and sizes are named as Llama's."""
    c = model.config
    return Decoder(
        vocab=c.vocab_size,
        width=c.hidden_size,
        max_length=c.max_position_embeddings,
        embed=model.model.embed_tokens.weight.detach(),
        layers=layers,
        norm=norm,
        head=linear(model.lm_head),
    )


def scaled(norm: Norm, factor: float) -> Norm:
    """Return a norm whose result is multiplied by a factor."""
    if factor == 1.0:
        return norm
    bias = None if norm.bias is None else norm.bias.float() * factor
    return replace(norm, weight=norm.weight.float() * factor, bias=bias)


def weakened(layer: Linear, factor: float) -> Linear:
    """Return a layer whose result is multiplied by a factor."""
    if factor == 1.0:
        return layer
    bias = None if layer.bias is None else layer.bias * factor

    def copy(start: int, stop: int, out: Tensor) -> None:
        layer.copy_rows(start, stop, out)
        out *= factor

    return Linear(
        lambda: layer.weight * factor, bias, (layer.outputs, layer.inputs), modules=layer.modules,
        order=layer.order, factor=layer.factor * factor, copy=copy,
    )  # fmt: skip


def per_head(module: Any, dim: int) -> Norm:
    """Describe a norm of each head."""
    if module.weight.numel() != dim:
        raise Unsupported("a norm over all heads together")
    return rms_norm(module)


def window(attention: Any, c: Any) -> int:
    """Return how many positions a token of this layer sees, 0 for all."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window or 0
    kinds = getattr(c, "layer_types", None)
    if kinds is not None and kinds[attention.layer_idx] != "sliding_attention":
        return 0
    return getattr(c, "sliding_window", None) or 0 if getattr(c, "use_sliding_window", True) else 0


def mlp(module: Any, c: Any) -> MLP | Experts:
    """Describe a gated MLP or a mixture of them."""
    if hasattr(module, "experts"):
        return _experts(module, c)
    act = activation(getattr(c, "hidden_act", None) or getattr(c, "hidden_activation", None))
    return MLP(linear(module.gate_proj, module.up_proj), linear(module.down_proj), act, gated=True)


def _experts(module: Any, c: Any) -> Experts:
    shared = getattr(module, "shared_expert", None)
    gate = getattr(module, "shared_expert_gate", None)
    described = mlp(shared, c) if shared is not None else None
    assert not isinstance(described, Experts)
    return Experts(
        router=module.gate.weight.detach(),
        up=module.experts.gate_up_proj.detach(),
        down=module.experts.down_proj.detach(),
        top_k=c.num_experts_per_tok,
        normalise=getattr(c, "norm_topk_prob", True),
        activation=activation(c.hidden_act),
        shared=described,
        shared_gate=None if gate is None else gate.weight.detach(),
    )


__all__ = ["Linear", "around", "decoder", "mlp", "per_head", "scaled", "weakened", "window"]
