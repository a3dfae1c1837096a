"""Packed linear layers of what the torch wheel holds, where native kernels are not: for described models, whose layers
the eager runner calls, and in place of a live model's own modules."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.infer.models.spec import DecoderSpec, LinearSpec, MoESpec, build_linear
from thalweg.ops.linear.packed import pack_linear

_MIN_FEATURES = 32  # outputs and inputs: narrower layers are routers and gates, which want exact numbers


class QuantizedLinear(nn.Module):
    """An ``nn.Linear`` (or Hugging Face's Conv1D) whose weight is packed as int8 or int4.

    ``weight`` is an empty tensor of the layer's dtype: code asks for that.
    """

    def __init__(self, layer: nn.Module, weight_format: str, device: torch.device | None = None) -> None:
        super().__init__()
        described = build_linear(layer)
        self.in_features, self.out_features = described.in_features, described.out_features
        like: Any = layer.weight
        self._linear: Any = linear_packer(weight_format, device or like.device, like.dtype)(described)
        self.weight = like.detach().new_empty(0)
        self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, in x's dtype."""
        rows = x.reshape(-1, self.in_features).contiguous()
        y = self._linear(rows.float() if rows.device.type == "cpu" else rows)
        return y.view(*x.shape[:-1], self.out_features).to(x.dtype)


def list_wide_linears(model: nn.Module) -> list[tuple[nn.Module, str, str, Any]]:
    """(owner, its name there, full name, layer) of the linear layers that are wide enough to be worth packing."""
    return [
        (owner, key, f"{prefix}.{key}".lstrip("."), child)
        for prefix, owner in model.named_modules()
        for key, child in owner.named_children()
        if (type(child) is nn.Linear or type(child).__name__ == "Conv1D")
        and min(child.weight.shape) >= _MIN_FEATURES  # type: ignore[arg-type]
        and not isinstance(owner, nn.MultiheadAttention)  # which reads its layers' weights
    ]


def get_output_head(model: nn.Module) -> Any:
    """Return a Hugging Face model's output embeddings, or None."""
    return getattr(model, "get_output_embeddings", lambda: None)()


def quantize_linears(
    model: nn.Module, weight_format: str, device: torch.device | None = None
) -> list[tuple[nn.Module, str, nn.Module]]:
    """Exchange a model's linear layers; returns (owner, name, old layer), for :func:`restore`.

    ``weight_format``: int8, or int4, with which the head is in int8.  ``device``: of the new ones, by default the old
    ones'.
    """
    head = get_output_head(model)
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    quantized: dict[int, QuantizedLinear] = {}
    for owner, name, _, child in list_wide_linears(model):
        if id(child) not in quantized:
            quantized[id(child)] = QuantizedLinear(child, "int8" if child is head else weight_format, device)
        setattr(owner, name, quantized[id(child)])
        replaced.append((owner, name, child))
    return replaced


def restore_linears(replaced: list[tuple[nn.Module, str, nn.Module]]) -> None:
    """Put the old layers back."""
    for owner, name, child in replaced:
        setattr(owner, name, child)


@torch.no_grad()
def copy_to(model: Any, device: torch.device, weight_format: str | None, dtype: torch.dtype) -> Any:
    """Return a model like this one on a device, with packed linear layers where a format is named.

    ``dtype``: what parameters of the first one's dtype become; others, and buffers, keep theirs.
    What is there already and is not packed is shared; the model itself stays as it is.
    """
    clone = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    if weight_format is not None:
        quantize_linears(clone, weight_format, device)
    own = next(model.parameters()).dtype
    placed = {id(t): t.to(device, dtype if t.dtype == own else t.dtype) for t in clone.parameters()}
    moved: dict[int, Any] = {key: nn.Parameter(t, requires_grad=False) for key, t in placed.items()}
    return copy.deepcopy(clone, moved | {id(t): t.to(device) for t in clone.buffers()})


def linear_packer(
    weight_format: str, device: torch.device, dtype: torch.dtype
) -> Callable[[LinearSpec], Callable[[Tensor], Tensor]]:
    """Return what packs a described layer in a format (fp32, bf16, fp16, int8, int4) on a device, for rows in ``dtype``
    there."""

    def pack(layer: LinearSpec) -> Callable[[Tensor], Tensor]:
        if layer.out_features == 0:  # a rank without a part of a small vocabulary
            return lambda x: x[:, :0]
        bias = None if layer.bias is None else layer.bias.to(device)
        return pack_linear(layer.weight.to(device), bias, weight_format, dtype)

    return pack


def quantize_experts(decoder: DecoderSpec, weight_format: str, device: torch.device, dtype: torch.dtype) -> DecoderSpec:
    """Return the decoder with the experts' weights packed, for int8 and int4; other formats as they are.

    The packed ones alone are held then, so that a loaded model's own may be dropped.
    """
    if weight_format not in ("int8", "int4"):
        return decoder
    pack = linear_packer(weight_format, device, dtype)

    def quantize(m: MoESpec) -> MoESpec:
        packed_experts = [(pack(LinearSpec(up)), pack(LinearSpec(down))) for up, down in zip(m.up, m.down, strict=True)]
        return replace(m, up=m.up.new_empty(0), down=m.down.new_empty(0), packed_experts=packed_experts)

    layers = [replace(x, mlp=quantize(x.mlp)) if isinstance(x.mlp, MoESpec) else x for x in decoder.layers]
    return replace(decoder, layers=layers)
