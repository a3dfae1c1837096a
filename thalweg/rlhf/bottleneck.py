"""Bottleneck adapters (Houlsby et al. 2019, section 2.1), which PEFT does not have.

Two in each layer: behind the projections that end attention and MLP, before their residual sum::

    y = base_layer(x);  y + up(act(down(y)))        2md + m + d parameters, with m the width, d that of the model

``up`` begins as zeros, so the model is at first what it was.  All else is frozen.  Which layers they are the inference
engine's description of the family says (``infer/models``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from thalweg.infer.models import build_decoder_spec
from thalweg.infer.models.spec import MoESpec, UnsupportedModelError

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"  # PEFT's names


class BottleneckAdapter(nn.Module):
    """A frozen linear layer whose outputs (..., d) pass a bottleneck of ``width``."""

    def __init__(self, base_layer: nn.Module, d: int, width: int) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down, self.up = nn.Linear(d, width), nn.Linear(width, d)
        nn.init.normal_(self.down.weight, std=1e-2)
        for zero in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(zero)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's outputs and what the adapter adds."""
        y = self.base_layer(x)
        return y + self.up(F.gelu(self.down(y)))


def add_bottleneck_adapters(model: Any, width: int) -> list[str]:
    """Freeze a causal Hugging Face model and put two adapters into each layer; returns the adapters' names.

    Raises ValueError where the family is not described, or a layer is a mixture of experts.
    """
    try:
        layers = build_decoder_spec(model).layers
    except UnsupportedModelError as reason:
        raise ValueError(f"bottleneck adapters need to know the model's layers: {reason}") from None
    if any(isinstance(layer.mlp, MoESpec) for layer in layers):
        raise ValueError("bottleneck adapters: a mixture of experts has no projection that ends it; use LoRA")
    ends = [module for layer in layers for module in (layer.attention.out.modules[-1], layer.mlp.down.modules[-1])]  # type: ignore[union-attr]
    names = {id(module): name for name, module in model.named_modules()}
    model.requires_grad_(False)
    for module in ends:
        owner, _, key = names[id(module)].rpartition(".")
        hidden_size = model.config.get_text_config().hidden_size
        setattr(model.get_submodule(owner), key, BottleneckAdapter(module, hidden_size, width))
    return [names[id(module)] for module in ends]


def save_bottleneck_adapters(state_dict: Mapping[str, Tensor], directory: str | Path) -> None:
    """Write the adapters of a whole model's state dict in PEFT's layout: weights, and a config beside them."""
    from safetensors.torch import save_file

    own = {key: value.contiguous() for key, value in state_dict.items() if _is_adapter(key)}
    if not own:
        raise ValueError("the state dict holds no bottleneck adapter")
    width = next(len(value) for key, value in own.items() if key.endswith(".down.weight"))
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(own, folder / _WEIGHTS)
    (folder / _CONFIG).write_text(json.dumps({"peft_type": "BOTTLENECK", "width": width}), encoding="utf-8")


def load_bottleneck_adapters(model: Any, directory: str | Path) -> None:
    """Put the adapters of a directory into a plain model."""
    from safetensors.torch import load_file

    folder = Path(directory)
    config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    if config.get("peft_type") != "BOTTLENECK":
        raise ValueError(f"{folder} has an adapter of type {config.get('peft_type')}: load it by PEFT")
    add_bottleneck_adapters(model, config["width"])
    missing = model.load_state_dict(load_file(folder / _WEIGHTS), strict=False).missing_keys
    if lacking := [key for key in missing if _is_adapter(key)]:
        raise ValueError(f"{folder} lacks {lacking[0]}")


def _is_adapter(key: str) -> bool:
    return any(f".{part}." in key for part in ("down", "up")) and ".base_layer." not in key
