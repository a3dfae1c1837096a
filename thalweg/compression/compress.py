"""From the keys of a config to the layers that they name."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from thalweg.compression import layers
from thalweg.compression.distill import init_student
from thalweg.compression.layers import WeightQuantization, get_rows
from thalweg.config import Config, load
from thalweg.utils.log import get_logger

_log = get_logger(__name__)
PRUNING = {"sparse_pruning": "sparse", "row_pruning": "row", "channel_pruning": "row", "head_pruning": "head"}


# The techniques, in the order in which they come to a layer, and what each cannot do without.
_REQUIRED_PARAMS: dict[str, tuple[str, ...]] = {
    "weight_quantization": ("start_bits", "target_bits"),
    "activation_quantization": ("bits",),
    **dict.fromkeys(PRUNING, ("dense_ratio",)),
}


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
    for technique in _REQUIRED_PARAMS:
        block = getattr(section, technique)
        if block.shared_parameters.enabled:
            _apply_technique(plain, technique, block.shared_parameters, block.different_groups)
    return model


def is_enabled(config: Config) -> bool:
    """Whether a technique that changes layers is on."""
    section: Any = config.compression_training
    return any(getattr(section, technique).shared_parameters.enabled for technique in _REQUIRED_PARAMS)


def _apply_technique(model: nn.Module, technique: str, shared: Any, groups: Mapping[str, Any]) -> None:
    if not groups:
        raise ValueError(f"compression_training.{technique} is enabled without different_groups: name some modules")
    seen: dict[str, str] = {}
    for group_name, group in groups.items():
        where = f"compression_training.{technique}.different_groups.{group_name}"
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
                compression = layers.compress_layer(model, layer, len(layers.iter_compressed(model)))
                for required in _REQUIRED_PARAMS[technique]:
                    if getattr(group.params, required) is None:
                        raise ValueError(f"{where}.params has no {required}: say it there")
                at = f"{where}: {name}"
                if technique == "weight_quantization":
                    params, period = group.params, group.params.quantization_period
                    pace = 1 if period is None else period, shared.schedule_offset
                    spec = weight_quantization(shared, params, *pace, shared.quantization_type, shared.rounding)
                    quantize_layer_weight(layer, compression, spec, at)
                elif technique == "activation_quantization":
                    _quantize_activation(compression, shared, group.params.bits)
                elif getattr(compression, PRUNING[technique]) is None:
                    names_related = tuple(partner[index] for partner in partners)
                    mask = _make_mask(model, layer, technique, shared, group.params, names_related, at)
                    setattr(compression, PRUNING[technique], mask)


def matches(pattern: str, name: str) -> bool:
    """Whether a regular expression is found in a module's name; ``*`` is in every one."""
    return pattern == "*" or re.search(pattern, name) is not None


def find_layers(model: nn.Module, pattern: str, related: bool = False) -> Iterator[str]:
    """Names of layers that can be compressed; ``related``: of any with a weight."""
    for name, module in model.named_modules():
        fits = isinstance(getattr(module, "weight", None), Tensor) if related else layers.is_compressible(module)
        if fits and matches(pattern, name):
            yield name


def weight_quantization(
    section: Any, bits: Any, period: int, offset: int, quantization_type: str, rounding: str
) -> WeightQuantization:
    """How weights lose their bits; ``section`` has what compression and MoQ spell alike, ``bits`` where they begin and
    end."""
    mixed = section.fp16_mixed_quantize
    return WeightQuantization(
        start_bits=bits.start_bits,
        target_bits=bits.target_bits,
        period=period,
        offset=offset,
        num_groups=section.quantize_groups,
        symmetric=quantization_type == "symmetric",
        stochastic=rounding == "stochastic",
        change_ratio=mixed.quantize_change_ratio if mixed.enabled else 0.0,
        verbose=section.quantize_verbose,
    )


def quantize_layer_weight(layer: Any, compression: layers.Compression, spec: WeightQuantization, where: str) -> None:
    """Check that a specification suits a layer, and have it quantised unless it is; a table by rows (tokens)."""
    if compression.weight is not None:
        return
    if compression.is_table:
        spec = replace(spec, num_groups=len(layer.weight))
    if layer.weight.numel() % spec.num_groups:
        raise ValueError(f"{where}: {spec.num_groups} quantize_groups do not divide {tuple(layer.weight.shape)}")
    if spec.target_bits < 3 and not (spec.symmetric and not spec.stochastic):
        raise ValueError(f'{where}: 1 and 2 bits are "symmetric" and rounded to the "nearest": set them so')
    compression.quantize_weight(spec)


def _quantize_activation(compression: layers.Compression, shared: Any, bits: int) -> None:
    static, symmetric = shared.range_calibration == "static", shared.quantization_type == "symmetric"
    compression.quantize_activation(layers.ActivationQuantization(bits, symmetric, static, shared.schedule_offset))


def _make_mask(
    model: nn.Module, layer: Any, technique: str, shared: Any, params: Any, related: tuple[str, ...], where: str
) -> layers.Mask:
    weight = get_rows(layer)
    if weight.is_meta:
        raise ValueError(f"{where} has no weights yet: call init_compression() when they are loaded")
    rows = weight.detach().float().abs()
    if technique == "sparse_pruning":
        norms = rows
    elif technique == "head_pruning":
        num_heads = shared.num_heads if params.num_heads is None else params.num_heads
        norms = rows.sum(0).view(_count_head_units(model, layer, num_heads, related, where), -1).sum(1)
    else:
        norms = rows.flatten(1).sum(1)
    return layers.Mask(norms, params.dense_ratio, shared.method, shared.schedule_offset, related)


def _count_head_units(model: nn.Module, layer: Any, num_heads: int | None, related: Iterable[str], where: str) -> int:
    """Heads that can go alone: with fewer key heads than query heads, those that share a key head go together."""
    inputs = get_rows(layer).shape[1]
    if not num_heads or inputs % num_heads:
        raise ValueError(f"{where}: num_heads is {num_heads}; it must divide the {inputs} inputs of this layer")
    rows = [get_rows(model.get_submodule(name)).shape[0] for name in related]
    return min([num_heads, *(count * num_heads // inputs for count in rows)])
