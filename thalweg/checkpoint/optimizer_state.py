"""An optimiser's state as logical tensors, and back into a fresh optimiser at any layout.

``optim/<key>/<fqn>`` for each tensor kept about a parameter (``exp_avg``, ``step``, ...):
of the parameter's shape it is sharded as the parameter is, anything else is kept as
found.  What is not a tensor, and the hyperparameters of the groups, are JSON; a group
lists its parameters by fqn, so that the order of groups and the numbering of parameters
need not agree at load.  The state of a fresh optimiser is made from the manifest, so no
dry step is needed to bring it into being.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, zeros

from thalweg.checkpoint.dtypes import DTYPES
from thalweg.checkpoint.errors import MismatchedCheckpoint, UnstorableState
from thalweg.checkpoint.reader import Checkpoint
from thalweg.parallel.pipeline.names import WHOLE, Naming

# How an optimiser computes, not what it has learnt: the running job's choice stands.
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
_MEMBERS = frozenset({"params", "param_names"})


def _parameter_names(module: nn.Module, naming: Naming) -> dict[int, str]:
    named = module.named_parameters()
    return {id(parameter): naming.canonical.get(name, name) for name, parameter in named}


def _members(group: Mapping[str, Any], module: nn.Module, naming: Naming) -> list[torch.Tensor]:
    """The parameters of a group that are part of the model."""
    hidden = (
        {id(p) for name, p in module.named_parameters() if name in naming.hidden} if naming.hidden else ()
    )
    return [parameter for parameter in group["params"] if id(parameter) not in hidden]


def collect_optimizer(
    module: nn.Module, optimizer: Any, naming: Naming = WHOLE
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The logical tensors of an optimiser's state, and what else there is to keep as a tree.

    ``naming``: where the module is a part of the model.
    """
    names = _parameter_names(module, naming)
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        members = [_name_of(parameter, names, index) for parameter in _members(group, module, naming)]
        hyper = {key: value for key, value in group.items() if key not in _MEMBERS}
        groups.append({"params": members, "hyper": hyper})
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    loose: dict[str, Any] = {}
    forms: dict[str, set[str]] = {}  # how each key's tensors relate to their parameters
    for owner, entries in optimizer.state.items():
        if not isinstance(owner, torch.Tensor):
            loose[str(owner)] = entries
            continue
        name = _name_of(owner, names, None)
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                if "/" in key:
                    raise UnstorableState(f"the optimiser's state key {key!r} of {name} holds a '/'")
                forms.setdefault(key, set()).add(_form(value, owner))
                tensors[f"optim/{key}/{name}"] = _as_parameter(value, owner)
            else:
                values.setdefault(name, {})[key] = value
    kept = {key: sorted(found) for key, found in forms.items()}
    return tensors, {"groups": groups, "values": values, "loose": loose, "forms": kept}


def _name_of(parameter: torch.Tensor, names: Mapping[int, str], group: int | None) -> str:
    name = names.get(id(parameter))
    if name is None:
        where = "state" if group is None else f"group {group}"
        raise MismatchedCheckpoint(
            f"the optimiser's {where} has a parameter of shape {list(parameter.shape)} that is not among "
            "the module's named_parameters(); build the optimiser over this module's parameters, and save "
            "outside of a forward pass"
        )
    return name


def _form(value: torch.Tensor, parameter: torch.Tensor) -> str:
    """How a state tensor is kept: as a DTensor, as the plain local shard of one, or plain and whole."""
    if isinstance(value, DTensor):
        return "dtensor"
    is_shard = (
        isinstance(parameter, DTensor) and value.dim() > 0 and value.shape == parameter.to_local().shape
    )
    return "shard" if is_shard else "plain"


