"""Phi 1 and 2: attention and MLP side by side behind one norm, part of each head rotated."""

from typing import Any

from thalweg.infer.models import spec as specs
from thalweg.infer.models.llama import build_self_attention


def build_decoder(model: Any) -> specs.DecoderSpec:
    """Describe the model."""
    c, m = model.config, model.model
    if c.qk_layernorm:
        raise specs.UnsupportedModelError("Phi with layer norms on queries and keys")
    rope = specs.build_rope(m.rotary_emb, c.max_position_embeddings)
    layers = []
    for block in m.layers:
        norm, attention = specs.build_norm(block.input_layernorm), build_self_attention(block.self_attn, c, rope)
        mlp = specs.build_plain_mlp(block.mlp.fc1, block.mlp.fc2, c.hidden_act)
        layers.append(specs.DecoderLayerSpec(norm, attention, mlp, norm, parallel_residual=True))
    return specs.assemble_decoder(model, layers, specs.build_norm(m.final_layernorm))
