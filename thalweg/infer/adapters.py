"""LoRA adapters (Hu et al. 2022) beside the weights, several at once: each sequence has its own, or none.

An adapter is a directory in the format of the library peft: ``adapter_config.json`` and a safetensors file
with a pair of matrices for each module it adapts.  A described layer may stack several modules and bring
their outputs into another order; its pair is then stacked too: A by rows, B block by block, in that order.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.infer.describe import Decoder, Encoder, Linear
from thalweg.infer.weights import every

Pair = tuple[Tensor, Tensor]
"""A (rank, inputs) and B transposed (rank, outputs), scaled; both fp32."""
_PREFIX = "base_model.model."
_REFUSED = {
    "use_dora": (False, None), "bias": ("none", None), "lora_bias": (False, None),
    "layer_replication": (None,), "modules_to_save": (None, []), "trainable_token_indices": (None,),
    "target_parameters": (None, []), "alora_invocation_tokens": (None,),
}  # fmt: skip
"""Settings that change more than the products, and the values with which they do not."""


class Adapters:
    """Named adapters of one described model.  Raises ValueError for what is unknown or does not fit."""

    def __init__(self, folders: Mapping[str, str | Path], model: nn.Module, stack: Decoder | Encoder) -> None:
        self.names = tuple(folders)
        self._pairs: dict[int, list[Pair | None]] = {}
        modules = dict(model.named_modules())
        loaded = [_load(name, Path(folder), model) for name, folder in folders.items()]
        taken: list[set[nn.Module]] = [set() for _ in loaded]
        for layer, _ in every(stack, "fp32", mixtures=True):
            pairs = [_stacked(layer, found) for found in loaded]
            if any(pair is not None for pair in pairs):
                self._pairs[id(layer)] = pairs
            for place in range(len(loaded)):
                taken[place].update(module for module in layer.modules if module in loaded[place])
        for name, found, used in zip(self.names, loaded, taken, strict=True):
            for module in found:
                if module not in used:
                    label = next(key for key, value in modules.items() if value is module)
                    raise ValueError(f"adapter {name}: {label} is no linear layer that can be adapted here")

    def of(self, layer: Linear) -> list[Pair | None] | None:
        """Return a layer's pair in each adapter, or None where none adapts it."""
        return self._pairs.get(id(layer))


def _load(name: str, folder: Path, model: nn.Module) -> dict[nn.Module, Pair]:
    """Return an adapter's pairs by module."""
    from safetensors.torch import load_file

    modules, parameters = dict(model.named_modules()), dict(model.named_parameters(remove_duplicate=False))
    config_path, file = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    for path in (config_path, file):
        if not path.is_file():
            raise ValueError(f"adapter {name}: there is no {path}; save it by peft's save_pretrained")
    config = json.loads(config_path.read_text(encoding="utf-8"))
    if config.get("peft_type") != "LORA":
        raise ValueError(f"adapter {name}: peft_type is {config.get('peft_type')!r}; only LORA is known here")
    for key, fine in _REFUSED.items():
        if config.get(key, fine[0]) not in fine:
            raise ValueError(
                f"adapter {name}: {key} is {config[key]!r}, which is not supported; it may be {fine[0]!r}"
            )
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in load_file(file).items():
        own = parameters.get(key.removeprefix(_PREFIX).replace(".base_layer.", "."))
        if own is not None and own.shape == tensor.shape and torch.equal(own.float(), tensor.float()):
            continue  # a copy of the model's own weight, which peft adds beside an adapted head
        label, _, half = key.removesuffix(".weight").removeprefix(_PREFIX).rpartition(".")
        if half not in ("lora_A", "lora_B"):
            raise ValueError(f"adapter {name}: {key} is no matrix of a linear layer, which is not supported")
        halves.setdefault(label, {})[half] = tensor.float()
    found: dict[nn.Module, Pair] = {}
    for label, pair in halves.items():
        if label not in modules or len(pair) != 2:
            why = (
                "the model has no such module"
                if label not in modules
                else "one of its two matrices is missing"
            )
            raise ValueError(f"adapter {name}: {label}: {why}")
        down, up = pair["lora_A"], pair["lora_B"]
        found[modules[label]] = (down, (up * _scale(config, label, down.shape[0])).t().contiguous())
    return found


def _scale(config: dict[str, Any], label: str, rank: int) -> float:
    """Return what a module's product is scaled by."""
    alpha = config.get("lora_alpha")
    alpha = 8 if alpha is None else alpha
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", label):
            alpha = value
            break
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _stacked(layer: Linear, found: Mapping[nn.Module, Pair]) -> Pair | None:
    """Return one adapter's pair of a described layer, or None where it adapts none of its modules."""
    pairs = [found.get(module) for module in layer.modules]
    downs = [pair[0] for pair in pairs if pair is not None]
    if not downs:
        return None
    sizes = [_outputs(module) for module in layer.modules]
    up = torch.zeros(sum(len(down) for down in downs), sum(sizes))
    row = column = 0
    for pair, size in zip(pairs, sizes, strict=True):
        if pair is not None:
            if pair[1].shape[1] != size or pair[0].shape[1] != layer.inputs:
                shapes = f"{tuple(pair[0].shape)} and {tuple(pair[1].shape)}"
                raise ValueError(f"an adapter's matrices {shapes} do not fit a layer {(size, layer.inputs)}")
            up[row : row + len(pair[0]), column : column + size] = pair[1] * layer.factor
            row += len(pair[0])
        column += size
    return torch.cat(downs), up if layer.order is None else up[:, layer.order]


def _outputs(module: Any) -> int:
    return module.weight.shape[1 if type(module).__name__ == "Conv1D" else 0]
