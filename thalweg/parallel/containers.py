"""Layers of experts in models that nobody rewrote, found by their structure.

Two forms are known, whatever the model is called:

    a stack   one module whose parameters have a row for each expert, called with (tokens (N, D),
              chosen experts (N, k), their weights (N, k)): all of transformers 5
    a list    a ModuleList or ModuleDict of alike modules that the layer around them calls with the
              rows of each (transformers 4, remote code, Switch): see :mod:`.lists`

A stack that is spread keeps its class, its names and its router; only its forward goes to the
ranks that have the experts.  Before it is trusted a stack is compared, on a few random tokens,
with what this file takes it to compute: the weighted sum of each chosen expert's output.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.ops.grouped import Groups, grouped_linear, sort_choices
from thalweg.parallel.expert import Exchange, ExpertLayer, Share, by_rows, give_forward, local_rows
from thalweg.parallel.layers import Split, call_with
from thalweg.parallel.lists import find_lists
from thalweg.parallel.plans import Refused
from thalweg.zero.record import is_meta


@dataclass(frozen=True)
class Search:
    """Which layers to take: ``layers`` and ``experts`` are regular expressions on the name of the layer
    and of the experts in it; ``count``: the attribute that tells how many there are; ``grouped``: by one
    grouped product where the stack's form allows."""

    layers: str | None = None
    experts: str | None = None
    count: str | None = None
    grouped: bool = True

    def takes(self, name: str) -> bool:
        """Whether the experts called ``name`` are wanted."""
        layer, _, own = name.rpartition(".")
        return (self.layers is None or re.search(self.layers, layer) is not None) and (
            self.experts is None or re.search(self.experts, own) is not None
        )


def find_experts(model: nn.Module, search: Search = Search()) -> dict[str, ExpertLayer]:
    """The layers of experts of a plain model, by name; each can be spread over ranks.

    Raises:
        ValueError: a stack computes something else than a weighted sum of its experts.
    """
    found: dict[str, ExpertLayer] = {}
    for name, module in model.named_modules():
        if _is_stack(module, search) and search.takes(name):
            _check(name, module, search)
            found[name] = Stack(module, _count(module, search), search.grouped)
    for name, experts in find_lists(model).items():
        if search.takes(name):
            found[name] = experts
    return found


def _count(module: nn.Module, search: Search) -> int:
    value = getattr(module, search.count or "num_experts", 0)
    return value if isinstance(value, int) else 0


def _is_stack(module: nn.Module, search: Search) -> bool:
    count = _count(module, search)
    stacked = [p for p in module._parameters.values() if p is not None]
    if count < 2 or not any(p.ndim == 3 for p in stacked) or any(len(p) != count for p in stacked if p.ndim):
        return False
    inner = any(True for child in module.children() for _ in child.parameters())
    return not inner and len(_arguments(module)) >= 3


def _arguments(module: nn.Module) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(type(module).forward).parameters
    return [name for name, p in parameters.items() if p.kind in kinds and name != "self"]


class Stack:
    """A module that is a stack of experts."""

    ep_size = 1

    def __init__(self, module: nn.Module, num_experts: int, grouped: bool) -> None:
        self.module, self.num_experts, self.grouped = module, num_experts, grouped

    def shares(self, ranks: int) -> Iterator[Share]:
        """The experts' parameters and how ``ranks`` divide them."""
        cut = by_rows(self.num_experts, ranks)
        for key, parameter in self.module._parameters.items():
            if parameter is not None:
                yield Share(key, self.module, key, cut)

    def spread(self, exchange: Exchange) -> None:
        """Take the exchange that brings tokens to their experts."""
        module = self.module
        compute = _grouped if self.grouped and _is_known(module) else _by_its_own(module)
        names = _arguments(module)[:3]
        num_experts = self.num_experts
        own = next(len(local_rows(p, p.dtype)) for p in module._parameters.values() if p is not None)
        for key in [key for key, value in vars(module).items() if value == num_experts and "expert" in key]:
            setattr(module, key, own)

        def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            hidden, chosen, weights = (given[name] for name in names)
            tokens = hidden.reshape(-1, hidden.shape[-1])
            chosen = chosen.reshape(len(tokens), -1)
            choices = sort_choices(chosen, num_experts, chosen < num_experts)
            rows, groups, back = exchange.to_experts(choices.take(tokens), choices.groups)
            results = back(compute(self, rows, groups, exchange))
            return choices.add_up(results, weights.reshape(chosen.shape)).to(hidden.dtype).view_as(hidden)

        give_forward(module, forward)


