"""The user's parameter groups, before and after sharding puts other tensors in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.optim.algorithms.muon_params import get_param, group_members
from thalweg.zero.full_state_dict import distribute_if_sharded


def groups_with_names(optimizer: Any, model_parameters: Any, names: dict[int, str]) -> list[dict[str, Any]]:
    """The user's parameter groups with names in place of parameters, which sharding will replace."""
    if isinstance(optimizer, torch.optim.Optimizer):
        source: Any = optimizer.param_groups
    else:
        source = list(model_parameters) if model_parameters is not None else []
    if source and not isinstance(source[0], Mapping):
        source = [{"params": source}]
    groups = []
    for index, group in enumerate(source):
        members = [get_param(member) for member in group_members(group)]
        num_foreign = sum(1 for member in members if id(member) not in names)
        if num_foreign:
            raise ValueError(
                f"group {index} of the optimizer holds {num_foreign} of {len(members)} parameters that are not "
                "the model's: build it from model.parameters() of the very model given to initialize()"
            )
        groups.append({**group, "params": [names[id(member)] for member in members]})
    return groups


def rebind_params(
    optimizer: torch.optim.Optimizer, new_params: list[list[nn.Parameter | None]]
) -> torch.optim.Optimizer:
    """Let the user's optimizer, with any state it has, work on the sharded parameters (None: not here).

    So do the optimizers that it holds, to which a wrapper leaves the step.
    """
    replaced: dict[Tensor, nn.Parameter | None] = {
        old: parameter
        for group, parameters in zip(optimizer.param_groups, new_params, strict=True)
        for old, parameter in zip(group["params"], parameters, strict=True)
    }
    for one in _with_inner_optimizers(optimizer):
        old_state = dict(one.state)
        one.state.clear()
        for group in one.param_groups:
            pairs = [(old, replaced.get(old, old)) for old in group["params"]]
            for old, parameter in pairs:
                entries = old_state.pop(old, None)
                if entries and parameter is not None:
                    moved = entries.items() if parameter is not old else ()  # else of a wrapper's groups, done before
                    one.state[parameter] = entries | {k: distribute_if_sharded(v, parameter) for k, v in moved}
            group["params"] = [parameter for _, parameter in pairs if parameter is not None]
    return optimizer


def _with_inner_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """``optimizer`` and those in its attributes, or in lists and mappings that are its attributes, at any depth."""
    found, pending = [], [optimizer]
    while pending:
        one = pending.pop()
        if any(one is other for other in found):
            continue
        found.append(one)
        for value in vars(one).values():
            held = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else [value]
            pending += [item for item in held if isinstance(item, torch.optim.Optimizer)]
    return found
