"""From a module and its optimiser to logical tensors, and back at any layout.

``model/<fqn>`` for parameters and persistent buffers; a tied parameter is stored under
its first name and the others are aliases.  ``optimizer_state.py`` has the optimiser.

Nothing here knows how a module was sharded: a parameter is a DTensor or a plain tensor,
and that is all.
"""

import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import nn

from thalweg.checkpoint.errors import CheckpointMismatchError, UnserializableStateError
from thalweg.checkpoint.format.shards import noop_release
from thalweg.checkpoint.optimizer_state import (
    OptimizerLoadPlan,
    apply_optimizer_plan,
    collect_optimizer_state,
    plan_optimizer_load,
    to_plain_name,
)
from thalweg.checkpoint.pipeline_state import merge_stage_states, to_canonical_names
from thalweg.checkpoint.rank_group import RankGroup
from thalweg.checkpoint.reader import Checkpoint
from thalweg.checkpoint.save import Snapshot
from thalweg.device import get_rng_state, set_rng_state
from thalweg.parallel.pipeline.tied_weights import IDENTITY_NAMING, ParamNaming
from thalweg.zero.whole_parameter import named_shards

_NUMPY_STATE = ("name", "keys", "position", "has_gauss", "cached")  # what numpy.random.get_state() is made of


