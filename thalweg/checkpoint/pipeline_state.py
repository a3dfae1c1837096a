"""The parts of a model that is spread over the stages of a pipeline, as one.

Tensors need little: each stage stores its own under the whole model's names, a shared weight under
its canonical one, and copies count as replicas.  What is not a tensor (members of the optimiser's
groups, values about single parameters, extra state of modules) is merged here, since of such trees
only the first rank's is stored.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from thalweg.checkpoint.errors import UnserializableStateError
from thalweg.checkpoint.format.codec import decode_tree, encode_tree
from thalweg.checkpoint.format.dtypes import DTYPE_NAMES, DTYPES
from thalweg.checkpoint.rank_group import RankGroup
from thalweg.parallel.pipeline.tied_weights import ParamNaming
from thalweg.parallel_dims import control_group
from thalweg.zero.full_state_dict import on_mesh_device


def to_canonical_names(
    tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str], naming: ParamNaming
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and aliases with canonical names for local ones, without what is no part of the model."""
    visible = {name: tensor for name, tensor in tensors.items() if name not in naming.excluded}
    canonical = naming.canonical
    renamed = {canonical.get(name, name): tensor for name, tensor in visible.items()}
    alias_targets = {alias: canonical.get(name, name) for alias, name in aliases.items()}
    alias_targets |= {name: canonical[name] for name in visible if name in canonical}
    return renamed, {alias: name for alias, name in alias_targets.items() if alias not in renamed}


def merge_stage_states(local_state: dict[str, Any], naming: ParamNaming) -> dict[str, Any]:
    """The trees of all stages in one; ``local_state`` is this rank's; collective over the pipeline.

    Raises:
        UnserializableStateError: a tensor among what only one stage has.
    """
    ranks = RankGroup.from_group(naming.group) if naming.group is not None else RankGroup(0, 1)
    if ranks.world_size == 1:
        return local_state
    optim = local_state.get("optim")

    def encode_local() -> dict[str, Any]:
        local: dict[str, Any] = {
            "left_out": local_state.get("left_out", []),
            "extra": local_state.get("extra_state", {}),
        }
        if optim is not None:
            local["members"] = [group["params"] for group in optim["groups"]]
            local["values"], local["forms"] = optim["values"], optim["forms"]
        tree, tensors = encode_tree(local, "stage")
        if tensors:
            raise UnserializableStateError(
                f"{', '.join(tensors)}: extra state of a pipeline's modules must hold no tensors; use buffers"
            )
        return tree

    trees = ranks.all_or_raise("merging the stages of a pipeline", encode_local)
    stage_states = [decode_tree(tree, {}.__getitem__) for tree in trees]
    merged = dict(local_state)
    left_out = sorted({name for part in stage_states for name in part["left_out"]})
    extra = {name: value for part in stage_states for name, value in part["extra"].items()}
    if left_out or "left_out" in local_state:
        merged["left_out"] = left_out
    if extra:
        merged["extra_state"] = extra
    if optim is not None:
        members = zip(*(part["members"] for part in stage_states), strict=True)
        groups = [
            {**group, "params": list(dict.fromkeys(name for names in lists for name in names))}
            for group, lists in zip(optim["groups"], members, strict=True)
        ]
        values = {name: value for part in stage_states for name, value in part["values"].items()}
        kinds: dict[str, set[str]] = {}
        for part in stage_states:
            for key, found in part["forms"].items():
                kinds.setdefault(key, set()).update(found)
        sorted_kinds = {key: sorted(found) for key, found in kinds.items()}
        merged["optim"] = {**optim, "groups": groups, "values": values, "forms": sorted_kinds}
    return merged


def iter_full_tensors(
    tensors: Mapping[str, torch.Tensor], naming: ParamNaming
) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], Callable[[], torch.Tensor]]]:
    """Every tensor of the whole model on every rank: name, dtype, shape, and how to get its values.

    ``fetch()`` gathers a shard and brings it from the stage that has it; collective over the job, in the
    order of the names given here.
    """
    group = naming.group
    if group is None:
        for name, tensor in tensors.items():
            yield name, tensor.dtype, tuple(tensor.shape), partial(_full_tensor, tensor)
        return
    ranks = RankGroup.from_group(group)
    descriptions = [[name, DTYPE_NAMES[t.dtype], list(t.shape)] for name, t in tensors.items()]
    yielded: set[str] = set()
    for rank, part in enumerate(ranks.all_gather_json(descriptions)):
        for name, dtype, shape in part:
            if name in yielded:
                continue
            yielded.add(name)
            local = tensors[name] if rank == ranks.rank else None
            src = dist.get_global_rank(group, rank)
            yield name, DTYPES[dtype], tuple(shape), partial(_fetch, local, DTYPES[dtype], shape, src, group)


def _fetch(local: torch.Tensor | None, dtype: torch.dtype, shape: list[int], src: int, group: Any) -> torch.Tensor:
    value = torch.empty(shape, dtype=dtype) if local is None else _full_tensor(local).cpu().contiguous()
    dist.broadcast(value, src=src, group=control_group(group))
    return value


def _full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    value = tensor.detach()
    return on_mesh_device(value).full_tensor() if isinstance(value, DTensor) else value
