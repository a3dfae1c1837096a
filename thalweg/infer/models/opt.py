"""OPT: learned positions that start at 2, ReLU.

The 350M form has its norms behind each sum, and embeddings narrower than its layers: what widens and narrows
them is multiplied into embedding and head.
"""

from __future__ import annotations

from typing import Any

from thalweg.infer.describe import MLP, Attention, Decoder, Layer, Linear, activation, layer_norm, linear


def decoder(model: Any) -> Decoder:
    """Describe the model."""
    c, m = model.config, model.model.decoder
    heads = c.num_attention_heads
    dim = c.hidden_size // heads
    layers = []
    for block in m.layers:
        a = block.self_attn
        attention = Attention(
            heads=heads, kv_heads=heads, dim=dim, qkv=linear(a.q_proj, a.k_proj, a.v_proj),
            out=linear(a.out_proj), scale=dim**-0.5,
        )  # fmt: skip
        mlp = MLP(linear(block.fc1), linear(block.fc2), activation(c.activation_function), gated=False)
        norms = layer_norm(block.self_attn_layer_norm), layer_norm(block.final_layer_norm)
        if c.do_layer_norm_before:
            layers.append(Layer(norms[0], attention, mlp, norms[1]))
        else:
            layers.append(Layer(None, attention, mlp, None, after1=norms[0], after2=norms[1]))
    embed, head = m.embed_tokens.weight.detach(), linear(model.lm_head)
    if m.project_in is not None:
        embed = embed @ m.project_in.weight.detach().t()
        shape = (head.outputs, c.hidden_size)
        narrow, narrowed = head, m.project_out.weight.detach()
        head = Linear(lambda: narrow.weight @ narrowed, None, shape)
    return Decoder(
        vocab=c.vocab_size,
        width=c.hidden_size,
        max_length=c.max_position_embeddings,
        embed=embed,
        layers=layers,
        norm=None if m.final_layer_norm is None else layer_norm(m.final_layer_norm),
        head=head,
        positions=m.embed_positions.weight.detach()[m.embed_positions.offset :],
    )
