"""From the keys of a config to the layers that they name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from thalweg.compression.distill import init_student
from thalweg.compression.layers import (
    ActivationQuantization,
    Compression,
    Mask,
    WeightQuantization,
    compress_layer,
    get_rows,
    is_compressible,
    iter_compressed,
)
from thalweg.config import Config, load
from thalweg.config.schema.base import Section
from thalweg.utils.log import get_logger

_log = get_logger(__name__)
PRUNING = {"sparse_pruning": "sparse", "row_pruning": "row", "channel_pruning": "row", "head_pruning": "head"}


def init_compression(model: Any, deepspeed_config: Any, teacher_model: nn.Module | None = None, mpu: Any = None) -> Any:
    """Make the layers that ``compression_training`` names compute with compressed weights; returns the model.

    Before ``initialize``, with the weights in place: fixed masks follow them now.  ``deepspeed_config``: what
    ``initialize`` takes.  ``teacher_model``: with ``layer_reduction``, the model whose layers the student gets;
    without one the model keeps some of its own.

    Raises:
        ConfigError: the config is wrong.
        ValueError: names that match no layer, or one layer twice; heads or groups that do not divide a layer.
    """
    if mpu is not None:
        raise ValueError("mpu= is not needed: leave it out")
    config = deepspeed_config if isinstance(deepspeed_config, Config) else load(deepspeed_config)
    plain: nn.Module = getattr(model, "module", model)
    section: Any = config.compression_training
    if section.layer_reduction.enabled:
        init_student(plain, teacher_model, section.layer_reduction)
    for technique in ("weight_quantization", "activation_quantization", *PRUNING):
        block = getattr(section, technique)
        if block.shared_parameters.enabled:
            _apply_technique(plain, technique, block.shared_parameters, block.different_groups)
    return model


def is_enabled(config: Config) -> bool:
    """Whether a technique that changes layers is on."""
    section: Any = config.compression_training
    techniques = ("weight_quantization", "activation_quantization", *PRUNING)
    return any(getattr(section, name).shared_parameters.enabled for name in techniques)


def _apply_technique(model: nn.Module, technique: str, shared: Any, groups: Mapping[str, Any]) -> None:
    if not groups:
        raise ValueError(f"compression_training.{technique} is enabled without different_groups: name some modules")
    seen: dict[str, str] = {}
    for group_name, group in groups.items():
        where = f"compression_training.{technique}.different_groups.{group_name}"
        params = _GroupParams(group.params, where)
        related = group.related_modules or [()] * len(group.modules)
        for pattern, related_patterns in zip(group.modules, related, strict=True):
            names = list(find_layers(model, pattern))
            if technique == "sparse_pruning":
                names = [name for name in names if not any(matches(one, name) for one in shared.excluded_modules)]
            if not names:
                raise ValueError(f'{where}: no layer is called "{pattern}"; model.named_modules() has the names')
            partners = [list(find_layers(model, one, related=True)) for one in related_patterns]
            if any(len(partner) != len(names) for partner in partners):
                raise ValueError(f'{where}: each layer called "{pattern}" needs one of each of its related_modules')
            for index, name in enumerate(names):
                if name in seen:
                    raise ValueError(f"{where}: {name} is in {seen[name]} already: narrow the modules of one of them")
                seen[name] = group_name
                layer = model.get_submodule(name)
                compression = compress_layer(layer, len(iter_compressed(model)))
                names_related = tuple(partner[index] for partner in partners)
                _APPLY[technique](model, layer, compression, shared, params, names_related, f"{where}: {name}")


class _GroupParams:
    """The ``params`` of a group; what is asked for and missing is an error that says where."""

    def __init__(self, params: Section, where: str) -> None:
        self._params, self._where = params, where

    def get(self, name: str, default: Any = None) -> Any:
        """A value, or the default."""
        value = getattr(self._params, name)
        return default if value is None else value

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ValueError(f"{self._where}.params has no {name}: say it there")
        return value


def matches(pattern: str, name: str) -> bool:
    """Whether a regular expression is found in a module's name; ``*`` is in every one."""
    return pattern == "*" or re.search(pattern, name) is not None


