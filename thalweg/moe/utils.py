"""Which parameters are of experts, and groups of them for an optimizer."""

from typing import Any

from torch import Tensor, nn

from thalweg.nn.moe.experts import ExpertParameter
from thalweg.nn.moe.layer import MoE


def is_moe_param(param: Tensor) -> bool:
    """Whether it is the parameter of a :class:`MoE` layer's experts (asked before ``thalweg.initialize``)."""
    return isinstance(param, ExpertParameter)


def has_moe_layers(module: nn.Module) -> tuple[bool, int]:
    """Whether there are :class:`MoE` layers, and how many experts the first of them has (0 for none)."""
    counts = [layer.num_experts for layer in module.modules() if isinstance(layer, MoE)]
    return bool(counts), counts[0] if counts else 0


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | list[dict[str, Any]] | tuple[dict[str, Any], ...],
    max_group_size: float | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups with experts' parameters in groups of their own, marked ``moe``: True.

    DeepSpeed needs the split to reduce and clip rightly; here it changes nothing but what a
    user may set by group.  The other options of a group are kept; ``max_group_size``: elements
    at which a group of experts is split further.
    """
    groups: list[dict[str, Any]]
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    dense_groups: list[dict[str, Any]] = []
    expert_groups: list[dict[str, Any]] = []
    for group in groups:
        params = list(group["params"])
        dense_groups.append({**group, "params": [p for p in params if not is_moe_param(p)]})
        chunks: list[list[Tensor]] = []
        size = 0.0
        for param in filter(is_moe_param, params):
            if not chunks or (max_group_size is not None and size + param.numel() > max_group_size):
                chunks.append([])
                size = 0.0
            chunks[-1].append(param)
            size += param.numel()
        expert_groups += [{**group, "name": "experts", "moe": True, "params": chunk} for chunk in chunks]
    return [group for group in dense_groups if group["params"]] + expert_groups
