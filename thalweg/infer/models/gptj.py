"""GPT-J: attention and MLP side by side behind one norm, neighbouring dims of part of each head rotated."""

from typing import Any

from thalweg.infer.models import spec as specs


def build_decoder(model: Any) -> specs.DecoderSpec:
    """Describe the model."""
    c, m = model.config, model.transformer
    # (length, sines then cosines), the same in every layer
    sin, cos = m.h[0].attn.embed_positions[: c.n_positions].chunk(2, dim=-1)
    rope = specs.RopeTable(cos.contiguous(), sin.contiguous(), interleaved=True)
    layers = []
    for block in m.h:
        a, norm = block.attn, specs.build_norm(block.ln_1)
        qkv = specs.build_linear(a.q_proj, a.k_proj, a.v_proj)
        attention = specs.build_attention(qkv, a.out_proj, c.n_head, c.n_embd // c.n_head, rope=rope)
        mlp = specs.build_plain_mlp(block.mlp.fc_in, block.mlp.fc_out, c.activation_function)
        layers.append(specs.DecoderLayerSpec(norm, attention, mlp, norm, parallel_residual=True))
    return specs.assemble_decoder(model, layers, specs.build_norm(m.ln_f))