def model_tensors(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Parameters and persistent buffers by fqn, each once, and the aliases of those that are tied; compiled modules' as
    those of the modules themselves."""
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, child in module.named_modules(remove_duplicate=False)
        for name in child._non_persistent_buffers_set  # the only record of `persistent=False`
    }
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in (*named_shards(module, remove_duplicate=False), *module.named_buffers(remove_duplicate=False)):
        if name in transient:
            continue
        name = to_plain_name(name)
        first_name = first.setdefault(id(tensor), name)
        if first_name == name:
            tensors[name] = tensor
        else:
            aliases[name] = first_name
    return tensors, aliases


def is_frozen(tensor: torch.Tensor) -> bool:
    """Whether a tensor of the model is a parameter that needs no gradient."""
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def build_snapshot(
    module: nn.Module,
    optimizer: Any = None,
    *,
    state: Mapping[str, Any] | None = None,
    per_rank: Mapping[str, Any] | None = None,
    include_frozen: bool = True,
    naming: ParamNaming = IDENTITY_NAMING,
) -> Snapshot:
    """Everything that ``restore`` needs, as references to the live tensors (save before the next step).

    ``optimizer``: anything with torch.optim's ``param_groups`` and ``state`` over parameters
    of ``module``.  ``state`` and ``per_rank`` are the caller's own trees; the key
    "thalweg" is reserved in both.  This rank's generators go along.  A Hugging
    Face config of the module is kept for export.  Of plain buffers, in which ranks may
    differ (running statistics), the first rank's values are kept.  ``include_frozen=False`` leaves
    out parameters that need no gradient; ``restore`` then leaves those alone.  ``naming``: where
    the module is a part of the model; collective over its group then.
    """
    for tree in (state, per_rank):
        if tree is not None and "thalweg" in tree:
            raise UnserializableStateError("the key 'thalweg' of the state is reserved; use another")
    tensors, aliases = to_canonical_names(*model_tensors(module), naming)
    own_state: dict[str, Any] = {}
    if not include_frozen:
        own_state["left_out"] = [name for name, tensor in tensors.items() if is_frozen(tensor)]
        tensors = {name: tensor for name, tensor in tensors.items() if name not in own_state["left_out"]}
        aliases = {alias: name for alias, name in aliases.items() if name in tensors}
    stored = {f"model/{name}": tensor for name, tensor in tensors.items()}
    if optimizer is not None:
        optimizer_tensors, own_state["optim"] = collect_optimizer_state(module, optimizer, naming)
        stored.update(optimizer_tensors)
    extra = {name: child.get_extra_state() for name, child in _modules_with_extra_state(module)}
    if extra:
        own_state["extra_state"] = extra
    config = get_hf_config(module)
    if config is not None:
        own_state["hf_config"] = config
    tree = {**(state or {}), "thalweg": merge_stage_states(own_state, naming)}
    rank_state = {**(per_rank or {}), "thalweg": {"rng": _capture_rng()}}
    alias_names = {f"model/{alias}": f"model/{name}" for alias, name in aliases.items()}
    buffers = {id(buffer) for buffer in module.buffers()}
    rank_local = frozenset(f"model/{name}" for name, tensor in tensors.items() if id(tensor) in buffers)
    release = getattr(optimizer, "release", noop_release)
    return Snapshot(stored, alias_names, tree, rank_state, rank_local, release)


def get_hf_config(module: nn.Module) -> dict[str, Any] | None:
    """The module's Hugging Face config as the JSON that ``save_pretrained`` would write, if it has one."""
    config = getattr(module, "config", None)
    to_json = getattr(config, "to_json_string", None)
    if not callable(to_json):
        return None
    tree = json.loads(str(to_json()))
    own_class = type(getattr(module, "_orig_mod", module))  # compiled
    model_class = next((c for c in own_class.__mro__ if not c.__module__.startswith("torch.")), own_class)
    tree["architectures"] = [model_class.__name__]
    return tree


def _modules_with_extra_state(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, child in module.named_modules():
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            yield to_plain_name(name), child


def restore_module(
    checkpoint: Checkpoint,
    module: nn.Module,
    optimizer: Any = None,
    *,
    strict: bool = True,
    rng: bool = True,
    group: Any = None,
    naming: ParamNaming = IDENTITY_NAMING,
) -> dict[str, Any]:
    """Fill a module, and with it an optimiser, from a checkpoint of any layout; collective.

    Returns the caller's ``state`` tree as it was given to ``collect``.  The optimiser may
    be fresh: its state is created, sharded as its parameters are.  Without ``optimizer``
    only the weights are read.  ``rng``: the generators of the same rank are set too, where
    the saving job had as many ranks.  Raises ``CheckpointMismatchError`` naming what does not
    fit and ``CorruptCheckpointError`` for changed bytes, on all ranks and before any change.
    """
    ranks = RankGroup.from_group(group)
    prepared: list[tuple[dict[str, torch.Tensor], set[str], dict[str, Any], OptimizerLoadPlan, Any]] = []

    def prepare() -> None:
        tree = checkpoint.state
        saved = tree.pop("thalweg", {})
        tensors, extra_names = _match_model(checkpoint, module, naming)
        for name in saved.get("left_out", ()):
            tensors.pop(f"model/{name}", None)
        plan = OptimizerLoadPlan()
        if optimizer is not None:
            plan = plan_optimizer_load(checkpoint, module, optimizer, saved.get("optim"), strict, naming)
        generators = checkpoint.per_rank(ranks.rank) if rng and checkpoint.world_size == ranks.world_size else None
        prepared.append((tensors, extra_names, {"tree": tree, "own": saved}, plan, generators))

    ranks.all_or_raise(f"loading checkpoint {checkpoint.path}", prepare)
    tensors, extra_names, trees, plan, generators = prepared[0]
    targets = [*tensors.items(), *plan.targets]
    release = getattr(optimizer, "release", noop_release)
    checkpoint.read_into(targets, strict=strict, group=group, extra_names=extra_names, release=release)

    def apply() -> None:
        extra = trees["own"].get("extra_state", {})
        for name, child in _modules_with_extra_state(module):
            if name in extra:
                child.set_extra_state(extra[name])
        if optimizer is not None:
            apply_optimizer_plan(plan, optimizer)
        if generators is not None:
            _restore_rng(generators.get("thalweg", {}).get("rng", {}))

    ranks.all_or_raise(f"loading checkpoint {checkpoint.path}", apply)
    return trees["tree"]


def _match_model(
    checkpoint: Checkpoint, module: nn.Module, naming: ParamNaming
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """The model's tensors by stored name, and the names that they stand for as well.

    A model that ties two weights which were saved apart can take them only if they are equal.
    """
    tensors, aliases = to_canonical_names(*model_tensors(module), naming)
    manifest = checkpoint.manifest
    extra_names = set()
    for alias, name in aliases.items():
        a, b = manifest.resolve_alias(f"model/{alias}"), manifest.resolve_alias(f"model/{name}")
        if a == b or a not in manifest.tensors:
            continue
        if b not in manifest.tensors:  # saved untied under the other name only
            tensors[alias] = tensors.pop(name)
            continue
        if not torch.equal(checkpoint.read(a), checkpoint.read(b)):
            raise CheckpointMismatchError(
                f"the model ties {alias} to {name}, but the checkpoint holds different values for them; "
                "untie them in the model's config to load it"
            )
        extra_names.add(f"model/{alias}")
    return {f"model/{name}": tensor for name, tensor in tensors.items()}, extra_names


def _capture_rng() -> dict[str, Any]:
    """Python's, numpy's, torch's CPU and the current accelerator's (as "cuda") generator states."""
    version, words, gauss = random.getstate()
    tree: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "torch": torch.get_rng_state(),
        "numpy": dict(zip(_NUMPY_STATE, numpy.random.get_state(), strict=True)),
    }
    accelerator = get_rng_state()[1]
    if accelerator is not None:
        tree["cuda"] = accelerator
    return tree


def _restore_rng(tree: dict[str, Any]) -> None:
    """Set the generators that ``tree`` has; those it lacks are left as they are."""
    if "python" in tree:
        saved = tree["python"]
        random.setstate((saved["version"], tuple(saved["words"].tolist()), saved["gauss"]))
    if "torch" in tree:
        torch.set_rng_state(tree["torch"].cpu())
    if "numpy" in tree:
        numpy.random.set_state(tuple(tree["numpy"][key] for key in _NUMPY_STATE))
    if "cuda" in tree:
        set_rng_state((torch.get_rng_state(), tree["cuda"].cpu()))