def find_layers(model: nn.Module, pattern: str, related: bool = False) -> Iterator[str]:
    """Names of layers that can be compressed; ``related``: of any with a weight."""
    for name, module in model.named_modules():
        fits = isinstance(getattr(module, "weight", None), Tensor) if related else is_compressible(module)
        if fits and matches(pattern, name):
            yield name


def _quantize_weight(
    model: nn.Module, layer: Any, compression: Compression, shared: Any, params: _GroupParams, related: Any, where: str
) -> None:
    mixed = shared.fp16_mixed_quantize
    spec = WeightQuantization(
        start_bits=params["start_bits"],
        target_bits=params["target_bits"],
        period=params.get("quantization_period", 1),
        offset=shared.schedule_offset,
        num_groups=shared.quantize_groups,
        symmetric=shared.quantization_type == "symmetric",
        stochastic=shared.rounding == "stochastic",
        change_ratio=mixed.quantize_change_ratio if mixed.enabled else 0.0,
        verbose=shared.quantize_verbose,
    )
    quantize_layer_weight(layer, compression, spec, where)


def quantize_layer_weight(layer: Any, compression: Compression, spec: WeightQuantization, where: str) -> None:
    """Check that a specification suits a layer, and have it quantised; a table by rows (tokens)."""
    from dataclasses import replace

    if isinstance(layer, nn.Embedding):
        spec = replace(spec, num_groups=layer.num_embeddings)
    if layer.weight.numel() % spec.num_groups:
        raise ValueError(f"{where}: {spec.num_groups} quantize_groups do not divide {tuple(layer.weight.shape)}")
    if spec.target_bits < 3 and not (spec.symmetric and not spec.stochastic):
        raise ValueError(f'{where}: 1 and 2 bits are "symmetric" and rounded to the "nearest": set them so')
    compression.quantize_weight(spec)


def _quantize_activation(
    model: nn.Module, layer: Any, compression: Compression, shared: Any, params: _GroupParams, related: Any, where: str
) -> None:
    static, symmetric = shared.range_calibration == "static", shared.quantization_type == "symmetric"
    compression.quantize_activation(ActivationQuantization(params["bits"], symmetric, static, shared.schedule_offset))


def _prune(technique: str) -> Callable[..., None]:
    def apply(
        model: nn.Module,
        layer: Any,
        compression: Compression,
        shared: Any,
        params: _GroupParams,
        related: tuple[str, ...],
        where: str,
    ) -> None:
        weight = get_rows(layer)
        if weight.is_meta:
            raise ValueError(f"{where} has no weights yet: call init_compression() when they are loaded")
        ratio, rows = params["dense_ratio"], weight.detach().float().abs()
        if technique == "sparse_pruning":
            norms = rows
        elif technique == "head_pruning":
            units = _count_head_units(model, layer, params.get("num_heads", shared.num_heads), related, where)
            norms = rows.sum(0).view(units, -1).sum(1)
        else:
            norms = rows.flatten(1).sum(1)
        setattr(compression, PRUNING[technique], Mask(norms, ratio, shared.method, shared.schedule_offset, related))

    return apply


def _count_head_units(model: nn.Module, layer: Any, num_heads: int | None, related: Iterable[str], where: str) -> int:
    """Heads that can go alone: with fewer key heads than query heads, those that share a key head go together."""
    inputs = get_rows(layer).shape[1]
    if not num_heads or inputs % num_heads:
        raise ValueError(f"{where}: num_heads is {num_heads}; it must divide the {inputs} inputs of this layer")
    rows = [get_rows(model.get_submodule(name)).shape[0] for name in related]
    return min([num_heads, *(count * num_heads // inputs for count in rows)])


_APPLY: dict[str, Callable[..., None]] = {
    "weight_quantization": _quantize_weight,
    "activation_quantization": _quantize_activation,
    **{technique: _prune(technique) for technique in PRUNING},
}
