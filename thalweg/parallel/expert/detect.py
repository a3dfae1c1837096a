"""Layers of experts in models that nobody rewrote, found by their structure.

Two forms are known, whatever the model is called:

    a stack   one module whose parameters have a row for each expert, called with (tokens (N, D),
              chosen experts (N, k), their weights (N, k)): all of transformers 5
    a list    a ModuleList or ModuleDict of alike modules that the layer around them calls with the
              rows of each (transformers 4, remote code, Switch): see :mod:`.module_list`

A stack that is spread keeps its class, its names and its router; only its forward goes to the
ranks that have the experts.  Before it is trusted a stack is compared, on a few random tokens,
with what this file takes it to compute: the weighted sum of each chosen expert's output.
"""

import inspect
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.config.schema.parallel import ExpertParallel
from thalweg.deferred_init.op_graph import is_meta
from thalweg.ops.grouped_mm import RowGroups, grouped_linear, sort_by_expert
from thalweg.parallel.expert.expert_parallel import AllToAllDispatcher, ExpertLayer, ExpertShardSpec, local_rows
from thalweg.parallel.expert.module_list import find_expert_lists
from thalweg.parallel.shard_spec import contiguous_spec
from thalweg.parallel.tensor.dummy_inputs import eval_mode
from thalweg.parallel.tensor.layers import ReplacedForward, functional_forward, replace_forward
from thalweg.parallel.tensor.plan import UnshardableModelError


def _is_wanted(name: str, section: ExpertParallel) -> bool:
    """Whether the patterns for the name of a layer, and of the experts in it, take the experts called ``name``."""
    layer, _, experts = name.rpartition(".")
    patterns = ((section.moe_layer_pattern, layer), (section.expert_pattern, experts))
    return all(pattern is None or re.search(pattern, text) is not None for pattern, text in patterns)


def find_experts(model: nn.Module, section: ExpertParallel | None = None) -> dict[str, ExpertLayer]:
    """The layers of experts of a plain model, by name; each can be spread over ranks.

    ``section``: which of them to take, and the attribute that tells how many experts a stack has.

    Raises:
        ValueError: a stack computes something else than a weighted sum of its experts.
    """
    section, expert_layers = section or ExpertParallel(), {}
    for name, module in model.named_modules():
        if is_stacked(module, section) and _is_wanted(name, section):
            _check_weighted_sum(name, module, section)
            expert_layers[name] = StackedExperts(module, _num_experts(module, section), section.use_grouped_mm)
    for name, experts in find_expert_lists(model).items():
        if _is_wanted(name, section):
            expert_layers[name] = experts
    return expert_layers


def _num_experts(module: nn.Module, section: ExpertParallel) -> int:
    value = getattr(module, section.num_experts_attr or "num_experts", 0)
    return value if isinstance(value, int) else 0


def is_stacked(module: nn.Module, section: ExpertParallel) -> bool:
    """Whether a module is a stack of experts."""
    count = _num_experts(module, section)
    stacked = [p for p in module._parameters.values() if p is not None]
    if count < 2 or not any(p.ndim == 3 for p in stacked) or any(len(p) != count for p in stacked if p.ndim):
        return False
    has_children_params = any(True for child in module.children() for _ in child.parameters())
    return not has_children_params and len(positional_args(module)) >= 3


def positional_args(module: nn.Module) -> list[str]:
    """The names of the arguments of a module's forward."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(type(module).forward).parameters
    return [name for name, p in parameters.items() if p.kind in kinds and name != "self"]


class StackedExperts:
    """A module that is a stack of experts."""

    ep_size = 1

    def __init__(self, module: nn.Module, num_experts: int, use_grouped_mm: bool) -> None:
        self.module, self.num_experts, self.use_grouped_mm = module, num_experts, use_grouped_mm

    def shard_specs(self, num_ranks: int) -> Iterator[ExpertShardSpec]:
        """The experts' parameters and how ``num_ranks`` divide them."""
        spec = contiguous_spec(0, self.num_experts, num_ranks)
        for key, parameter in self.module._parameters.items():
            if parameter is not None:
                yield ExpertShardSpec(key, self.module, key, spec)

    def attach_dispatcher(self, dispatcher: AllToAllDispatcher) -> None:
        """Take the exchange that brings tokens to their experts."""
        module = self.module
        is_grouped = self.use_grouped_mm and _is_transformers_format(module)
        compute = _grouped_forward if is_grouped else partial(_per_row_forward, type(module).forward)
        names = positional_args(module)[:3]
        num_experts = self.num_experts
        num_local = next(len(local_rows(p, p.dtype)) for p in module._parameters.values() if p is not None)
        for key in [key for key, value in vars(module).items() if value == num_experts and "expert" in key]:
            setattr(module, key, num_local)

        def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
            named_args = {**dict(zip(names, args, strict=False)), **kwargs}
            hidden, chosen, weights = (named_args[name] for name in names)
            tokens = hidden.reshape(-1, hidden.shape[-1])
            chosen = chosen.reshape(len(tokens), -1)
            permutation = sort_by_expert(chosen, num_experts, chosen < num_experts)
            rows, groups, combine = dispatcher.dispatch(permutation.permute(tokens), permutation.groups)
            named_params = ((key, p) for key, p in self._parameters.items() if p is not None)
            local_weights = {key: dispatcher.local_weight(p, rows.dtype) for key, p in named_params}
            results = combine(compute(self, rows, groups, local_weights))
            return permutation.combine(results, weights.reshape(chosen.shape)).to(hidden.dtype).view_as(hidden)

        replace_forward(module, forward)


