"""GPT-NeoX and Pythia: attention and MLP side by side behind a norm each, part of each head rotated."""

from typing import Any

from thalweg.infer.models import spec as specs


def build_decoder(model: Any) -> specs.DecoderSpec:
    """Describe the model."""
    c, m = model.config, model.gpt_neox
    num_heads = c.num_attention_heads
    dim = c.hidden_size // num_heads
    rope = specs.build_rope(m.rotary_emb, c.max_position_embeddings)
    layers = []
    for block in m.layers:
        qkv = specs.deinterleave_qkv(specs.build_linear(block.attention.query_key_value), num_heads, dim)
        attention = specs.build_attention(qkv, block.attention.dense, num_heads, dim, rope=rope)
        mlp = specs.build_plain_mlp(block.mlp.dense_h_to_4h, block.mlp.dense_4h_to_h, c.hidden_act)
        norms = block.input_layernorm, block.post_attention_layernorm
        layers.append(specs.build_layer(attention, mlp, *norms, parallel_residual=c.use_parallel_residual))
    return specs.assemble_decoder(model, layers, specs.build_norm(m.final_layer_norm))
