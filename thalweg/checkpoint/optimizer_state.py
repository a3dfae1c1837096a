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

from thalweg.checkpoint.errors import CheckpointMismatchError, UnserializableStateError
from thalweg.checkpoint.format.dtypes import DTYPES
from thalweg.checkpoint.reader import Checkpoint
from thalweg.parallel.pipeline.tied_weights import IDENTITY_NAMING, ParamNaming
from thalweg.zero.full_state_dict import make_dtensor
from thalweg.zero.whole_parameter import named_shards

# How an optimiser computes, not what it has learnt: the running job's choice stands.
_IMPLEMENTATION_KEYS = frozenset({"foreach", "fused", "capturable", "differentiable"})
_PARAM_KEYS = frozenset({"params", "param_names"})


def _param_names_by_id(module: nn.Module, naming: ParamNaming) -> dict[int, str]:
    return {id(parameter): naming.canonical.get(name, name) for name, parameter in named_shards(module)}


def _group_params(group: Mapping[str, Any], module: nn.Module, naming: ParamNaming) -> list[torch.Tensor]:
    """The parameters of a group that are part of the model."""
    hidden = {id(p) for name, p in named_shards(module) if name in naming.excluded} if naming.excluded else ()
    return [parameter for parameter in group["params"] if id(parameter) not in hidden]


