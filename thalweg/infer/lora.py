"""LoRA adapters (Hu et al. 2022) beside the weights, several at once: each sequence has its own, or none.

An adapter is a directory in the format of the library peft: ``adapter_config.json`` and a safetensors file
with a pair of matrices for each module it adapts.  A described layer may stack several modules and bring
their outputs into another order; its pair is then stacked too: A by rows, B block by block, in that order.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.infer.models.spec import DecoderSpec, EncoderSpec, LinearSpec, list_linears

# A (rank, inputs) and B transposed (rank, outputs), scaled; both fp32.
LoraWeights = tuple[Tensor, Tensor]
_PEFT_PREFIX = "base_model.model."
# Settings that change more than the products, and the values with which they do not.
_UNSUPPORTED_SETTINGS = {
    "use_dora": (False, None), "bias": ("none", None), "lora_bias": (False, None),
    "layer_replication": (None,), "modules_to_save": (None, []), "trainable_token_indices": (None,),
    "target_parameters": (None, []), "alora_invocation_tokens": (None,),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),
}  # fmt: skip
# For PiSSA, OLoRA and others that begin with a part of the model's own weights.
_CONVERSION = "let peft's save_pretrained convert it, by path_initial_model_for_weight_conversion"


class LoraManager:
    """Named adapters of one described model.  Raises ValueError for what is unknown or does not fit."""

    def __init__(self, folders: Mapping[str, str | Path], model: nn.Module, spec: DecoderSpec | EncoderSpec) -> None:
        self.names = tuple(folders)
        self._weights: dict[int, list[LoraWeights | None]] = {}
        modules = dict(model.named_modules())
        loaded = [_load_adapter(name, Path(folder), model) for name, folder in folders.items()]
        described: set[nn.Module] = set()
        for layer in list_linears(spec):
            pairs = [_stack_weights(layer, found) for found in loaded]
            if any(pair is not None for pair in pairs):
                self._weights[id(layer)] = pairs
            described.update(layer.modules)
        for name, found in zip(self.names, loaded, strict=True):
            for module in found:
                if module not in described:
                    label = next(key for key, value in modules.items() if value is module)
                    raise ValueError(f"adapter {name}: {label} is no linear layer that can be adapted here")

    def weights_for(self, layer: LinearSpec) -> list[LoraWeights | None] | None:
        """Return a layer's pair in each adapter, or None where none adapts it."""
        return self._weights.get(id(layer))


def _load_adapter(name: str, folder: Path, model: nn.Module) -> dict[nn.Module, LoraWeights]:
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
    for key, allowed in _UNSUPPORTED_SETTINGS.items():
        if config.get(key, allowed[0]) not in allowed:
            cure = _CONVERSION if key == "init_lora_weights" else f"it may be {allowed[0]!r}"
            raise ValueError(f"adapter {name}: {key} is {config[key]!r}, which is not supported; {cure}")
    matrices: dict[str, dict[str, Tensor]] = {}
    for key, tensor in load_file(file).items():
        base_weight = parameters.get(key.removeprefix(_PEFT_PREFIX).replace(".base_layer.", "."))
        if (
            base_weight is not None
            and base_weight.shape == tensor.shape
            and torch.equal(base_weight.float(), tensor.float())
        ):
            continue  # a copy of the model's own weight, which peft adds beside an adapted head
        label, _, matrix_name = key.removesuffix(".weight").removeprefix(_PEFT_PREFIX).rpartition(".")
        if matrix_name not in ("lora_A", "lora_B"):
            raise ValueError(f"adapter {name}: {key} is no matrix of a linear layer, which is not supported")
        matrices.setdefault(label, {})[matrix_name] = tensor.float()
    loaded: dict[nn.Module, LoraWeights] = {}
    for label, pair in matrices.items():
        if label not in modules or len(pair) != 2:
            why = "the model has no such module" if label not in modules else "one of its two matrices is missing"
            raise ValueError(f"adapter {name}: {label}: {why}")
        down, up = pair["lora_A"], pair["lora_B"]
        loaded[modules[label]] = (down, (up * _lora_scale(config, label, down.shape[0])).t().contiguous())
    return loaded


def _lora_scale(config: dict[str, Any], label: str, rank: int) -> float:
    """Return what a module's product is scaled by."""
    alpha = config.get("lora_alpha")
    alpha = 8 if alpha is None else alpha
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", label):
            alpha = value
            break
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _stack_weights(layer: LinearSpec, adapter: Mapping[nn.Module, LoraWeights]) -> LoraWeights | None:
    """Return one adapter's pair of a described layer, or None where it adapts none of its modules."""
    pairs = [adapter.get(module) for module in layer.modules]
    downs = [pair[0] for pair in pairs if pair is not None]
    if not downs:
        return None
    modules: Any = layer.modules
    sizes = [module.weight.shape[1 if type(module).__name__ == "Conv1D" else 0] for module in modules]
    up = torch.zeros(sum(len(down) for down in downs), sum(sizes))
    row = column = 0
    for pair, size in zip(pairs, sizes, strict=True):
        if pair is not None:
            if pair[1].shape[1] != size or pair[0].shape[1] != layer.in_features:
                shapes = f"{tuple(pair[0].shape)} and {tuple(pair[1].shape)}"
                raise ValueError(f"an adapter's matrices {shapes} do not fit a layer {(size, layer.in_features)}")
            up[row : row + len(pair[0]), column : column + size] = pair[1] * layer.output_scale
            row += len(pair[0])
        column += size
    return torch.cat(downs), up if layer.output_permutation is None else up[:, layer.output_permutation]
