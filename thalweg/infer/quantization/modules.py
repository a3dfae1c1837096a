"""Any model's linear layers with packed weights, in place of its own."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.infer.models.spec import build_linear
from thalweg.ops.linear.packed import pack_linear

_MIN_FEATURES = 32  # outputs and inputs: narrower layers are routers and gates, which want exact numbers


class QuantizedLinear(nn.Module):
    """An ``nn.Linear`` (or Hugging Face's Conv1D) whose weight is packed as int8 or int4.

    ``weight`` is an empty tensor of the layer's dtype: code asks for that.
    """

    def __init__(self, layer: nn.Module, weight_format: str) -> None:
        super().__init__()
        described = build_linear(layer)
        self.in_features, self.out_features = described.in_features, described.out_features
        self._linear: Any = pack_linear(described.weight, described.bias, weight_format)
        like: Any = layer.weight
        self.weight = like.detach().new_empty(0)
        self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, in x's dtype."""
        y = self._linear(x.reshape(-1, self.in_features).float().contiguous())
        return y.view(*x.shape[:-1], self.out_features).to(x.dtype)


def clone_sharing_weights(model: Any) -> Any:
    """Return a model of the same tensors whose modules may be exchanged."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(t): t for t in tensors})


def quantize_linears(model: nn.Module, weight_format: str) -> list[tuple[nn.Module, str, nn.Module]]:
    """Exchange a model's linear layers on the CPU; returns (owner, name, old layer), for :func:`restore`.

    ``weight_format``: int8, or int4, with which the head is in int8.
    """
    heads: Any = getattr(model, "get_output_embeddings", None)
    head = None if heads is None else heads()
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    quantized: dict[int, QuantizedLinear] = {}
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if not (type(child) is nn.Linear or type(child).__name__ == "Conv1D"):
                continue
            weight: Any = child.weight
            if isinstance(owner, nn.MultiheadAttention) or min(weight.shape) < _MIN_FEATURES:
                continue
            if id(child) not in quantized:
                quantized[id(child)] = QuantizedLinear(child, "int8" if child is head else weight_format)
            setattr(owner, name, quantized[id(child)])
            replaced.append((owner, name, child))
    return replaced


def restore_linears(replaced: list[tuple[nn.Module, str, nn.Module]]) -> None:
    """Put the old layers back."""
    for owner, name, child in replaced:
        setattr(owner, name, child)


@torch.no_grad()
def quantized_copy(model: Any, weight_format: str) -> Any:
    """Return a model like this one with packed linear layers; what is not packed is shared."""
    clone = clone_sharing_weights(model)
    quantize_linears(clone, weight_format)
    return clone
