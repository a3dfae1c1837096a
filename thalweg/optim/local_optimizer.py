"""The optimiser or the parameter groups that the user has built, on sharded parameters and stepping on local pieces.

Groups are known by the names of their parameters while sharding puts other tensors in their place.

``torch.optim``'s own classes run on ``DTensor`` s, but slowly (5 to 8% of a step in dispatching, and torch's
default on a CPU is a loop of unfused operations), and three of them not at all or wrongly (Rprop, Adafactor,
Muon). Each has a counterpart here with the same groups and the same state, so an object of exactly such a
class is turned into its counterpart. Any other class, a user's own or a library's, is left as it is, those apart whose
step is known to fail on them.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thalweg.optim.algorithms.adafactor import Adafactor
from thalweg.optim.algorithms.elementwise import ELEMENTWISE_OPTIMIZERS, has_fused_kernel
from thalweg.optim.algorithms.muon import Muon
from thalweg.optim.algorithms.muon_params import get_param, group_members
from thalweg.zero.full_state_dict import distribute_if_sharded

# Of libraries' classes whose step takes no DTensor (the beginnings of their names): what the config has for them.
_EQUALS_BY_CLASS = {
    "bitsandbytes.": '{"type": "AdamW", "params": {"state_dtype": "int8"}}, moments in 8 bits',
    "transformers.optimization.Adafactor": '{"type": "Adafactor"}',
}


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


def to_local_optimizer(
    optimizer: torch.optim.Optimizer, *, replicate_group: dist.ProcessGroup | None = None
) -> torch.optim.Optimizer:
    """Return ``optimizer`` itself, its class exchanged for the one here that steps on local pieces, if any.

    Call it when its groups hold the final, sharded parameters. Groups, state, hooks and a schedule's hold on
    it stay. Where neither ``fused`` nor ``foreach`` was chosen, the fused kernel is, where there is one.
    ``replicate_group``: see :class:`.algorithms.muon.Muon`.

    Raises ``ValueError`` for a library's class that cannot step on sharded parameters.
    """
    torch_class = type(optimizer)
    for name, equal in _EQUALS_BY_CLASS.items():
        if any(f"{base.__module__}.{base.__name__}".startswith(name) for base in torch_class.__mro__):
            raise ValueError(
                f"{torch_class.__module__}.{torch_class.__name__} cannot step on an engine's parameters, at any stage: "
                f'leave it out and say, in the config, "optimizer": {equal}'
            )
    local_classes = {**ELEMENTWISE_OPTIMIZERS, "Adafactor": Adafactor, "Muon": Muon}
    local_class = local_classes.get(torch_class.__name__)
    if local_class is None or torch_class is not getattr(torch.optim, torch_class.__name__, None):
        return optimizer
    # torch installs its hooks around a class's step when the first object of it is made.
    template = local_class([nn.Parameter(torch.zeros(1, 1))])
    optimizer.__class__ = local_class
    if inspect.unwrap(local_class.step) is not inspect.unwrap(torch_class.step):
        # A torch schedule has put a wrapper of the old class's step onto the object; the new one needs none.
        optimizer.__dict__.pop("step", None)
    if isinstance(optimizer, Muon):
        optimizer.configure_like_torch(replicate_group)
    for key, value in vars(template).items():
        vars(optimizer).setdefault(key, value)
    for group in optimizer.param_groups:
        kernel_not_chosen = group.get("fused") is None and group.get("foreach") is None
        if kernel_not_chosen and has_fused_kernel(torch_class.__name__, group["params"]):
            group["fused"] = True
            for param in group["params"]:
                state = optimizer.state.get(param, {})
                if "step" in state:
                    state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=param.device)
    return optimizer