def _is_transformers_format(module: nn.Module) -> bool:
    """Whether it is of transformers' own form, which says how its matrices lie and what is between them."""
    flags = ("has_gate", "has_bias", "is_transposed")
    has_no_post_norm = not getattr(module, "has_post_expert_norm", False)
    first = "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"
    keys = {first, "down_proj"}
    if getattr(module, "has_bias", False):
        keys |= {f"{key}_bias" for key in keys}
    present = {key for key, parameter in module._parameters.items() if parameter is not None}
    has_flags = all(isinstance(getattr(module, key, None), bool) for key in flags)
    return has_flags and has_no_post_norm and keys == present and not isinstance(module, ReplacedForward)


def _grouped_forward(module: Any, rows: Tensor, groups: RowGroups, weights: dict[str, Tensor]) -> Tensor:
    first = "gate_up_proj" if module.has_gate else "up_proj"
    inputs_first = module.is_transposed
    inner = grouped_linear(rows, weights[first], groups, weights.get(f"{first}_bias"), in_features_first=inputs_first)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    bias = weights.get("down_proj_bias")
    return grouped_linear(inner, weights["down_proj"], groups, bias, in_features_first=inputs_first)


def _per_row_forward(inner: Any, module: Any, rows: Tensor, groups: RowGroups, weights: dict[str, Tensor]) -> Tensor:
    """The module's own forward on rows that have one choice each, of weight 1."""
    args = (rows, groups.group_ids[:, None], rows.new_ones(len(rows), 1))
    return functional_forward(module, inner, weights, args, {})


@torch.no_grad()
def _check_weighted_sum(name: str, module: nn.Module, section: ExpertParallel) -> None:
    """Refuse a stack that is no weighted sum of its experts."""
    parameters = [p for p in module._parameters.values() if p is not None]
    if any(is_meta(p) for p in parameters):
        return
    count, example = _num_experts(module, section), parameters[0]
    widths = {size for p in parameters if p.ndim == 3 for size in p.shape[1:]}
    down = module._parameters.get("down_proj")
    if down is not None:
        widths = {down.shape[2 if getattr(module, "is_transposed", False) else 1]}
    generator = torch.Generator().manual_seed(2026)
    chosen = torch.stack([torch.randperm(count, generator=generator)[:2] for _ in range(5)]).to(example.device)
    weights = torch.rand(5, 2, generator=generator).to(example)
    problem = "it takes other arguments"
    for width in sorted(widths):
        x = torch.randn(5, width, generator=generator).to(example)
        try:
            with eval_mode(module):
                combined = module(x, chosen, weights)
                per_choice = [module(x, chosen[:, i : i + 1], torch.ones_like(weights[:, :1])) for i in range(2)]
        except (RuntimeError, TypeError, ValueError, IndexError):
            continue
        expected = sum(part.double() * weights[:, i : i + 1].double() for i, part in enumerate(per_choice))
        assert isinstance(expected, Tensor)
        scale = max(float(expected.abs().max()), 1e-6)
        close = (combined.double() - expected).abs().max() <= 2e-2 * scale
        problem = "" if close else "its output is not the weighted sum of its experts' outputs"
        break
    if problem:
        raise UnshardableModelError(
            f"{name} ({type(module).__name__}) looks like a stack of {count} experts, but {problem}: "
            "exclude it by expert_parallel.moe_layer_pattern, or set expert_parallel.autoep_size to 1"
        )
