"""BERT, RoBERTa and XLM-RoBERTa, CamemBERT, DistilBERT, ELECTRA, and the sentence encoders built of them."""

from typing import Any

from thalweg.infer.models import spec as specs
from thalweg.infer.models.spec import DecoderLayerSpec, EncoderSpec, build_linear, build_norm

_POSITIONS_FROM_ZERO = ("bert", "electra")


def build_encoder(model: Any) -> EncoderSpec:
    """Describe the model, without the head that some task has put on it."""
    model = model.base_model
    c, e = model.config, model.embeddings
    positions = e.position_embeddings.weight.detach()
    common: dict[str, Any] = {
        "vocab_size": c.vocab_size, "hidden_size": c.hidden_size, "embed": e.word_embeddings.weight.detach(),
        "embed_norm": build_norm(e.LayerNorm),
    }  # fmt: skip
    if c.model_type == "distilbert":
        layers = [_build_distilbert_layer(layer, c) for layer in model.transformer.layer]
        return EncoderSpec(**common, max_length=len(positions), layers=layers, position_embeddings=positions)
    if c.is_decoder or getattr(model, "embeddings_project", None) is not None:
        raise specs.UnsupportedModelError("a decoder, or embeddings that are narrower than the layers")
    if getattr(c, "position_embedding_type", "absolute") != "absolute":
        raise specs.UnsupportedModelError(f"positions of type {c.position_embedding_type!r}")
    pad_token_id = getattr(e, "padding_idx", None)
    pad_token_id = -1 if pad_token_id is None or c.model_type in _POSITIONS_FROM_ZERO else int(pad_token_id)
    return EncoderSpec(
        **common,
        max_length=len(positions) - 1 - pad_token_id,
        layers=[_build_layer(layer, c) for layer in model.encoder.layer],
        position_embeddings=positions[max(pad_token_id, 0) :] + e.token_type_embeddings.weight.detach()[0],
        pad_token_id=pad_token_id,
    )


def _build_layer(layer: Any, c: Any) -> DecoderLayerSpec:
    a, out = layer.attention.self, layer.attention.output
    qkv = build_linear(a.query, a.key, a.value)
    attention = specs.build_attention(qkv, out.dense, c.num_attention_heads, a.attention_head_size)
    mlp = specs.build_plain_mlp(layer.intermediate.dense, layer.output.dense, c.hidden_act)
    return specs.build_layer(attention, mlp, out.LayerNorm, layer.output.LayerNorm, post_norm=True)


def _build_distilbert_layer(layer: Any, c: Any) -> DecoderLayerSpec:
    a = layer.attention
    qkv = build_linear(a.q_lin, a.k_lin, a.v_lin)
    attention = specs.build_attention(qkv, a.out_lin, c.n_heads, c.dim // c.n_heads)
    mlp = specs.build_plain_mlp(layer.ffn.lin1, layer.ffn.lin2, c.activation)
    return specs.build_layer(attention, mlp, layer.sa_layer_norm, layer.output_layer_norm, post_norm=True)
