"""From a module and its optimiser to logical tensors, and back at any layout.

The names.  ``model/<fqn>`` for parameters and persistent buffers; a tied parameter is
stored under its first name and the others are aliases.  ``optim/<key>/<fqn>`` for each
tensor that the optimiser keeps about a parameter (``exp_avg``, ``step``, ...): of the
parameter's shape it is sharded as the parameter is, anything else is kept as found.
What is not a tensor, and the hyperparameters of the groups, are JSON; a group lists its
parameters by fqn, so that neither order nor number of groups has to agree at load.

Nothing here knows how a module was sharded: a parameter is a DTensor or a plain tensor,
and that is all.  ``restore`` builds the optimiser's state of a fresh optimiser from the
manifest, so no dry step is needed to make it exist.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, zeros

from thalweg.checkpoint.dtypes import DTYPES
from thalweg.checkpoint.errors import MismatchedCheckpoint, UnstorableState
from thalweg.checkpoint.load import Checkpoint
from thalweg.checkpoint.ranks import Ranks
from thalweg.checkpoint.rng import capture_rng, restore_rng
from thalweg.checkpoint.save import Snapshot

# How an optimiser computes, not what it has learnt: the running job's choice stands.
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})


def model_tensors(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Parameters and persistent buffers by fqn, each once, and the aliases of those that are tied."""
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, child in module.named_modules(remove_duplicate=False)
        for name in child._non_persistent_buffers_set  # the only record of `persistent=False`
    }
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in _named(module):
        if name in transient:
            continue
        known = first.setdefault(id(tensor), name)
        if known == name:
            tensors[name] = tensor
        else:
            aliases[name] = known
    return tensors, aliases


