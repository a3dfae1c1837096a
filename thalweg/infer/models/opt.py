"""OPT: learned positions that start at 2, ReLU.

The 350M form has its norms behind each sum, and embeddings narrower than its layers: what widens and narrows
them is multiplied into embedding and head.
"""

from typing import Any

from thalweg.infer.models import spec as specs
from thalweg.infer.models.spec import LinearSpec, build_linear, build_norm


def build_decoder(model: Any) -> specs.DecoderSpec:
    """Describe the model."""
    c, m = model.config, model.model.decoder
    num_heads = c.num_attention_heads
    layers = []
    for block in m.layers:
        a = block.self_attn
        qkv = build_linear(a.q_proj, a.k_proj, a.v_proj)
        attention = specs.build_attention(qkv, a.out_proj, num_heads, c.hidden_size // num_heads)
        mlp = specs.build_plain_mlp(block.fc1, block.fc2, c.activation_function)
        norms = block.self_attn_layer_norm, block.final_layer_norm
        layers.append(specs.build_layer(attention, mlp, *norms, post_norm=not c.do_layer_norm_before))
    embed, head = m.embed_tokens.weight.detach(), build_linear(model.lm_head)
    if m.project_in is not None:
        embed = embed @ m.project_in.weight.detach().t()
        unprojected_head, projection = head, m.project_out.weight.detach()
        head = LinearSpec(lambda: unprojected_head.weight @ projection, None, (head.out_features, c.hidden_size))
    positions = m.embed_positions.weight.detach()[m.embed_positions.offset :]
    norm = None if m.final_layer_norm is None else build_norm(m.final_layer_norm)
    return specs.assemble_decoder(model, layers, norm, embed=embed, lm_head=head, position_embeddings=positions)
