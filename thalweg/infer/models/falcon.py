"""Falcon: 7B's form (one key-value head) and 40B's (groups of heads), with rotary positions."""

from typing import Any

import torch
from torch import Tensor

from thalweg.infer.models import spec as specs


def build_decoder(model: Any) -> specs.DecoderSpec:
    """Describe the model."""
    c, m = model.config, model.transformer
    if c.alibi:
        raise specs.UnsupportedModelError("Falcon with ALiBi, whose slopes Hugging Face rounds to bf16")
    num_heads = c.num_attention_heads
    dim = c.hidden_size // num_heads
    num_kv_heads = c.num_kv_heads if c.new_decoder_architecture else 1 if c.multi_query else num_heads
    rope = specs.build_rope(m.rotary_emb, c.max_position_embeddings)
    layers = []
    for block in m.h:
        a, qkv = block.self_attention, specs.build_linear(block.self_attention.query_key_value)
        if c.new_decoder_architecture or not c.multi_query:  # else: all queries, then key and value, as wanted here
            qkv = specs.permute_outputs(qkv, _qkv_permutation(num_heads, num_kv_heads, dim))
        attention = specs.build_attention(qkv, a.dense, num_heads, dim, num_kv_heads=num_kv_heads, rope=rope)
        act = getattr(c, "activation", "gelu")
        mlp = specs.build_plain_mlp(block.mlp.dense_h_to_4h, block.mlp.dense_4h_to_h, act)
        first, second, parallel = _build_norms(block, c)
        layers.append(specs.DecoderLayerSpec(first, attention, mlp, second, parallel_residual=parallel))
    return specs.assemble_decoder(model, layers, specs.build_norm(m.ln_f))


def _qkv_permutation(num_heads: int, num_kv_heads: int, head_dim: int) -> Tensor:
    """Outputs come in groups: the group's queries, its key, its value."""
    group = num_heads // num_kv_heads
    index = torch.arange((num_heads + 2 * num_kv_heads) * head_dim).view(num_kv_heads, group + 2, head_dim)
    return torch.cat([index[:, :-2].reshape(-1), index[:, -2].reshape(-1), index[:, -1].reshape(-1)])


def _build_norms(block: Any, c: Any) -> tuple[specs.NormSpec, specs.NormSpec, bool]:
    if c.new_decoder_architecture and hasattr(block, "ln_attn"):
        return specs.build_norm(block.ln_attn), specs.build_norm(block.ln_mlp), True
    first = specs.build_norm(block.input_layernorm)
    if c.new_decoder_architecture or c.parallel_attn:
        return first, first, True
    return first, specs.build_norm(block.post_attention_layernorm), False
