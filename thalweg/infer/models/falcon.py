"""Falcon: 7B's form (one key-value head) and 40B's (groups of heads), with rotary positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thalweg.infer.models.spec import (
    AttentionSpec,
    DecoderLayerSpec,
    DecoderSpec,
    MLPSpec,
    NormSpec,
    UnsupportedModelError,
    activation_name,
    build_layer_norm,
    build_linear,
    build_rope,
    permute_outputs,
)


def build_decoder(model: Any) -> DecoderSpec:
    """Describe the model."""
    c, m = model.config, model.transformer
    if c.alibi:
        raise UnsupportedModelError("Falcon with ALiBi, whose slopes Hugging Face rounds to bf16")
    num_heads = c.num_attention_heads
    dim = c.hidden_size // num_heads
    num_kv_heads = c.num_kv_heads if c.new_decoder_architecture else 1 if c.multi_query else num_heads
    rope = build_rope(m.rotary_emb, c.max_position_embeddings)
    layers = []
    for block in m.h:
        a = block.self_attention
        fused = build_linear(a.query_key_value)
        # 7B stores all queries, then key and value: the order wanted here already
        is_ordered = c.multi_query and not c.new_decoder_architecture
        attention = AttentionSpec(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=dim,
            qkv=fused if is_ordered else permute_outputs(fused, _qkv_permutation(num_heads, num_kv_heads, dim)),
            out=build_linear(a.dense),
            scale=dim**-0.5, rope=rope,
        )  # fmt: skip
        up, down = build_linear(block.mlp.dense_h_to_4h), build_linear(block.mlp.dense_4h_to_h)
        mlp = MLPSpec(up, down, activation_name(getattr(c, "activation", "gelu")), gated=False)
        first, second, parallel = _build_norms(block, c)
        layers.append(DecoderLayerSpec(first, attention, mlp, second, parallel_residual=parallel))
    return DecoderSpec(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        max_length=c.max_position_embeddings,
        embed=m.word_embeddings.weight.detach(),
        layers=layers,
        final_norm=build_layer_norm(m.ln_f),
        lm_head=build_linear(model.lm_head),
    )


def _qkv_permutation(num_heads: int, num_kv_heads: int, head_dim: int) -> Tensor:
    """Outputs come in groups: the group's queries, its key, its value."""
    group = num_heads // num_kv_heads
    index = torch.arange((num_heads + 2 * num_kv_heads) * head_dim).view(num_kv_heads, group + 2, head_dim)
    return torch.cat([index[:, :-2].reshape(-1), index[:, -2].reshape(-1), index[:, -1].reshape(-1)])


def _build_norms(block: Any, c: Any) -> tuple[NormSpec, NormSpec, bool]:
    if c.new_decoder_architecture and hasattr(block, "ln_attn"):
        return build_layer_norm(block.ln_attn), build_layer_norm(block.ln_mlp), True
    first = build_layer_norm(block.input_layernorm)
    if c.new_decoder_architecture or c.parallel_attn:
        return first, first, True
    return first, build_layer_norm(block.post_attention_layernorm), False
