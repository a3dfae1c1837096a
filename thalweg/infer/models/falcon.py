"""Falcon: 7B's form (one key-value head) and 40B's (groups of heads), with rotary positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thalweg.infer.describe import (
    MLP,
    Attention,
    Decoder,
    Layer,
    Norm,
    Unsupported,
    activation,
    layer_norm,
    linear,
    rotary,
    rows,
)


def decoder(model: Any) -> Decoder:
    """Describe the model."""
    c, m = model.config, model.transformer
    if c.alibi:
        raise Unsupported("Falcon with ALiBi, whose slopes Hugging Face rounds to bf16")
    heads = c.num_attention_heads
    dim = c.hidden_size // heads
    kv_heads = c.num_kv_heads if c.new_decoder_architecture else 1 if c.multi_query else heads
    table = rotary(m.rotary_emb, c.max_position_embeddings)
    layers = []
    for block in m.h:
        a = block.self_attention
        fused = linear(a.query_key_value)
        # 7B stores all queries, then key and value: the order wanted here already
        plain = c.multi_query and not c.new_decoder_architecture
        attention = Attention(
            heads=heads, kv_heads=kv_heads, dim=dim,
            qkv=fused if plain else rows(fused, _order(heads, kv_heads, dim)), out=linear(a.dense),
            scale=dim**-0.5, rotary=table,
        )  # fmt: skip
        up, down = linear(block.mlp.dense_h_to_4h), linear(block.mlp.dense_4h_to_h)
        mlp = MLP(up, down, activation(getattr(c, "activation", "gelu")), gated=False)
        first, second, parallel = _norms(block, c)
        layers.append(Layer(first, attention, mlp, second, parallel=parallel))
    return Decoder(
        vocab=c.vocab_size,
        width=c.hidden_size,
        max_length=c.max_position_embeddings,
        embed=m.word_embeddings.weight.detach(),
        layers=layers,
        norm=layer_norm(m.ln_f),
        head=linear(model.lm_head),
    )


def _order(heads: int, kv_heads: int, dim: int) -> Tensor:
    """Outputs come in groups: the group's queries, its key, its value."""
    group = heads // kv_heads
    index = torch.arange((heads + 2 * kv_heads) * dim).view(kv_heads, group + 2, dim)
    return torch.cat([index[:, :-2].reshape(-1), index[:, -2].reshape(-1), index[:, -1].reshape(-1)])


def _norms(block: Any, c: Any) -> tuple[Norm, Norm, bool]:
    if c.new_decoder_architecture and hasattr(block, "ln_attn"):
        return layer_norm(block.ln_attn), layer_norm(block.ln_mlp), True
    first = layer_norm(block.input_layernorm)
    if c.new_decoder_architecture or c.parallel_attn:
        return first, first, True
    return first, layer_norm(block.post_attention_layernorm), False
