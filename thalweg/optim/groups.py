"""The user's parameter groups, before and after sharding puts other tensors in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.zero.logical import like


def parameter_names(optimizer: Any, model_parameters: Any, names: dict[int, str]) -> list[dict[str, Any]]:
    """The user's parameter groups with names in place of parameters, which sharding will replace."""
    if isinstance(optimizer, torch.optim.Optimizer):
        source: Any = optimizer.param_groups
    else:
        source = list(model_parameters) if model_parameters is not None else []
    if source and not isinstance(source[0], Mapping):
        source = [{"params": source}]
    groups = []
    for index, group in enumerate(source):
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        members = [member[1] if isinstance(member, tuple) else member for member in members]
        foreign = sum(1 for member in members if id(member) not in names)
        if foreign:
            raise ValueError(
                f"group {index} of the optimizer holds {foreign} of {len(members)} parameters that are not "
                "the model's: build it from model.parameters() of the very model given to initialize()"
            )
        groups.append({**group, "params": [names[id(member)] for member in members]})
    return groups


def rebind(
    optimizer: torch.optim.Optimizer, chosen: list[list[nn.Parameter | None]]
) -> torch.optim.Optimizer:
    """Let the user's optimizer, with any state it has, work on the sharded parameters (None: not here)."""
    old_state = dict(optimizer.state)
    optimizer.state.clear()
    for group, renewed in zip(optimizer.param_groups, chosen, strict=True):
        for old, parameter in zip(group["params"], renewed, strict=True):
            entries = old_state.pop(old, None)
            if entries and parameter is not None:
                optimizer.state[parameter] = {key: like(v, parameter) for key, v in entries.items()}
        group["params"] = [parameter for parameter in renewed if parameter is not None]
    return optimizer
