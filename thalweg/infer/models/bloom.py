"""BLOOM: a norm behind the embedding, ALiBi instead of positions, queries, keys and values head by head."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from thalweg.infer.describe import (
    MLP,
    Attention,
    Decoder,
    Layer,
    Unsupported,
    interleaved_heads,
    layer_norm,
    linear,
)


def decoder(model: Any) -> Decoder:
    """Describe the model.  BLOOM has no longest length of its own; what it was trained on is 2,048."""
    c, m = model.config, model.transformer
    if c.apply_residual_connection_post_layernorm:
        raise Unsupported("BLOOM with residuals behind the norm")
    dim = c.hidden_size // c.n_head
    layers = []
    for block in m.h:
        a = block.self_attention
        attention = Attention(
            heads=c.n_head, kv_heads=c.n_head, dim=dim,
            qkv=interleaved_heads(linear(a.query_key_value), c.n_head, dim), out=linear(a.dense),
            scale=dim**-0.5, slopes=slopes(c.n_head),
        )  # fmt: skip
        up, down = linear(block.mlp.dense_h_to_4h), linear(block.mlp.dense_4h_to_h)
        norms = layer_norm(block.input_layernorm), layer_norm(block.post_attention_layernorm)
        layers.append(Layer(norms[0], attention, MLP(up, down, "gelu_tanh", gated=False), norms[1]))
    return Decoder(
        vocab=c.vocab_size,
        width=c.hidden_size,
        max_length=getattr(c, "seq_length", None) or 2048,
        embed=m.word_embeddings.weight.detach(),
        embed_norm=layer_norm(m.word_embeddings_layernorm),
        layers=layers,
        norm=layer_norm(m.ln_f),
        head=linear(model.lm_head),
    )


def slopes(heads: int) -> Tensor:
    """Return ALiBi's slopes (Press et al. 2022, section 3)."""
    power = 2 ** math.floor(math.log2(heads))
    base = 2.0 ** (-(2.0 ** -(math.log2(power) - 3)))
    values = [base**i for i in range(1, power + 1)]
    if power != heads:
        extra = 2.0 ** (-(2.0 ** -(math.log2(2 * power) - 3)))
        values += [extra**i for i in range(1, 2 * (heads - power), 2)]
    return torch.tensor(values, dtype=torch.float32)
