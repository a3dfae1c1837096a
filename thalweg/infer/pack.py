"""Packed linear layers for the eager runner on CPUs: what the torch wheel holds, where native kernels are
not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from thalweg.infer.describe import Decoder, Experts, Linear
from thalweg.ops.packed import pack_linear


def packing(form: str) -> Callable[[Linear], Callable[[Tensor], Tensor]]:
    """Return what packs a described layer for a form: fp32, bf16, fp16, int8, int4."""

    def pack(layer: Linear) -> Callable[[Tensor], Tensor]:
        if layer.outputs == 0:  # a rank without a part of a small vocabulary
            return lambda x: x[:, :0]
        return pack_linear(layer.weight, layer.bias, form)

    return pack


def pack_experts(decoder: Decoder, form: str) -> Decoder:
    """Return the decoder with the experts' weights packed, for int8 and int4; other forms as they are.

    The packed ones alone are held then, so that a loaded model's own may be dropped.
    """
    if form not in ("int8", "int4"):
        return decoder
    make = packing(form)

    def packed(m: Experts) -> Experts:
        halves = [(make(Linear(up)), make(Linear(down))) for up, down in zip(m.up, m.down, strict=True)]
        return replace(m, up=m.up.new_empty(0), down=m.down.new_empty(0), packed=halves)

    layers = [replace(x, mlp=packed(x.mlp)) if isinstance(x.mlp, Experts) else x for x in decoder.layers]
    return replace(decoder, layers=layers)
