"""T5, T5 1.1 and FLAN-T5, mT5, UMT5: they listen to a source and speak."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from thalweg.infer.describe import (
    MLP,
    Attention,
    Cross,
    Decoder,
    Encoder,
    Layer,
    Norm,
    Relative,
    activation,
    linear,
    rms_norm,
)

_LENGTH = 512  # what these models were trained on; nothing in them ends there


def decoder(model: Any) -> Decoder:
    """Describe the model."""
    c = model.config
    width = model.lm_head.weight.shape[1]
    norm = rms_norm(model.decoder.final_layer_norm)
    if _scaled(c):
        norm = Norm("rms", norm.weight.float() * width**-0.5, None, norm.eps)
    stack = model.decoder
    return Decoder(
        vocab=c.vocab_size,
        width=width,
        max_length=getattr(c, "n_positions", None) or _LENGTH,
        embed=stack.embed_tokens.weight.detach(),
        layers=_layers(stack, c),
        norm=norm,
        head=linear(model.lm_head),
        encoder=encoder(model),
    )


def _scaled(c: Any) -> bool:
    """Whether states are scaled before the head: in T5 1.0, whose head is the embedding."""
    return c.model_type != "mt5" and getattr(c, "scale_decoder_outputs", c.tie_word_embeddings)


def encoder(model: Any) -> Encoder:
    """Describe the listening half, of any model that has one."""
    c, stack = model.config, model.encoder
    return Encoder(
        vocab=c.vocab_size,
        width=stack.embed_tokens.weight.shape[1],
        max_length=getattr(c, "n_positions", None) or _LENGTH,
        embed=stack.embed_tokens.weight.detach(),
        layers=_layers(stack, c),
        norm=rms_norm(stack.final_layer_norm),
    )


def _layers(stack: Any, c: Any) -> list[Layer]:
    layers, relative = [], None
    for block in stack.block:
        first = block.layer[0]
        a = first.SelfAttention
        if a.has_relative_attention_bias:  # in T5 the first layer's holds for all
            bucket = partial(
                _bucket, buckets=c.relative_attention_num_buckets, both=not stack.is_decoder,
                furthest=c.relative_attention_max_distance,
            )  # fmt: skip
            relative = Relative(a.relative_attention_bias.weight.detach(), bucket)
        attention = Attention(
            heads=c.num_heads, kv_heads=c.num_heads, dim=c.d_kv, qkv=linear(a.q, a.k, a.v), out=linear(a.o),
            scale=1.0, relative=relative,
        )  # fmt: skip
        last = block.layer[-1]
        cross = _cross(block.layer[1]) if len(block.layer) == 3 else None
        layers.append(
            Layer(
                rms_norm(first.layer_norm),
                attention,
                _mlp(last.DenseReluDense, c),
                rms_norm(last.layer_norm),
                cross=cross,
            )
        )
    return layers


def _bucket(distance: torch.Tensor, buckets: int, furthest: int, both: bool) -> torch.Tensor:
    """Return the bucket of a key ``distance`` behind (or before) its query.

    Half of the buckets stand for one distance each, the others for ranges that grow as powers up to
    ``furthest`` (Raffel et al. 2020, section 2.1); where both sides are seen, each has half of all.
    """
    base = torch.zeros_like(distance)
    if both:
        buckets //= 2
        base = (distance > 0) * buckets
        size = distance.abs()
    else:
        size = -distance.clamp(max=0)
    exact = buckets // 2
    power = torch.log(size.float() / exact) / math.log(furthest / exact) * (buckets - exact)
    far = (exact + power.clamp(min=0, max=buckets).long()).clamp(max=buckets - 1)
    return base + torch.where(size < exact, size, far)


def _cross(layer: Any) -> Cross:
    a = layer.EncDecAttention
    return Cross(rms_norm(layer.layer_norm), linear(a.q), linear(a.k, a.v), linear(a.o), scale=1.0)


def _mlp(m: Any, c: Any) -> MLP:
    act = activation(c.dense_act_fn)
    if c.is_gated_act:
        return MLP(linear(m.wi_0, m.wi_1), linear(m.wo), act, gated=True)
    return MLP(linear(m.wi), linear(m.wo), act, gated=False)
