"""BLOOM: a norm behind the embedding, ALiBi instead of positions, queries, keys and values head by head."""

from typing import Any

import torch

from thalweg.infer.models import spec as specs


def build_decoder(model: Any) -> specs.DecoderSpec:
    """Describe the model.  BLOOM has no longest length of its own; what it was trained on is 2,048."""
    c, m = model.config, model.transformer
    if c.apply_residual_connection_post_layernorm:
        raise specs.UnsupportedModelError("BLOOM with residuals behind the norm")
    dim = c.hidden_size // c.n_head
    # What each head adds to the second of two keys, the distance 1 (Press et al. 2022, section 3).
    slopes = m.build_alibi_tensor(torch.ones(1, 2), c.n_head, torch.float32)[:, 0, 1]
    layers = []
    for block in m.h:
        a = block.self_attention
        qkv = specs.deinterleave_qkv(specs.build_linear(a.query_key_value), c.n_head, dim)
        attention = specs.build_attention(qkv, a.dense, c.n_head, dim, alibi_slopes=slopes)
        mlp = specs.build_plain_mlp(block.mlp.dense_h_to_4h, block.mlp.dense_4h_to_h, "gelu_new")
        layers.append(specs.build_layer(attention, mlp, block.input_layernorm, block.post_attention_layernorm))
    return specs.assemble_decoder(
        model, layers, specs.build_norm(m.ln_f), max_length=getattr(c, "seq_length", None) or 2048,
        embed_norm=specs.build_norm(m.word_embeddings_layernorm),
    )  # fmt: skip