def _named(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def collect(
    module: nn.Module,
    optimizer: Any = None,
    *,
    state: Mapping[str, Any] | None = None,
    per_rank: Mapping[str, Any] | None = None,
    rng: bool = True,
) -> Snapshot:
    """Everything that ``restore`` needs, as references to the live tensors (save before the next step).

    ``optimizer``: anything with torch.optim's ``param_groups`` and ``state`` over parameters
    of ``module``.  ``state`` and ``per_rank`` are the caller's own trees; the keys
    "thalweg" are reserved.  ``rng``: this rank's generators go along.  A Hugging Face
    config of the module is kept for export.
    """
    tensors, aliases = model_tensors(module)
    own: dict[str, Any] = {}
    stored = {f"model/{name}": tensor for name, tensor in tensors.items()}
    if optimizer is not None:
        more, own["optim"] = _collect_optimizer(module, optimizer)
        stored.update(more)
    extra = {name: child.get_extra_state() for name, child in _with_extra_state(module)}
    if extra:
        own["extra_state"] = extra
    tree = {**(state or {}), "thalweg": own}
    config = hf_config(module)
    if config is not None and "hf_config" not in tree:
        tree["hf_config"] = config
    ranked = {**(per_rank or {}), "thalweg": {"rng": capture_rng()} if rng else {}}
    named = {f"model/{alias}": f"model/{name}" for alias, name in aliases.items()}
    return Snapshot(stored, named, tree, ranked)


def hf_config(module: nn.Module) -> dict[str, Any] | None:
    """The module's Hugging Face config as the JSON that ``save_pretrained`` would write, if it has one."""
    config = getattr(module, "config", None)
    to_json = getattr(config, "to_json_string", None)
    if not callable(to_json):
        return None
    tree = json.loads(str(to_json()))
    own_class = next((c for c in type(module).__mro__ if not c.__module__.startswith("torch.")), type(module))
    tree["architectures"] = [own_class.__name__]
    return tree


def _with_extra_state(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, child in module.named_modules():
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            yield name, child


def _parameter_names(module: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in module.named_parameters()}


def _collect_optimizer(module: nn.Module, optimizer: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    names = _parameter_names(module)
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        members = [_name_of(parameter, names, index) for parameter in group["params"]]
        hyper = {key: value for key, value in group.items() if key != "params"}
        groups.append({"params": members, "hyper": hyper})
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    loose: dict[str, Any] = {}
    for owner, entries in optimizer.state.items():
        if not isinstance(owner, torch.Tensor):
            loose[str(owner)] = entries
            continue
        name = _name_of(owner, names, None)
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                if "/" in key:
                    raise UnstorableState(f"the optimiser's state key {key!r} of {name} holds a '/'")
                tensors[f"optim/{key}/{name}"] = _as_parameter(value, owner)
            else:
                values.setdefault(name, {})[key] = value
    sharded = sorted(
        {
            n.split("/")[1]
            for n, t in tensors.items()
            if isinstance(t, DTensor) and t.shape != _shape_of(n, module)
        }
    )
    return tensors, {"groups": groups, "values": values, "loose": loose, "sharded": sharded}


def _shape_of(name: str, module: nn.Module) -> torch.Size:
    return module.get_parameter(name.split("/", 2)[2]).shape


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


def _as_parameter(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A state tensor; where an optimiser keeps the plain local shard, the DTensor that it is a part of."""
    if isinstance(value, DTensor) or not isinstance(parameter, DTensor) or value.shape == parameter.shape:
        return value
    if value.shape != parameter.to_local().shape or value.dim() == 0:
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
class _OptimizerPlan:
    """What a restore will do to an optimiser, decided before anything is touched."""

    hyper: list[dict[str, Any]] = field(default_factory=list)  # for each live group
    state: dict[torch.Tensor, dict[str, Any]] = field(default_factory=dict)
    loose: dict[str, Any] = field(default_factory=dict)
    targets: list[tuple[str, torch.Tensor]] = field(default_factory=list)  # stored name, tensor to fill


def restore(
    checkpoint: Checkpoint,
    module: nn.Module,
    optimizer: Any = None,
    *,
    strict: bool = True,
    rng: bool = True,
    group: Any = None,
) -> dict[str, Any]:
    """Fill a module, and with it an optimiser, from a checkpoint of any layout; collective.

    Returns the caller's ``state`` tree as it was given to ``collect``.  The optimiser may
    be fresh: its state is created, sharded as its parameters are.  Without ``optimizer``
    only the weights are read.  ``rng``: the generators of the same rank are set too, where
    the saving job had as many ranks.  Raises ``MismatchedCheckpoint`` naming what does not
    fit and ``DamagedCheckpoint`` for changed bytes, on all ranks and before any change.
    """
    ranks = Ranks.of(group)
    prepared: list[tuple[dict[str, torch.Tensor], set[str], dict[str, Any], _OptimizerPlan, Any]] = []

    def prepare() -> None:
        tree = checkpoint.state
        own = tree.pop("thalweg", {})
        tensors, also = _match_model(checkpoint, module)
        plan = _OptimizerPlan()
        if optimizer is not None:
            plan = _plan_optimizer(checkpoint, module, optimizer, own.get("optim"), strict)
        generators = checkpoint.per_rank(ranks.rank) if rng and checkpoint.world == ranks.world else None
        prepared.append((tensors, also, {"tree": tree, "own": own}, plan, generators))

    ranks.together(f"loading checkpoint {checkpoint.path}", prepare)
    tensors, also, trees, plan, generators = prepared[0]
    checkpoint.read_into([*tensors.items(), *plan.targets], strict=strict, group=group, also=also)
    extra = trees["own"].get("extra_state", {})
    for name, child in _with_extra_state(module):
        if name in extra:
            child.set_extra_state(extra[name])
    if optimizer is not None:
        _apply(plan, optimizer)
    if generators is not None:
        restore_rng(generators.get("thalweg", {}).get("rng", {}))
    return trees["tree"]


def _match_model(checkpoint: Checkpoint, module: nn.Module) -> tuple[dict[str, torch.Tensor], set[str]]:
    """The model's tensors by stored name, and the names that they stand for as well.

    A model that ties two weights which were saved apart can take them only if they are equal.
    """
    tensors, aliases = model_tensors(module)
    manifest = checkpoint.manifest
    also = set()
    for alias, name in aliases.items():
        a, b = manifest.canonical(f"model/{alias}"), manifest.canonical(f"model/{name}")
        if a == b or a not in manifest.tensors:
            continue
        if b not in manifest.tensors:  # saved untied under the other name only
            tensors[alias] = tensors.pop(name)
            continue
        if not torch.equal(checkpoint.read(a), checkpoint.read(b)):
            raise MismatchedCheckpoint(
                f"the model ties {alias} to {name}, but the checkpoint holds different values for them; "
                "untie them in the model's config to load it"
            )
        also.add(f"model/{alias}")
    return {f"model/{name}": tensor for name, tensor in tensors.items()}, also


def _plan_optimizer(
    checkpoint: Checkpoint, module: nn.Module, optimizer: Any, saved: dict[str, Any] | None, strict: bool
) -> _OptimizerPlan:
    if saved is None:
        raise MismatchedCheckpoint(
            "the checkpoint was saved without an optimiser; restore the weights alone (optimizer=None)"
        )
    names = _parameter_names(module)
    by_owner = _stored_state(checkpoint)
    plan = _OptimizerPlan(loose=saved["loose"])
    plan.hyper = [
        _match_group(checkpoint, group, index, names, saved["groups"], strict)
        for index, group in enumerate(optimizer.param_groups)
    ]
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = _name_of(parameter, names, index)
            stored_as = _stored_name(checkpoint, name)
            entries: dict[str, Any] = dict(saved["values"].get(stored_as, {}))
            live = optimizer.state.get(parameter, {})
            for key in by_owner.get(stored_as, []):
                stored = f"optim/{key}/{stored_as}"
                target = _template(checkpoint, stored, key, parameter, live.get(key), group, saved["sharded"])
                entries[key] = target
                plan.targets.append((stored, target))
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
    members = [_stored_name(checkpoint, _name_of(p, names, index)) for p in group["params"]]
    strangers = [name for name in members if name not in home]
    if strangers and strict:
        raise MismatchedCheckpoint(
            f"the optimiser's group {index} has parameters that the saved optimiser did not have: "
            f"{', '.join(strangers[:8])}; load with strict=False to start them fresh"
        )
    numbers = sorted({home[name] for name in members if name in home})
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
    sharded: list[str],
) -> torch.Tensor:
    """The tensor a stored state is read into: the live one if it fits, else a new one like the parameter."""
    record = checkpoint.manifest.tensors[stored]
    shape, dtype = torch.Size(record.shape), DTYPES[record.dtype]
    if isinstance(live, torch.Tensor) and live.shape == shape and live.dtype == dtype:
        return live
    local = parameter.detach()
    if shape == parameter.shape and parameter.dim() > 0:
        return torch.zeros_like(local, dtype=dtype, requires_grad=False)
    device = local.to_local().device if isinstance(local, DTensor) else local.device
    if key == "step" and not (group.get("capturable") or group.get("fused")):
        device = torch.device("cpu")  # as torch.optim keeps it
    if not (key in sharded and isinstance(local, DTensor)):
        return torch.zeros(shape, dtype=dtype, device=device)
    placements = [p if _splits(p, shape, parameter.shape) else Replicate() for p in local.placements]
    return zeros(*shape, dtype=dtype, device_mesh=local.device_mesh, placements=placements)


def _splits(placement: Any, shape: torch.Size, of_parameter: torch.Size) -> bool:
    """Whether a parameter's placement can be a state's: the sharded dim exists there with the same size."""
    dim = getattr(placement, "dim", None)
    return dim is None or (dim < len(shape) and shape[dim] == of_parameter[dim])


def _apply(plan: _OptimizerPlan, optimizer: Any) -> None:
    for group, hyper in zip(optimizer.param_groups, plan.hyper, strict=True):
        for key, value in hyper.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
            if parameter in plan.state:
                optimizer.state[parameter] = plan.state[parameter]
    optimizer.state.update(plan.loose)