def _is_known(module: nn.Module) -> bool:
    """Whether it is of transformers' own form, which says how its matrices lie and what is between them."""
    facts = ("has_gate", "has_bias", "is_transposed")
    plain = not getattr(module, "has_post_expert_norm", False)
    first = "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"
    keys = {first, "down_proj"}
    if getattr(module, "has_bias", False):
        keys |= {f"{key}_bias" for key in keys}
    present = {key for key, parameter in module._parameters.items() if parameter is not None}
    told = all(isinstance(getattr(module, key, None), bool) for key in facts)
    return told and plain and keys == present and not isinstance(module, Split)


def _grouped(module: Any, rows: Tensor, groups: Groups, exchange: Exchange) -> Tensor:
    own = {key: exchange.own(p, rows.dtype) for key, p in module._parameters.items() if p is not None}
    first = "gate_up_proj" if module.has_gate else "up_proj"
    flipped = module.is_transposed
    inner = grouped_linear(rows, own[first], groups, own.get(f"{first}_bias"), inputs_first=flipped)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    return grouped_linear(inner, own["down_proj"], groups, own.get("down_proj_bias"), inputs_first=flipped)


def _by_its_own(module: nn.Module) -> Any:
    """The module's own forward on rows that have one choice each, of weight 1."""
    inner = type(module).forward

    def compute(self: Any, rows: Tensor, groups: Groups, exchange: Exchange) -> Tensor:
        own = {key: exchange.own(p, rows.dtype) for key, p in self._parameters.items() if p is not None}
        return call_with(self, inner, own, (rows, groups.index[:, None], rows.new_ones(len(rows), 1)), {})

    return compute


@torch.no_grad()
def _check(name: str, module: nn.Module, search: Search) -> None:
    """Refuse a stack that is no weighted sum of its experts."""
    parameters = [p for p in module._parameters.values() if p is not None]
    if any(is_meta(p) for p in parameters):
        return
    count, example = _count(module, search), parameters[0]
    widths = {size for p in parameters if p.ndim == 3 for size in p.shape[1:]}
    down = module._parameters.get("down_proj")
    if down is not None:
        widths = {down.shape[2 if getattr(module, "is_transposed", False) else 1]}
    state = torch.get_rng_state()
    generator = torch.Generator().manual_seed(2026)
    chosen = torch.stack([torch.randperm(count, generator=generator)[:2] for _ in range(5)])
    weights = torch.rand(5, 2, generator=generator).to(example)
    chosen = chosen.to(example.device)
    training, problem = module.training, "it takes other arguments"
    module.eval()
    for width in sorted(widths):
        x = torch.randn(5, width, generator=generator).to(example)
        try:
            whole = module(x, chosen, weights)
            each = [module(x, chosen[:, i : i + 1], torch.ones_like(weights[:, :1])) for i in range(2)]
        except (RuntimeError, TypeError, ValueError, IndexError):
            continue
        expected = sum(part.double() * weights[:, i : i + 1].double() for i, part in enumerate(each))
        scale = float(expected.abs().max()) if isinstance(expected, Tensor) else 1.0
        close = (whole.double() - expected).abs().max() <= 2e-2 * max(scale, 1e-6)
        problem = "" if close else "its output is not the weighted sum of its experts' outputs"
        break
    module.train(training)
    torch.set_rng_state(state)
    if problem:
        raise Refused(
            f"{name} ({type(module).__name__}) looks like a stack of {count} experts, but {problem}: "
            "exclude it by expert_parallel.moe_layer_pattern, or set expert_parallel.autoep_size to 1"
        )
