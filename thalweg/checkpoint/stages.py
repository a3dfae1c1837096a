"""The parts of a model that is spread over the stages of a pipeline, as one.

Tensors need little: each stage stores its own under the whole model's names, a shared weight under
its canonical one, and copies count as replicas.  What is not a tensor (members of the optimiser's
groups, values about single parameters, extra state of modules) is merged here, since of such trees
only the first rank's is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from thalweg.checkpoint.dtypes import DTYPES, NAMES
from thalweg.checkpoint.errors import UnstorableState
from thalweg.checkpoint.ranks import Ranks
from thalweg.checkpoint.tree import decode, encode
from thalweg.parallel.pipeline.names import Naming


def under_stored_names(
    tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str], naming: Naming
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and aliases with canonical names for local ones, without what is no part of the model."""
    kept = {name: tensor for name, tensor in tensors.items() if name not in naming.hidden}
    canonical = naming.canonical
    renamed = {canonical.get(name, name): tensor for name, tensor in kept.items()}
    also = {alias: canonical.get(name, name) for alias, name in aliases.items()}
    also |= {name: canonical[name] for name in kept if name in canonical}
    return renamed, {alias: name for alias, name in also.items() if alias not in renamed}


def merge(own: dict[str, Any], naming: Naming) -> dict[str, Any]:
    """The trees of all stages in one; ``own`` is this rank's; collective over the pipeline.

    Raises:
        UnstorableState: a tensor among what only one stage has.
    """
    ranks = Ranks.of(naming.group) if naming.group is not None else Ranks(0, 1)
    if ranks.world == 1:
        return own
    optim = own.get("optim")

    def mine() -> dict[str, Any]:
        part: dict[str, Any] = {"left_out": own.get("left_out", []), "extra": own.get("extra_state", {})}
        if optim is not None:
            part["members"] = [group["params"] for group in optim["groups"]]
            part["values"], part["forms"] = optim["values"], optim["forms"]
        tree, tensors = encode(part, "stage")
        if tensors:
            raise UnstorableState(
                f"{', '.join(tensors)}: extra state of a pipeline's modules must hold no tensors; use buffers"
            )
        return tree

    parts = [decode(tree, _no_tensor) for tree in ranks.together("merging the stages of a pipeline", mine)]
    merged = dict(own)
    left_out = sorted({name for part in parts for name in part["left_out"]})
    extra = {name: value for part in parts for name, value in part["extra"].items()}
    if left_out or "left_out" in own:
        merged["left_out"] = left_out
    if extra:
        merged["extra_state"] = extra
    if optim is not None:
        members = zip(*(part["members"] for part in parts), strict=True)
        groups = [
            {**group, "params": list(dict.fromkeys(name for names in lists for name in names))}
            for group, lists in zip(optim["groups"], members, strict=True)
        ]
        values = {name: value for part in parts for name, value in part["values"].items()}
        forms: dict[str, set[str]] = {}
        for part in parts:
            for key, found in part["forms"].items():
                forms.setdefault(key, set()).update(found)
        kept = {key: sorted(found) for key, found in forms.items()}
        merged["optim"] = {**optim, "groups": groups, "values": values, "forms": kept}
    return merged


def _no_tensor(name: str) -> torch.Tensor:
    raise AssertionError(f"{name} was not to be there")


Fetch = Callable[[], torch.Tensor]


def everywhere(
    tensors: Mapping[str, torch.Tensor], naming: Naming
) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], Fetch]]:
    """Every tensor of the whole model on every rank: name, dtype, shape, and how to get its values.

    ``fetch()`` gathers a shard and brings it from the stage that has it; collective over the job, in the
    order of the names given here.
    """
    group = naming.group
    if group is None:
        for name, tensor in tensors.items():
            yield name, tensor.dtype, tuple(tensor.shape), lambda tensor=tensor: _whole(tensor)
        return
    ranks = Ranks.of(group)
    described = [[name, NAMES[t.dtype], list(t.shape)] for name, t in tensors.items()]
    seen: set[str] = set()
    for place, part in enumerate(ranks.exchange(described)):
        for name, dtype, shape in part:
            if name in seen:
                continue
            seen.add(name)
            own = tensors[name] if place == ranks.rank else None
            source = dist.get_global_rank(group, place)
            yield name, DTYPES[dtype], tuple(shape), _fetcher(own, DTYPES[dtype], shape, source, group)


def _fetcher(
    own: torch.Tensor | None, dtype: torch.dtype, shape: list[int], source: int, group: Any
) -> Fetch:
    def fetch() -> torch.Tensor:
        value = torch.empty(shape, dtype=dtype) if own is None else _whole(own).cpu().contiguous()
        dist.broadcast(value, src=source, group=group)
        return value

    return fetch


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    value = tensor.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value
