"""An optimiser's state as logical tensors, and back into a fresh optimiser at any layout.

``optim/<key>/<fqn>`` for each tensor kept about a parameter (``exp_avg``, ``step``, ...):
of the parameter's shape it is sharded as the parameter is, anything else is kept as
found.  What is not a tensor, and the hyperparameters of the groups, are JSON; a group
lists its parameters by fqn, so that the order of groups and the numbering of parameters
need not agree at load; the optimiser's class must, or be one that keeps the same.  The
state of a fresh optimiser is made from the manifest, so no dry step is needed to bring
it into being.
"""

import re
from collections.abc import Mapping
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
# Classes that keep the same state: LowBitAdam and AdamW are of one family, NAdam is one of its own.
_FAMILY = re.compile(r"^(?!NAdam|RAdam).*(Adam|Lion|Lamb)W?(\d+bit)?$")


def to_plain_name(name: str) -> str:
    """A name in the model as it was before ``torch.compile(module)``, which puts a wrapper around a module."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _param_names_by_id(module: nn.Module, naming: ParamNaming) -> dict[int, str]:
    canonical = naming.canonical
    return {id(param): to_plain_name(canonical.get(name, name)) for name, param in named_shards(module)}


def _group_params(group: Mapping[str, Any], module: nn.Module, naming: ParamNaming) -> list[torch.Tensor]:
    """The parameters of a group that are part of the model."""
    hidden = {id(p) for name, p in named_shards(module) if name in naming.excluded} if naming.excluded else ()
    return [parameter for parameter in group["params"] if id(parameter) not in hidden]


def _get_type_name(optimizer: Any) -> str:
    return type(getattr(optimizer, "inner", optimizer)).__name__


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
    tree = {"groups": groups, "values": values, "loose": unkeyed_state, "forms": sorted_kinds}
    return tensors, {**tree, "type": _get_type_name(optimizer)}


def _get_param_name(parameter: torch.Tensor, names: Mapping[int, str], group: int | None) -> str:
    name = names.get(id(parameter))
    if name is None:
        where = "state" if group is None else f"group {group}"
        raise CheckpointMismatchError(
            f"the optimiser's {where} has a parameter of shape {list(parameter.shape)} that is not among the module's "
            "named_parameters(); build the optimiser over this module's parameters, and save outside of a forward pass"
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
    own_type = _get_type_name(optimizer)
    saved_type = saved.get("type", own_type)  # another program's checkpoint does not say
    if strict and _FAMILY.sub(r"\1", saved_type) != _FAMILY.sub(r"\1", own_type):
        raise CheckpointMismatchError(
            f"the checkpoint's optimiser was {saved_type}, whose state and hyperparameters are not those of "
            f"{own_type}: load with load_optimizer_states=False to start it fresh"
        )
    names, saved_groups, saved_kinds = _param_names_by_id(module, naming), saved["groups"], saved["forms"]
    keys_by_param: dict[str, list[str]] = {}  # in the order of the manifest
    for stored in checkpoint.manifest.tensors:
        if stored.startswith("optim/"):
            _, key, owner = stored.split("/", 2)
            keys_by_param.setdefault(owner, []).append(key)

    def stored_name(parameter: torch.Tensor, index: int) -> str:
        name = _get_param_name(parameter, names, index)
        return checkpoint.manifest.resolve_alias(f"model/{name}").removeprefix("model/")

    def match_group(index: int, params: list[torch.Tensor]) -> dict[str, Any]:
        """The saved hyperparameters for a live group: those of the saved group that has its members."""
        group_index = {name: number for number, entry in enumerate(saved_groups) for name in entry["params"]}
        members = {stored_name(parameter, index): parameter for parameter in params}
        unknown = [name for name, p in members.items() if name not in group_index and p.requires_grad]
        if unknown and strict:
            raise CheckpointMismatchError(
                f"the optimiser's group {index} has parameters that the saved optimiser did not have: "
                f"{', '.join(unknown[:8])}; load with load_module_strict=False to start them fresh"
            )
        indices = sorted({group_index[name] for name in members if name in group_index})
        if not members and index < len(saved_groups):
            indices = [index]  # a stage without members of this group
        if not indices:
            return {}
        saved_hypers = [saved_groups[n]["hyper"].items() for n in indices]
        choices = [{key: value for key, value in hyper if key not in _IMPLEMENTATION_KEYS} for hyper in saved_hypers]
        if any(choice != choices[0] for choice in choices[1:]):
            raise CheckpointMismatchError(
                f"the optimiser's group {index} joins parameters of the saved groups {indices}, whose "
                "hyperparameters differ; build the groups as they were when it was saved"
            )
        return choices[0]

    def allocate(stored: str, key: str, parameter: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        """The tensor a stored state is read into: the live one if it fits, else a new one like the parameter."""
        record, kinds = checkpoint.manifest.tensors[stored], saved_kinds.get(key, [])
        shape, dtype = torch.Size(record.shape), DTYPES[record.dtype]
        current = optimizer.state.get(parameter, {}).get(key)
        fits = isinstance(current, torch.Tensor) and current.dtype == dtype
        if fits and _to_dtensor_like(current, parameter).shape == shape:
            return current
        local = parameter.detach()
        if shape == parameter.shape and parameter.dim() > 0:
            has_own_way = hasattr(optimizer, "state_like")
            made: Any = optimizer.state_like(local, key, dtype) if has_own_way else torch.empty_like(local, dtype=dtype)
            is_shard = isinstance(made, DTensor) and "shard" in kinds and "dtensor" not in kinds
            return made.to_local() if is_shard else made
        device = local.to_local().device if isinstance(local, DTensor) else local.device
        if key == "step" and not (group.get("capturable") or group.get("fused")):
            device = torch.device("cpu")  # as torch.optim keeps it
        if not ("dtensor" in kinds and isinstance(local, DTensor)):
            return torch.zeros(shape, dtype=dtype, device=device)
        # A parameter's placement can be a state's where the sharded dim exists there with the same size.
        dims = [getattr(placement, "dim", None) for placement in local.placements]
        placements = [
            placement if dim is None or (dim < len(shape) and shape[dim] == parameter.shape[dim]) else Replicate()
            for placement, dim in zip(local.placements, dims, strict=True)
        ]
        on_mesh = zeros(*shape, dtype=dtype, device_mesh=local.device_mesh, placements=placements)
        return make_dtensor(on_mesh.to_local().to(device), placements, on_mesh)  # where the parameter's shard rests

    groups = [{**group, "params": _group_params(group, module, naming)} for group in optimizer.param_groups]
    hyperparams = [match_group(index, group["params"]) for index, group in enumerate(groups)]
    plan = OptimizerLoadPlan(hyperparams, unkeyed_state=saved["loose"])
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            name = stored_name(parameter, index)
            entries: dict[str, Any] = dict(saved["values"].get(name, {}))
            for key in keys_by_param.get(name, []):
                entries[key] = allocate(f"optim/{key}/{name}", key, parameter, group)
                plan.targets.append((f"optim/{key}/{name}", _to_dtensor_like(entries[key], parameter)))
            if entries:
                plan.state[parameter] = entries
    return plan


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
