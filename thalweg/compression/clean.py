"""The end of compression: weights rounded and masked for good, units removed, layers plain again.

Units that are to go (rows of a layer, heads of an attention) are first only listed: which positions of which dim of
which layer stay.  A Hugging Face model must go on loading by its ``config.json``, so its class is built without
memory from a config with the smaller numbers, and the shapes compared: what this config can say is removed, the rest
is set to zero, with a line in the log.  Llama's config names the width of a head, so heads go; BERT's and GPT-2's
do not.  A model without such a config loses all that has ``related_modules``.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.compression.layers import CompressedLayer, Mask, get_rows, is_transposed, iter_compressed, restore_layer
from thalweg.utils.log import get_logger
from thalweg.utils.trees import copy_to_meta
from thalweg.zero.whole_tensors import gather_master

_log = get_logger(__name__)
# What families call the width of their MLPs; None stands for four times the model's.
_MLP_WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim")


@dataclass
class _Removal:
    """Units of one mask: ``cuts`` are (layer's name, "rows" or "inputs", kept positions)."""

    kind: str
    layer: CompressedLayer
    mask: Mask
    kept: Tensor
    cuts: list[tuple[str, str, Tensor]]


@torch.no_grad()
def redundancy_clean(model: Any, deepspeed_config: Any = None, mpu: Any = None) -> Any:
    """Make a model that was compressed plain, and smaller; returns it.

    A plain model is changed in place.  Of an engine, or a model in training, a whole copy is made, which every rank
    gets: collective.  Weights are rounded to their ``target_bits`` and stay in their dtype; ranges of activations are
    dropped.  ``deepspeed_config`` and ``mpu`` are not needed: the layers know.

    Raises:
        ValueError: no layer of the model is compressed.
    """
    plain: nn.Module = getattr(model, "module", model)
    if not iter_compressed(plain):
        raise ValueError(
            f"no layer of this {type(plain).__name__} is compressed: redundancy_clean() wants what init_compression() "
            "returned, with the trained weights loaded into it"
        )
    if plain is not model or any(type(param) is not nn.Parameter for param in plain.parameters()):
        whole = {id(p): nn.Parameter(gather_master(p), requires_grad=p.requires_grad) for p in plain.parameters()}
        plain = copy.deepcopy(plain, whole)  # collective
    layers = iter_compressed(plain)
    # A weight of two layers once: what a mask has hidden may have told the scale.
    for layer in {layer.compression: layer for layer in layers.values()}.values():
        rows, bias = get_rows(layer), getattr(layer, "bias", None)
        final_rows, final_bias = layer.compression.rows_and_bias(rows, bias, final=True)
        rows.copy_(final_rows)
        if bias is not None and final_bias is not None:
            bias.copy_(final_bias)
    removals = [one for one in _iter_removals(plain, layers) if one.mask.related]
    if hasattr(getattr(plain, "config", None), "to_dict"):
        _remove_what_config_says(plain, removals)
    else:
        _remove(plain, removals)
    for layer in layers.values():
        restore_layer(layer)
    return plain


def _iter_removals(model: nn.Module, layers: dict[str, CompressedLayer]) -> Iterator[_Removal]:
    for name, layer in layers.items():
        for kind in ("row", "head"):
            mask: Mask | None = getattr(layer.compression, kind)
            if mask is None:
                continue
            kept = mask().bool().flatten()
            own_width = get_rows(layer).shape[0 if kind == "row" else 1]
            cuts = [(name, "rows" if kind == "row" else "inputs", _positions(kept, own_width))]
            for other in mask.related:
                cuts.append((other, *_cut_related(model.get_submodule(other), kind, kept, own_width, other)))
            yield _Removal(kind, layer, mask, kept, cuts)


def _cut_related(layer: Any, kind: str, kept: Tensor, width: int, name: str) -> tuple[str, Tensor]:
    """Which dim of a related layer goes with a mask over units, ``width`` wide together in the layer that has it."""
    if layer.weight.dim() == 1:  # a norm over channels
        return "rows", _positions(kept, layer.weight.shape[0])
    outputs, inputs = get_rows(layer).shape[:2]
    if kind == "row" and inputs % width == 0:  # what reads these rows; flattened maps give several inputs to each
        return "inputs", _positions(kept, inputs)
    if kind == "row" and outputs == width:  # what makes a factor of them, as the other half of a gated MLP
        return "rows", _positions(kept, outputs)
    if kind == "head" and outputs == 3 * width:  # queries, keys and values in one
        part = _positions(kept, width)
        return "rows", torch.cat([part, part + width, part + 2 * width])
    if kind == "head" and outputs % kept.numel() == 0:
        return "rows", _positions(kept, outputs)
    raise ValueError(f"{name} ({outputs} outputs, {inputs} inputs) does not fit the layer whose {kind}s it shares")


def _positions(kept: Tensor, width: int) -> Tensor:
    return kept.repeat_interleave(width // kept.numel()).nonzero().flatten()


def _remove_what_config_says(model: Any, removals: list[_Removal]) -> None:
    kinds = {removal.kind for removal in removals}
    if not kinds:
        return
    for chosen in sorted(({"row", "head"}, {"row"}, {"head"}, set()), key=len, reverse=True):
        wanted = [removal for removal in removals if removal.kind in chosen]
        if not chosen <= kinds or not (skeleton := _build_smaller(model, wanted)):
            continue
        _remove(model, wanted)
        _take_numbers(model, skeleton)
        for kind in sorted(kinds - chosen):
            _log.warning(
                "%s: the config of %s cannot say that %ss are fewer (or layers differ in their number): they are set "
                "to zero and stay in the model",
                "redundancy_clean", type(model).__name__, kind,
            )  # fmt: skip
        return


def _build_smaller(model: Any, removals: list[_Removal]) -> nn.Module | None:
    """The model's class without memory, by a config with the numbers of what stays, if its shapes are then right."""
    config = copy.deepcopy(model.config)
    for removal in removals:
        total, left = removal.kept.numel(), int(removal.kept.sum())
        if removal.kind == "row":
            for name in _MLP_WIDTHS:
                if hasattr(config, name) and getattr(model.config, name) in (total, None):
                    setattr(config, name, left)
        else:
            if getattr(config, "head_dim", None) is None:
                return None
            for name in ("num_attention_heads", "num_key_value_heads"):
                if (heads := getattr(model.config, name, None)) is not None:
                    setattr(config, name, heads * left // total)
    cut = copy_to_meta(model)
    _remove(cut, removals)
    try:
        with torch.device("meta"):
            skeleton = type(model)(config)
    except (ValueError, TypeError, RuntimeError):
        return None
    return skeleton if _shapes(skeleton) == _shapes(cut) else None


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(param.shape) for name, param in model.named_parameters() if ".compression." not in name}


def _remove(model: nn.Module, removals: list[_Removal]) -> None:
    for removal in removals:
        for name, what, positions in removal.cuts:
            layer: Any = model.get_submodule(name)
            dim = int((what == "inputs") != is_transposed(layer)) if layer.weight.dim() > 1 else 0
            layer.weight = _select(layer.weight, dim, positions)
            if what == "rows":
                for key in ("bias", "running_mean", "running_var"):
                    if isinstance(getattr(layer, key, None), Tensor):
                        setattr(layer, key, _select(getattr(layer, key), 0, positions))
            for key in _COUNTS[what]:
                if hasattr(layer, key):
                    setattr(layer, key, len(positions))


_COUNTS = {
    "rows": ("out_features", "nf", "out_channels", "num_features"),
    "inputs": ("in_features", "nx", "in_channels"),
}


def _select(tensor: Tensor, dim: int, positions: Tensor) -> Tensor:
    kept = tensor.detach().index_select(dim, positions.to(tensor.device)).clone()
    return nn.Parameter(kept, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else kept


def _take_numbers(model: Any, skeleton: Any) -> None:
    """What modules and the config keep of sizes becomes that of a model built small."""
    for name, value in skeleton.config.to_dict().items():
        if getattr(model.config, name, None) != value and isinstance(value, int):
            setattr(model.config, name, value)
    for name, module in model.named_modules():
        if ".compression" in f".{name}":
            continue
        numbers = skeleton.get_submodule(name).__dict__
        for key, value in numbers.items():
            if type(value) is int and type(module.__dict__.get(key)) is int:
                module.__dict__[key] = value
