"""Post-training quantisation as ZeroQuant does it (Yao et al. 2022): weights by groups, activations by tokens.

    group_size 0     one scale for each output: the packed int8 kernel, which quantises rows as they come
    group_size n     one scale for n neighbours of an output.  4 bits in groups of 32 have a packed kernel, whose rows
                     stay in 16 bits; other sizes are kept as int8 codes, and made numbers for the time of a product

``save_quantized`` writes the same codes in the compressed-tensors format, which the loader here reads.  A model
that was trained by ``compression_training`` with as many bits, and as many ``quantize_groups`` as a layer has outputs,
loses nothing here: its weights lie on this grid.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thalweg.compression.layers import get_rows, is_transposed
from thalweg.compression.quantize import Quantized, fake_quantize, quantize
from thalweg.infer.quantization.modules import QuantizedLinear, get_output_head, list_wide_linears

_PACKED_GROUP_SIZE = 32


class GroupwiseLinear(nn.Module):
    """A linear layer of int8 codes with a scale for each group of inputs; its rows are quantised one by one."""

    codes: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Module, bits: int, group_size: int, quantize_activations: bool) -> None:
        super().__init__()
        rows = get_rows(layer)
        self.out_features, self.in_features = rows.shape
        self.quantize_activations = quantize_activations
        quantized = _quantize_rows(rows, bits, group_size)
        groups = self.in_features // (group_size or self.in_features)
        self.register_buffer("codes", quantized.codes.to(torch.int8).view(self.out_features, groups, -1))
        self.register_buffer("scale", quantized.scale.view(self.out_features, groups, 1).to(rows.dtype))
        bias = getattr(layer, "bias", None)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias, in x's dtype."""
        weight = (self.codes.to(x.dtype) * self.scale.to(x.dtype)).flatten(1)
        if self.quantize_activations:
            x = fake_quantize(x, 8, max(1, x.numel() // x.shape[-1]))
        return F.linear(x, weight, None if self.bias is None else self.bias.to(x.dtype))


@torch.no_grad()
def zeroquant(model: nn.Module, bits: int = 8, group_size: int = 0, *, quantize_activations: bool = True) -> nn.Module:
    """Exchange a trained model's linear layers (and Hugging Face's Conv1D) for quantised ones; in place, for inference.

    ``bits``: 8 or 4, of weights; activations have 8, each token by its own range.  The output embeddings and layers
    with fewer than 32 inputs or outputs stay as they are.

    Raises:
        ValueError: other bits, or groups that do not divide a layer's inputs.
    """
    kind = quantize_activations, bits, group_size
    packed = {(True, 8, 0): "int8", (False, 4, _PACKED_GROUP_SIZE): "int4"}.get(kind)
    for owner, key, name, layer in _list_linears(model):
        _check(layer, bits, group_size, name)
        if packed is not None:
            setattr(owner, key, QuantizedLinear(layer, packed))
        else:
            setattr(owner, key, GroupwiseLinear(layer, bits, group_size, quantize_activations))
    return model


@torch.no_grad()
def save_quantized(model: Any, folder: str | Path, bits: int = 8, group_size: int = 0) -> Path:
    """Write a Hugging Face model with its linear layers in ``bits`` bits, as compressed-tensors; returns the folder.

    Raises:
        ValueError: other bits, groups that do not divide a layer's inputs, or no layer that the format can say.
    """
    from safetensors.torch import save_file

    layers = {name: layer for *_, name, layer in _list_linears(model) if not is_transposed(layer)}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no torch.nn.Linear, which is what compressed-tensors can say")
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    shared: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if shared.setdefault(id(tensor), name) == name and name.removesuffix(".weight") not in layers:
            tensors[name] = tensor.detach().cpu().contiguous()
    for name, layer in layers.items():
        _check(layer, bits, group_size, name)
        codes, scale, _ = _quantize_rows(layer.weight, bits, group_size)
        tensors[f"{name}.weight_scale"] = scale.view(len(layer.weight), -1).to(layer.weight.dtype).cpu()
        codes = codes.to(torch.int8).view(layer.weight.shape).cpu()
        if bits == 8:
            tensors[f"{name}.weight"] = codes
        else:
            tensors[f"{name}.weight_packed"] = _pack_nibbles(codes)
            tensors[f"{name}.weight_shape"] = torch.tensor(layer.weight.shape)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    others = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in layers]
    config["quantization_config"] = _describe(bits, group_size, others)
    text = json.dumps(config, indent=2, sort_keys=True, default=str)
    (path / "config.json").write_text(text + "\n", encoding="utf-8")
    if model.can_generate():
        model.generation_config.save_pretrained(path)
    return path


def _describe(bits: int, group_size: int, ignored: list[str]) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False}
    weights |= {"strategy": "group", "group_size": group_size} if group_size else {"strategy": "channel"}
    tokens = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": tokens if bits == 8 else None}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if bits == 8 else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
    }


def _list_linears(model: nn.Module) -> list[tuple[nn.Module, str, str, Any]]:
    head = get_output_head(model)
    return [found for found in list_wide_linears(model) if found[-1] is not head]


def _check(layer: Any, bits: int, group_size: int, name: str) -> None:
    inputs = get_rows(layer).shape[1]
    if bits not in (4, 8) or group_size < 0 or (group_size and inputs % group_size):
        raise ValueError(
            f"{name}: {bits} bits in groups of {group_size}: weights have 8 or 4 bits, and group_size is 0 (a scale "
            f"for each output) or divides the layer's {inputs} inputs"
        )


def _quantize_rows(rows: Tensor, bits: int, group_size: int) -> Quantized:
    return quantize(rows.contiguous(), bits, rows.numel() // (group_size or rows.shape[1]))


def _pack_nibbles(codes: Tensor) -> Tensor:
    """Numbers -8 to 7 of (N, K) as int32 (N, ceil(K / 8)), the lowest bits first, each plus 8."""
    numbers = F.pad(codes.to(torch.int64) + 8, (0, -codes.shape[1] % 8)).unflatten(1, (-1, 8))
    words = (numbers << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