def collect_optimizer_state(
    module: nn.Module, optimizer: Any, naming: ParamNaming = IDENTITY_NAMING
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The logical tensors of an optimiser's state, and what else there is to keep as a tree.

    ``naming``: where the module is a part of the model.
    """
    names = _param_names_by_id(module, naming)
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        members = [_get_param_name(parameter, names, index) for parameter in _group_params(group, module, naming)]
        hyper = {key: value for key, value in group.items() if key not in _PARAM_KEYS}
        groups.append({"params": members, "hyper": hyper})
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    unkeyed_state: dict[str, Any] = {}
    kinds: dict[str, set[str]] = {}  # how each key's tensors relate to their parameters
    for owner, entries in optimizer.state.items():
        if not isinstance(owner, torch.Tensor):
            unkeyed_state[str(owner)] = entries
            continue
        name = _get_param_name(owner, names, None)
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                if "/" in key:
                    raise UnserializableStateError(f"the optimiser's state key {key!r} of {name} holds a '/'")
                kinds.setdefault(key, set()).add(_tensor_kind(value, owner))
                tensors[f"optim/{key}/{name}"] = _to_dtensor_like(value, owner)
            else:
                values.setdefault(name, {})[key] = value
    sorted_kinds = {key: sorted(found) for key, found in kinds.items()}
    return tensors, {"groups": groups, "values": values, "loose": unkeyed_state, "forms": sorted_kinds}


def _get_param_name(parameter: torch.Tensor, names: Mapping[int, str], group: int | None) -> str:
    name = names.get(id(parameter))
    if name is None:
        where = "state" if group is None else f"group {group}"
        raise CheckpointMismatchError(
            f"the optimiser's {where} has a parameter of shape {list(parameter.shape)} that is not among "
            "the module's named_parameters(); build the optimiser over this module's parameters, and save "
            "outside of a forward pass"
        )
    return name


def _tensor_kind(value: torch.Tensor, parameter: torch.Tensor) -> str:
    """How a state tensor is kept: as a DTensor, as the plain local shard of one, or plain and whole."""
    if isinstance(value, DTensor):
        return "dtensor"
    is_shard = isinstance(parameter, DTensor) and value.dim() > 0 and value.shape == parameter.to_local().shape
    return "shard" if is_shard else "plain"


def _to_dtensor_like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A state tensor; where an optimiser keeps the plain local shard, the DTensor that it is a part of."""
    if not isinstance(parameter, DTensor) or _tensor_kind(value, parameter) != "shard":
        return value
    return make_dtensor(value, parameter.placements, parameter)


@dataclass
class OptimizerLoadPlan:
    """What a restore will do to an optimiser, decided before anything is touched."""

    hyperparams: list[dict[str, Any]] = field(default_factory=list)  # for each live group
    state: dict[torch.Tensor, dict[str, Any]] = field(default_factory=dict)
    unkeyed_state: dict[str, Any] = field(default_factory=dict)
    targets: list[tuple[str, torch.Tensor]] = field(default_factory=list)  # stored name, tensor to fill


def plan_optimizer_load(
    checkpoint: Checkpoint,
    module: nn.Module,
    optimizer: Any,
    saved: dict[str, Any] | None,
    strict: bool,
    naming: ParamNaming = IDENTITY_NAMING,
) -> OptimizerLoadPlan:
    """Match an optimiser against what was saved; changes nothing.  Raises ``CheckpointMismatchError``."""
    if saved is None:
        raise CheckpointMismatchError(
            "the checkpoint was saved without an optimiser; restore the weights alone (optimizer=None)"
        )
    names = _param_names_by_id(module, naming)
    keys_by_param = _stored_keys_by_param(checkpoint)
    plan = OptimizerLoadPlan(unkeyed_state=saved["loose"])
    groups = [{**group, "params": _group_params(group, module, naming)} for group in optimizer.param_groups]
    plan.hyperparams = [
        _match_group(checkpoint, group, index, names, saved["groups"], strict) for index, group in enumerate(groups)
    ]
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            name = _get_param_name(parameter, names, index)
            stored_name = _resolve_stored_name(checkpoint, name)
            entries: dict[str, Any] = dict(saved["values"].get(stored_name, {}))
            current = optimizer.state.get(parameter, {})
            for key in keys_by_param.get(stored_name, []):
                stored = f"optim/{key}/{stored_name}"
                kinds = saved["forms"].get(key, [])
                allocate = getattr(optimizer, "state_like", _empty_like)
                entries[key] = _allocate_like(
                    checkpoint, stored, key, parameter, current.get(key), group, kinds, allocate
                )
                plan.targets.append((stored, _to_dtensor_like(entries[key], parameter)))
            if entries:
                plan.state[parameter] = entries
    return plan


def _stored_keys_by_param(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """For each parameter fqn the keys of its optimiser state, in the order of the manifest."""
    result: dict[str, list[str]] = {}
    for name in checkpoint.manifest.tensors:
        if name.startswith("optim/"):
            _, key, owner = name.split("/", 2)
            result.setdefault(owner, []).append(key)
    return result


def _resolve_stored_name(checkpoint: Checkpoint, name: str) -> str:
    return checkpoint.manifest.resolve_alias(f"model/{name}").removeprefix("model/")


def _match_group(
    checkpoint: Checkpoint,
    group: Mapping[str, Any],
    index: int,
    names: Mapping[int, str],
    saved: list[dict[str, Any]],
    strict: bool,
) -> dict[str, Any]:
    """The saved hyperparameters for a live group: those of the saved group that has its members."""
    group_index = {name: number for number, entry in enumerate(saved) for name in entry["params"]}
    members = {_resolve_stored_name(checkpoint, _get_param_name(p, names, index)): p for p in group["params"]}
    unknown = [name for name, p in members.items() if name not in group_index and p.requires_grad]
    if unknown and strict:
        raise CheckpointMismatchError(
            f"the optimiser's group {index} has parameters that the saved optimiser did not have: "
            f"{', '.join(unknown[:8])}; load with strict=False to start them fresh"
        )
    group_indices = sorted({group_index[name] for name in members if name in group_index})
    if not members and index < len(saved):
        group_indices = [index]  # a stage without members of this group
    if not group_indices:
        return {}
    choices = [{k: v for k, v in saved[n]["hyper"].items() if k not in _IMPLEMENTATION_KEYS} for n in group_indices]
    if any(choice != choices[0] for choice in choices[1:]):
        raise CheckpointMismatchError(
            f"the optimiser's group {index} joins parameters of the saved groups {group_indices}, whose "
            "hyperparameters differ; build the groups as they were when it was saved"
        )
    return choices[0]


def _allocate_like(
    checkpoint: Checkpoint,
    stored: str,
    key: str,
    parameter: torch.Tensor,
    current: Any,
    group: Mapping[str, Any],
    kinds: list[str],
    allocate: Callable[[torch.Tensor, str, torch.dtype], torch.Tensor],
) -> torch.Tensor:
    """The tensor a stored state is read into: the live one if it fits, else a new one like the parameter."""
    record = checkpoint.manifest.tensors[stored]
    shape, dtype = torch.Size(record.shape), DTYPES[record.dtype]
    fits = isinstance(current, torch.Tensor) and current.dtype == dtype
    if fits and _to_dtensor_like(current, parameter).shape == shape:
        return current
    local = parameter.detach()
    if shape == parameter.shape and parameter.dim() > 0:
        allocated = allocate(local, key, dtype)
        if isinstance(allocated, DTensor) and "shard" in kinds and "dtensor" not in kinds:
            return allocated.to_local()
        return allocated
    device = local.to_local().device if isinstance(local, DTensor) else local.device
    if key == "step" and not (group.get("capturable") or group.get("fused")):
        device = torch.device("cpu")  # as torch.optim keeps it
    if not ("dtensor" in kinds and isinstance(local, DTensor)):
        return torch.zeros(shape, dtype=dtype, device=device)
    placements = [p if _placement_fits(p, shape, parameter.shape) else Replicate() for p in local.placements]
    return zeros(*shape, dtype=dtype, device_mesh=local.device_mesh, placements=placements)


def _empty_like(parameter: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(parameter, dtype=dtype)


def _placement_fits(placement: Any, shape: torch.Size, param_shape: torch.Size) -> bool:
    """Whether a parameter's placement can be a state's: the sharded dim exists there with the same size."""
    dim = getattr(placement, "dim", None)
    return dim is None or (dim < len(shape) and shape[dim] == param_shape[dim])


def apply_optimizer_plan(plan: OptimizerLoadPlan, optimizer: Any) -> None:
    """Give the optimiser the hyperparameters and the (by now filled) state of a plan."""
    for group, hyper in zip(optimizer.param_groups, plan.hyperparams, strict=True):
        for key, value in hyper.items():
            if isinstance(group.get(key), torch.Tensor):  # a learning rate that a compiled step reads
                group[key].fill_(value)
            else:
                group[key] = value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
            if parameter in plan.state:
                optimizer.state[parameter] = plan.state[parameter]
    optimizer.state.update(plan.unkeyed_state)
