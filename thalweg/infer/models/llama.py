"""Llama and those built like it: Mistral, Qwen 2 and 3, and their mixtures (Mixtral, Qwen-MoE)."""

from __future__ import annotations

from typing import Any

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
    return Decoder(
        vocab=c.vocab_size,
        width=c.hidden_size,
        max_length=c.max_position_embeddings,
        embed=m.embed_tokens.weight.detach(),
        layers=[_layer(layer, c, table) for layer in m.layers],
        norm=rms_norm(m.norm),
        head=linear(model.lm_head),
    )


def _layer(layer: Any, c: Any, table: Rotary) -> Layer:
    a = layer.self_attn
    normed = hasattr(a, "q_norm")
    attention = Attention(
        heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads,
        dim=a.head_dim,
        qkv=linear(a.q_proj, a.k_proj, a.v_proj),
        out=linear(a.o_proj),
        scale=a.scaling,
        rotary=table,
        q_norm=per_head(a.q_norm, a.head_dim) if normed else None,
        k_norm=per_head(a.k_norm, a.head_dim) if normed else None,
        window=window(a, c),
    )
    return Layer(rms_norm(layer.input_layernorm), attention, mlp(layer.mlp, c),
                 rms_norm(layer.post_attention_layernorm))  # fmt: skip


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


__all__ = ["Linear", "decoder", "mlp", "per_head", "window"]
