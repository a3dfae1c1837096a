"""BERT, RoBERTa and XLM-RoBERTa, CamemBERT, DistilBERT, ELECTRA, and the sentence encoders built of them."""

from __future__ import annotations

from typing import Any

import torch

from thalweg.infer.describe import (
    MLP,
    Attention,
    Encoder,
    Layer,
    Unsupported,
    activation,
    layer_norm,
    linear,
)


def encoder(model: Any) -> Encoder:
    """Describe the model, without the head that some task has put on it."""
    model = model.base_model
    if model.config.model_type == "distilbert":
        return _distilled(model)
    c, e = model.config, model.embeddings
    if c.is_decoder or getattr(model, "embeddings_project", None) is not None:
        raise Unsupported("a decoder, or embeddings that are narrower than the layers")
    if getattr(c, "position_embedding_type", "absolute") != "absolute":
        raise Unsupported(f"positions of type {c.position_embedding_type!r}")
    positions = e.position_embeddings.weight.detach()
    pad = getattr(e, "padding_idx", None)
    pad = -1 if pad is None or c.model_type in _FROM_ZERO else int(pad)
    return Encoder(
        vocab=c.vocab_size,
        width=c.hidden_size,
        max_length=len(positions) - 1 - pad,
        embed=e.word_embeddings.weight.detach(),
        layers=[_layer(layer, c) for layer in model.encoder.layer],
        embed_norm=layer_norm(e.LayerNorm),
        positions=positions[max(pad, 0) :] + e.token_type_embeddings.weight.detach()[0],
        pad=pad,
    )


_FROM_ZERO = ("bert", "electra")


def _layer(layer: Any, c: Any) -> Layer:
    own, out = layer.attention.self, layer.attention.output
    attention = Attention(
        heads=c.num_attention_heads, kv_heads=c.num_attention_heads, dim=own.attention_head_size,
        qkv=linear(own.query, own.key, own.value), out=linear(out.dense), scale=own.attention_head_size**-0.5,
    )  # fmt: skip
    mlp = MLP(
        linear(layer.intermediate.dense), linear(layer.output.dense), activation(c.hidden_act), gated=False
    )
    return Layer(None, attention, mlp, None, after1=layer_norm(out.LayerNorm),
                 after2=layer_norm(layer.output.LayerNorm))  # fmt: skip


def _distilled(model: Any) -> Encoder:
    c, e = model.config, model.embeddings
    positions: torch.Tensor = e.position_embeddings.weight.detach()
    layers = []
    for layer in model.transformer.layer:
        a = layer.attention
        dim = c.dim // c.n_heads
        attention = Attention(
            heads=c.n_heads, kv_heads=c.n_heads, dim=dim, qkv=linear(a.q_lin, a.k_lin, a.v_lin),
            out=linear(a.out_lin), scale=dim**-0.5,
        )  # fmt: skip
        mlp = MLP(linear(layer.ffn.lin1), linear(layer.ffn.lin2), activation(c.activation), gated=False)
        layers.append(
            Layer(None, attention, mlp, None, after1=layer_norm(layer.sa_layer_norm),
                  after2=layer_norm(layer.output_layer_norm))
        )  # fmt: skip
    return Encoder(
        vocab=c.vocab_size,
        width=c.dim,
        max_length=len(positions),
        embed=e.word_embeddings.weight.detach(),
        layers=layers,
        embed_norm=layer_norm(e.LayerNorm),
        positions=positions,
    )
