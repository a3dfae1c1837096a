"""GPT-2."""

from typing import Any

from thalweg.infer.models import spec as specs


def build_decoder(model: Any) -> specs.DecoderSpec:
    """Describe the model."""
    c, m = model.config, model.transformer
    if c.add_cross_attention:
        raise specs.UnsupportedModelError("GPT-2 with cross attention")
    dim = c.n_embd // c.n_head
    layers = []
    for number, block in enumerate(m.h):
        scale = dim**-0.5 if c.scale_attn_weights else 1.0
        if c.scale_attn_by_inverse_layer_idx:
            scale /= number + 1
        qkv = specs.build_linear(block.attn.c_attn)
        attention = specs.build_attention(qkv, block.attn.c_proj, c.n_head, dim, scale=scale)
        mlp = specs.build_plain_mlp(block.mlp.c_fc, block.mlp.c_proj, c.activation_function)
        layers.append(specs.build_layer(attention, mlp, block.ln_1, block.ln_2))
    position_embeddings = m.wpe.weight.detach()
    return specs.assemble_decoder(model, layers, specs.build_norm(m.ln_f), position_embeddings=position_embeddings)
