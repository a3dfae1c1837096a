"""T5, T5 1.1 and FLAN-T5, mT5, UMT5: encoder-decoder models."""

from functools import partial
from typing import Any

from transformers.models.t5.modeling_t5 import T5Attention

from thalweg.infer.models import spec as specs
from thalweg.infer.models.spec import DecoderLayerSpec, DecoderSpec, EncoderSpec, build_linear, build_rms_norm

_DEFAULT_MAX_LENGTH = 512  # what these models were trained on; nothing in them ends there


def build_decoder(model: Any) -> DecoderSpec:
    """Describe the model."""
    c, stack = model.config, model.decoder
    norm, head = build_rms_norm(stack.final_layer_norm), build_linear(model.lm_head)
    # T5 1.0, whose head is the embedding, scales the states before it
    if c.model_type != "mt5" and getattr(c, "scale_decoder_outputs", c.tie_word_embeddings):
        norm = specs.NormSpec("rms", norm.weight.float() * head.in_features**-0.5, None, norm.eps)
    return DecoderSpec(**_build_stack(stack, c), final_norm=norm, lm_head=head, encoder=build_encoder(model))


def build_encoder(model: Any) -> EncoderSpec:
    """Describe the encoder, of any model that has one."""
    stack = model.encoder
    return EncoderSpec(**_build_stack(stack, model.config), final_norm=build_rms_norm(stack.final_layer_norm))


def _build_stack(stack: Any, c: Any) -> dict[str, Any]:
    """Return what encoder and decoder have alike."""
    embed = stack.embed_tokens.weight.detach()
    return {
        "vocab_size": c.vocab_size, "hidden_size": embed.shape[1], "embed": embed, "layers": _build_layers(stack, c),
        "max_length": getattr(c, "n_positions", None) or _DEFAULT_MAX_LENGTH,
    }  # fmt: skip


def _build_layers(stack: Any, c: Any) -> list[DecoderLayerSpec]:
    layers, relative = [], None
    for block in stack.block:
        first, last = block.layer[0], block.layer[-1]
        a = first.SelfAttention
        if a.has_relative_attention_bias:  # in T5 the first layer's holds for all
            bucket = partial(  # (Raffel et al. 2020, section 2.1)
                T5Attention._relative_position_bucket, num_buckets=c.relative_attention_num_buckets,
                bidirectional=not stack.is_decoder, max_distance=c.relative_attention_max_distance,
            )  # fmt: skip
            relative = specs.RelativePositionBias(a.relative_attention_bias.weight.detach(), bucket)
        qkv = build_linear(a.q, a.k, a.v)
        attention = specs.build_attention(qkv, a.o, c.num_heads, c.d_kv, scale=1.0, relative_bias=relative)
        cross = _build_cross_attention(block.layer[1]) if len(block.layer) == 3 else None
        mlp = _build_mlp(last.DenseReluDense, c)
        layers.append(specs.build_layer(attention, mlp, first.layer_norm, last.layer_norm, cross_attention=cross))
    return layers


def _build_cross_attention(layer: Any) -> specs.CrossAttentionSpec:
    a, norm = layer.EncDecAttention, build_rms_norm(layer.layer_norm)
    return specs.CrossAttentionSpec(norm, build_linear(a.q), build_linear(a.k, a.v), build_linear(a.o), scale=1.0)


def _build_mlp(m: Any, c: Any) -> specs.MLPSpec:
    if not c.is_gated_act:
        return specs.build_plain_mlp(m.wi, m.wo, c.dense_act_fn)
    act = specs.activation_name(c.dense_act_fn)
    return specs.MLPSpec(build_linear(m.wi_0, m.wi_1), build_linear(m.wo), act, gated=True)
