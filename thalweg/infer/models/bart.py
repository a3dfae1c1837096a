"""BART, mBART, Pegasus, Marian, Blenderbot, M2M100 and NLLB: encoder-decoder models with absolute positions.

They differ in where norms stand (before each sublayer, or after each sum), in how positions are made (learned,
or sinusoids in a table), and in what is added to the logits.
"""

import math
from typing import Any

from thalweg.infer.models import spec as specs
from thalweg.infer.models.spec import DecoderLayerSpec, DecoderSpec, EncoderSpec, build_linear, build_norm

_POST_NORM = ("bart", "marian")


def build_decoder(model: Any) -> DecoderSpec:
    """Describe the model."""
    stack, head = model.get_decoder(), build_linear(model.lm_head)
    bias = getattr(model, "final_logits_bias", None)
    if bias is not None and bool(bias.any()):
        head.bias = bias[0].detach()
    positions, _ = _build_positions(stack)
    fields = _build_stack(stack, model.config, model.config.decoder_attention_heads)
    return DecoderSpec(
        **fields, max_length=len(positions), position_embeddings=positions, lm_head=head, encoder=build_encoder(model)
    )


def build_encoder(model: Any) -> EncoderSpec:
    """Describe the encoder."""
    stack = model.get_encoder()
    positions, pad_token_id = _build_positions(stack)
    max_length = len(positions)
    if pad_token_id >= 0:  # prompts that hold the token get the row before all others for it
        positions = stack.embed_positions.weights[pad_token_id:].detach()
    return EncoderSpec(
        **_build_stack(stack, model.config, model.config.encoder_attention_heads),
        max_length=max_length,
        position_embeddings=positions,
        pad_token_id=pad_token_id,
    )


def _build_positions(stack: Any) -> tuple[Any, int]:
    """Return the table (length, width) from the first token's position on, and the token that takes none, or -1."""
    table = stack.embed_positions
    if hasattr(table, "weights"):  # M2M100 counts from the padding token's number
        return table.weights[table.padding_idx + 1 :].detach(), table.padding_idx
    return table.weight[getattr(table, "offset", 0) :].detach(), -1


def _build_stack(stack: Any, c: Any, num_heads: int) -> dict[str, Any]:
    """Return what encoder and decoder have alike."""
    embed, norm = stack.embed_tokens, getattr(stack, "layer_norm", None)
    embed_norm = getattr(stack, "layernorm_embedding", None)
    scale = getattr(embed, "embed_scale", getattr(stack, "embed_scale", 1.0))
    assert scale in (1.0, math.sqrt(c.d_model))
    return {
        "vocab_size": embed.num_embeddings,
        "hidden_size": c.d_model,
        "embed": embed.weight.detach(),
        "embed_scale": float(scale),
        "embed_norm": None if embed_norm is None else build_norm(embed_norm),
        "layers": [_build_layer(layer, c, num_heads) for layer in stack.layers],
        "final_norm": None if norm is None else build_norm(norm),
    }


def _build_layer(layer: Any, c: Any, num_heads: int) -> DecoderLayerSpec:
    a, head_dim = layer.self_attn, c.d_model // num_heads
    attention = specs.build_attention(build_linear(a.q_proj, a.k_proj, a.v_proj), a.out_proj, num_heads, head_dim)
    mlp = specs.build_plain_mlp(layer.fc1, layer.fc2, c.activation_function)
    is_post_norm, cross = c.model_type in _POST_NORM, None
    if (x := getattr(layer, "encoder_attn", None)) is not None:
        norm = build_norm(layer.encoder_attn_layer_norm)
        before, after = (None, norm) if is_post_norm else (norm, None)
        q, kv, out = build_linear(x.q_proj), build_linear(x.k_proj, x.v_proj), build_linear(x.out_proj)
        cross = specs.CrossAttentionSpec(before, q, kv, out, head_dim**-0.5, residual_norm=after)
    norms = layer.self_attn_layer_norm, layer.final_layer_norm
    return specs.build_layer(attention, mlp, *norms, post_norm=is_post_norm, cross_attention=cross)
