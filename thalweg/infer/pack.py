"""Packed linear layers for the eager runner on CPUs: what the torch wheel holds, where native kernels are
not."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from thalweg.infer.describe import Linear
from thalweg.ops.packed import pack_linear


def packing(form: str) -> Callable[[Linear], Callable[[Tensor], Tensor]]:
    """Return what packs a described layer for a form: fp32, bf16, fp16, int8, int4."""
    return lambda layer: pack_linear(layer.weight, layer.bias, form)
