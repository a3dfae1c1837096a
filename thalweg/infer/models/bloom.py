"""BLOOM: a norm behind the embedding, ALiBi instead of positions, queries, keys and values head by head."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from thalweg.infer.models.spec import (
    AttentionSpec,
    DecoderLayerSpec,
    DecoderSpec,
    MLPSpec,
    UnsupportedModelError,
    build_layer_norm,
    build_linear,
    deinterleave_qkv,
)


def build_decoder(model: Any) -> DecoderSpec:
    """Describe the model.  BLOOM has no longest length of its own; what it was trained on is 2,048."""
    c, m = model.config, model.transformer
    if c.apply_residual_connection_post_layernorm:
        raise UnsupportedModelError("BLOOM with residuals behind the norm")
    dim = c.hidden_size // c.n_head
    layers = []
    for block in m.h:
        a = block.self_attention
        attention = AttentionSpec(
            num_heads=c.n_head, num_kv_heads=c.n_head, head_dim=dim,
            qkv=deinterleave_qkv(build_linear(a.query_key_value), c.n_head, dim), out=build_linear(a.dense),
            scale=dim**-0.5, alibi_slopes=alibi_slopes(c.n_head),
        )  # fmt: skip
        up, down = build_linear(block.mlp.dense_h_to_4h), build_linear(block.mlp.dense_4h_to_h)
        norms = build_layer_norm(block.input_layernorm), build_layer_norm(block.post_attention_layernorm)
        layers.append(DecoderLayerSpec(norms[0], attention, MLPSpec(up, down, "gelu_tanh", gated=False), norms[1]))
    return DecoderSpec(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        max_length=getattr(c, "seq_length", None) or 2048,
        embed=m.word_embeddings.weight.detach(),
        embed_norm=build_layer_norm(m.word_embeddings_layernorm),
        layers=layers,
        final_norm=build_layer_norm(m.ln_f),
        lm_head=build_linear(model.lm_head),
    )


def alibi_slopes(num_heads: int) -> Tensor:
    """Return ALiBi's slopes (Press et al. 2022, section 3)."""
    power = 2 ** math.floor(math.log2(num_heads))
    base = 2.0 ** (-(2.0 ** -(math.log2(power) - 3)))
    values = [base**i for i in range(1, power + 1)]
    if power != num_heads:
        extra = 2.0 ** (-(2.0 ** -(math.log2(2 * power) - 3)))
        values += [extra**i for i in range(1, 2 * (num_heads - power), 2)]
    return torch.tensor(values, dtype=torch.float32)
