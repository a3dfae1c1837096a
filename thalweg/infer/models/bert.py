"""BERT, RoBERTa and XLM-RoBERTa, CamemBERT, DistilBERT, ELECTRA, and the sentence encoders built of them."""

from __future__ import annotations

from typing import Any

import torch

from thalweg.infer.models.spec import (
    AttentionSpec,
    DecoderLayerSpec,
    EncoderSpec,
    MLPSpec,
    UnsupportedModelError,
    activation_name,
    build_layer_norm,
    build_linear,
)


def build_encoder(model: Any) -> EncoderSpec:
    """Describe the model, without the head that some task has put on it."""
    model = model.base_model
    if model.config.model_type == "distilbert":
        return _build_distilbert(model)
    c, e = model.config, model.embeddings
    if c.is_decoder or getattr(model, "embeddings_project", None) is not None:
        raise UnsupportedModelError("a decoder, or embeddings that are narrower than the layers")
    if getattr(c, "position_embedding_type", "absolute") != "absolute":
        raise UnsupportedModelError(f"positions of type {c.position_embedding_type!r}")
    positions = e.position_embeddings.weight.detach()
    pad_token_id = getattr(e, "padding_idx", None)
    pad_token_id = -1 if pad_token_id is None or c.model_type in _POSITIONS_FROM_ZERO else int(pad_token_id)
    return EncoderSpec(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        max_length=len(positions) - 1 - pad_token_id,
        embed=e.word_embeddings.weight.detach(),
        layers=[_build_layer(layer, c) for layer in model.encoder.layer],
        embed_norm=build_layer_norm(e.LayerNorm),
        position_embeddings=positions[max(pad_token_id, 0) :] + e.token_type_embeddings.weight.detach()[0],
        pad_token_id=pad_token_id,
    )


_POSITIONS_FROM_ZERO = ("bert", "electra")


def _build_layer(layer: Any, c: Any) -> DecoderLayerSpec:
    self_attention, out = layer.attention.self, layer.attention.output
    attention = AttentionSpec(
        num_heads=c.num_attention_heads, num_kv_heads=c.num_attention_heads,
        head_dim=self_attention.attention_head_size,
        qkv=build_linear(self_attention.query, self_attention.key, self_attention.value), out=build_linear(out.dense),
        scale=self_attention.attention_head_size**-0.5,
    )  # fmt: skip
    mlp = MLPSpec(
        build_linear(layer.intermediate.dense),
        build_linear(layer.output.dense),
        activation_name(c.hidden_act),
        gated=False,
    )
    return DecoderLayerSpec(None, attention, mlp, None, attn_residual_norm=build_layer_norm(out.LayerNorm),
                 mlp_residual_norm=build_layer_norm(layer.output.LayerNorm))  # fmt: skip


def _build_distilbert(model: Any) -> EncoderSpec:
    c, e = model.config, model.embeddings
    positions: torch.Tensor = e.position_embeddings.weight.detach()
    layers = []
    for layer in model.transformer.layer:
        a = layer.attention
        dim = c.dim // c.n_heads
        attention = AttentionSpec(
            num_heads=c.n_heads, num_kv_heads=c.n_heads, head_dim=dim, qkv=build_linear(a.q_lin, a.k_lin, a.v_lin),
            out=build_linear(a.out_lin), scale=dim**-0.5,
        )  # fmt: skip
        mlp = MLPSpec(
            build_linear(layer.ffn.lin1), build_linear(layer.ffn.lin2), activation_name(c.activation), gated=False
        )
        layers.append(
            DecoderLayerSpec(None, attention, mlp, None, attn_residual_norm=build_layer_norm(layer.sa_layer_norm),
                  mlp_residual_norm=build_layer_norm(layer.output_layer_norm))
        )  # fmt: skip
    return EncoderSpec(
        vocab_size=c.vocab_size,
        hidden_size=c.dim,
        max_length=len(positions),
        embed=e.word_embeddings.weight.detach(),
        layers=layers,
        embed_norm=build_layer_norm(e.LayerNorm),
        position_embeddings=positions,
    )
