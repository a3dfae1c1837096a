"""Which parameters Muon is for: hidden matrices, and not look-up tables, heads, biases and norms."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from thalweg.parallel_dims import control_group
from thalweg.zero.whole_parameter import named_shards

_EMBEDDING_AND_HEAD_NAMES = ("wte", "wpe", "lm_head", "head", "output_layer", "classifier", "score")
# A vocabulary is many times the width; no hidden matrix of a transformer is this tall.
_MIN_EMBEDDING_ASPECT = 8


def is_hidden_matrix(param: Tensor, name: str | None = None) -> bool:
    """Guess whether Muon is for ``param``: two dims or more, and neither a look-up table nor an output head.

    By the name where there is one (a part with "emb" in it, or a module called ``wte``, ``wpe``, ``lm_head``,
    ``head``, ...); by the shape besides: a table has at least 8 times as many rows as columns.
    """
    if param.ndim < 2:
        return False
    name_parts = (name or "").lower().split(".")
    if any("emb" in part for part in name_parts) or any(part in _EMBEDDING_AND_HEAD_NAMES for part in name_parts[-2:]):
        return False
    return param.shape[0] < _MIN_EMBEDDING_ASPECT * param.shape[1:].numel()


def muon_groups(model: nn.Module, groups: Iterable[Mapping[str, Any]], pp_group: Any = None) -> list[dict[str, Any]]:
    """Return parameter groups for Muon by the modules' types: hidden matrices, and the others.

    The others are vectors, biases, what belongs to an ``nn.Embedding``, and the head: the last linear layer whose
    output is as long as the largest embedding. ``groups``: groups of the model's parameters to split, their
    settings kept; kernels of convolutions get groups of their own. A group that says ``use_muon`` stays whole; groups
    that would be empty are left out. ``pp_group``: the ranks of a pipeline, one of which has the embedding; collective.
    """
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    vocabulary = torch.tensor(max((module.num_embeddings for module in embeddings), default=0))
    if pp_group is not None:
        dist.all_reduce(vocabulary, op=dist.ReduceOp.MAX, group=control_group(pp_group))
    heads = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == int(vocabulary)]
    excluded_ids = {id(p) for module in (*embeddings, *heads[-1:]) for _, p in named_shards(module)}
    excluded_ids |= {id(p) for name, p in named_shards(model) if name.endswith("bias")}  # of experts: a stack of them
    kernel_ids = {id(p) for m in model.modules() if isinstance(m, _ConvNd) for _, p in named_shards(m)}
    is_matrix = lambda param, _: param.ndim >= 2 and id(param) not in excluded_ids
    halves = [half for group in groups for half in split_group(group, is_matrix)]
    return [part for half in halves for part in _split_off_kernels(half, kernel_ids)]


def _split_off_kernels(group: dict[str, Any], kernel_ids: set[int]) -> list[dict[str, Any]]:
    by_kind: dict[bool, list[Any]] = {False: [], True: []}
    for member in group["params"]:
        by_kind[group["use_muon"] and id(get_param(member)) in kernel_ids].append(member)
    kernels = {**group, "params": by_kind[True], "is_convolution": True}
    return [part for part in ({**group, "params": by_kind[False]}, kernels) if part["params"]]


def get_param(member: Any) -> Tensor:
    """Return the parameter of a member of a group: itself, or the second of a (name, parameter) pair."""
    return member[1] if isinstance(member, tuple) else member


def group_members(group: Mapping[str, Any]) -> list[Any]:
    """Return the members of a group as a list, a single parameter too."""
    return [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])


def split_group(
    group: Mapping[str, Any], is_matrix: Callable[[Tensor, str | None], bool] = is_hidden_matrix
) -> list[dict[str, Any]]:
    """Return the hidden matrices of ``group`` and its others as groups of their own, the empty one left out.

    ``is_matrix(parameter, name)`` decides where the group does not say ``use_muon``.
    """
    halves: dict[bool, list[Any]] = {True: [], False: []}
    for member in group_members(group):
        name, param = member if isinstance(member, tuple) else (None, member)
        use_muon = bool(group["use_muon"]) if "use_muon" in group else is_matrix(param, name)
        if use_muon and param.ndim < 2:
            raise ValueError(
                f"a group with use_muon: true holds a parameter of shape {tuple(param.shape)}: Muon is for "
                "matrices, put it into a group with use_muon: false"
            )
        halves[use_muon].append(member)
    return [{**group, "params": half, "use_muon": use_muon} for use_muon, half in halves.items() if half]
