"""Packed linear layers for the eager runner on CPUs: what the torch wheel holds, where native kernels are
not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from thalweg.infer.models.spec import DecoderSpec, LinearSpec, MoESpec
from thalweg.ops.linear.packed import pack_linear


def linear_packer(weight_format: str) -> Callable[[LinearSpec], Callable[[Tensor], Tensor]]:
    """Return what packs a described layer in a format: fp32, bf16, fp16, int8, int4."""

    def pack(layer: LinearSpec) -> Callable[[Tensor], Tensor]:
        if layer.out_features == 0:  # a rank without a part of a small vocabulary
            return lambda x: x[:, :0]
        return pack_linear(layer.weight, layer.bias, weight_format)

    return pack


def quantize_experts(decoder: DecoderSpec, weight_format: str) -> DecoderSpec:
    """Return the decoder with the experts' weights packed, for int8 and int4; other formats as they are.

    The packed ones alone are held then, so that a loaded model's own may be dropped.
    """
    if weight_format not in ("int8", "int4"):
        return decoder
    pack = linear_packer(weight_format)

    def quantize(m: MoESpec) -> MoESpec:
        packed_experts = [(pack(LinearSpec(up)), pack(LinearSpec(down))) for up, down in zip(m.up, m.down, strict=True)]
        return replace(m, up=m.up.new_empty(0), down=m.down.new_empty(0), packed_experts=packed_experts)

    layers = [replace(x, mlp=quantize(x.mlp)) if isinstance(x.mlp, MoESpec) else x for x in decoder.layers]
    return replace(decoder, layers=layers)