def _as_parameter(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A state tensor; where an optimiser keeps the plain local shard, the DTensor that it is a part of."""
    if not isinstance(parameter, DTensor) or _form(value, parameter) != "shard":
        return value
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


@dataclass
class OptimizerPlan:
    """What a restore will do to an optimiser, decided before anything is touched."""

    hyper: list[dict[str, Any]] = field(default_factory=list)  # for each live group
    state: dict[torch.Tensor, dict[str, Any]] = field(default_factory=dict)
    loose: dict[str, Any] = field(default_factory=dict)
    targets: list[tuple[str, torch.Tensor]] = field(default_factory=list)  # stored name, tensor to fill


def plan_optimizer(
    checkpoint: Checkpoint,
    module: nn.Module,
    optimizer: Any,
    saved: dict[str, Any] | None,
    strict: bool,
    naming: Naming = WHOLE,
) -> OptimizerPlan:
    """Match an optimiser against what was saved; changes nothing.  Raises ``MismatchedCheckpoint``."""
    if saved is None:
        raise MismatchedCheckpoint(
            "the checkpoint was saved without an optimiser; restore the weights alone (optimizer=None)"
        )
    names = _parameter_names(module, naming)
    by_owner = _stored_state(checkpoint)
    plan = OptimizerPlan(loose=saved["loose"])
    groups = [{**group, "params": _members(group, module, naming)} for group in optimizer.param_groups]
    plan.hyper = [
        _match_group(checkpoint, group, index, names, saved["groups"], strict)
        for index, group in enumerate(groups)
    ]
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            name = _name_of(parameter, names, index)
            stored_as = _stored_name(checkpoint, name)
            entries: dict[str, Any] = dict(saved["values"].get(stored_as, {}))
            live = optimizer.state.get(parameter, {})
            for key in by_owner.get(stored_as, []):
                stored = f"optim/{key}/{stored_as}"
                forms = saved["forms"].get(key, [])
                new = getattr(optimizer, "state_like", _in_memory)
                entries[key] = _template(checkpoint, stored, key, parameter, live.get(key), group, forms, new)
                plan.targets.append((stored, _as_parameter(entries[key], parameter)))
            if entries:
                plan.state[parameter] = entries
    return plan


def _stored_state(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """For each parameter fqn the keys of its optimiser state, in the order of the manifest."""
    found: dict[str, list[str]] = {}
    for name in checkpoint.manifest.tensors:
        if name.startswith("optim/"):
            _, key, owner = name.split("/", 2)
            found.setdefault(owner, []).append(key)
    return found


def _stored_name(checkpoint: Checkpoint, name: str) -> str:
    return checkpoint.manifest.canonical(f"model/{name}").removeprefix("model/")


def _match_group(
    checkpoint: Checkpoint,
    group: Mapping[str, Any],
    index: int,
    names: Mapping[int, str],
    saved: list[dict[str, Any]],
    strict: bool,
) -> dict[str, Any]:
    """The saved hyperparameters for a live group: those of the saved group that has its members."""
    home = {name: number for number, entry in enumerate(saved) for name in entry["params"]}
    members = {_stored_name(checkpoint, _name_of(p, names, index)): p for p in group["params"]}
    strangers = [name for name, p in members.items() if name not in home and p.requires_grad]
    if strangers and strict:
        raise MismatchedCheckpoint(
            f"the optimiser's group {index} has parameters that the saved optimiser did not have: "
            f"{', '.join(strangers[:8])}; load with strict=False to start them fresh"
        )
    numbers = sorted({home[name] for name in members if name in home})
    if not members and index < len(saved):
        numbers = [index]  # a stage without members of this group
    if not numbers:
        return {}
    choices = [{k: v for k, v in saved[n]["hyper"].items() if k not in _IMPLEMENTATION} for n in numbers]
    if any(choice != choices[0] for choice in choices[1:]):
        raise MismatchedCheckpoint(
            f"the optimiser's group {index} joins parameters of the saved groups {numbers}, whose "
            "hyperparameters differ; build the groups as they were when it was saved"
        )
    return choices[0]


def _template(
    checkpoint: Checkpoint,
    stored: str,
    key: str,
    parameter: torch.Tensor,
    live: Any,
    group: Mapping[str, Any],
    forms: list[str],
    new: Callable[[torch.Tensor, str, torch.dtype], torch.Tensor],
) -> torch.Tensor:
    """The tensor a stored state is read into: the live one if it fits, else a new one like the parameter."""
    record = checkpoint.manifest.tensors[stored]
    shape, dtype = torch.Size(record.shape), DTYPES[record.dtype]
    fits = isinstance(live, torch.Tensor) and live.dtype == dtype
    if fits and _as_parameter(live, parameter).shape == shape:
        return live
    local = parameter.detach()
    if shape == parameter.shape and parameter.dim() > 0:
        made = new(local, key, dtype)
        if isinstance(made, DTensor) and "shard" in forms and "dtensor" not in forms:
            return made.to_local()
        return made
    device = local.to_local().device if isinstance(local, DTensor) else local.device
    if key == "step" and not (group.get("capturable") or group.get("fused")):
        device = torch.device("cpu")  # as torch.optim keeps it
    if not ("dtensor" in forms and isinstance(local, DTensor)):
        return torch.zeros(shape, dtype=dtype, device=device)
    placements = [p if _splits(p, shape, parameter.shape) else Replicate() for p in local.placements]
    return zeros(*shape, dtype=dtype, device_mesh=local.device_mesh, placements=placements)


def _in_memory(parameter: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(parameter, dtype=dtype)


def _splits(placement: Any, shape: torch.Size, of_parameter: torch.Size) -> bool:
    """Whether a parameter's placement can be a state's: the sharded dim exists there with the same size."""
    dim = getattr(placement, "dim", None)
    return dim is None or (dim < len(shape) and shape[dim] == of_parameter[dim])


def apply_plan(plan: OptimizerPlan, optimizer: Any) -> None:
    """Give the optimiser the hyperparameters and the (by now filled) state of a plan."""
    for group, hyper in zip(optimizer.param_groups, plan.hyper, strict=True):
        for key, value in hyper.items():
            if isinstance(group.get(key), torch.Tensor):  # a learning rate that a compiled step reads
                group[key].fill_(value)
            else:
                group[key] = value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
            if parameter in plan.state:
                optimizer.state[parameter] = plan.state[parameter]
    optimizer.state.update(plan.loose)
