"""Which parameters Muon is for: hidden matrices, and not look-up tables, heads, biases and norms."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

_TABLE_NAMES = ("wte", "wpe", "lm_head", "head", "output_layer", "classifier", "score")
# A vocabulary is many times the width; no hidden matrix of a transformer is this tall.
_TABLE_ASPECT = 8


def is_hidden_matrix(param: Tensor, name: str | None = None) -> bool:
    """Guess whether Muon is for ``param``: two dims or more, and neither a look-up table nor an output head.

    By the name where there is one (a part with "emb" in it, or a module called ``wte``, ``wpe``, ``lm_head``,
    ``head``, ...); by the shape besides: a table has at least 8 times as many rows as columns.
    """
    if param.ndim < 2:
        return False
    parts = (name or "").lower().split(".")
    if any("emb" in part for part in parts) or any(part in _TABLE_NAMES for part in parts[-2:]):
        return False
    return param.shape[0] < _TABLE_ASPECT * param.shape[1:].numel()


def muon_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return parameter groups for Muon by the modules' types, with names: hidden matrices, and the others.

    The others are vectors, what belongs to an ``nn.Embedding``, and the head: the last linear layer whose
    output is as long as the largest embedding. Frozen parameters are left out. Groups that would be empty are
    left out, too.
    """
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    tables = {id(p) for module in embeddings for p in module.parameters(recurse=False)}
    vocabulary = max((module.num_embeddings for module in embeddings), default=None)
    heads = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == vocabulary]
    if heads:
        tables.add(id(heads[-1].weight))
    hidden, others = [], []
    for name, param in model.named_parameters():
        if param.requires_grad:
            matrix = param.ndim >= 2 and id(param) not in tables
            (hidden if matrix else others).append((name, param))
    groups = [{"params": hidden, "use_muon": True}, {"params": others, "use_muon": False}]
    return [group for group in groups if group["params"]]


def split_groups(params: Iterable[Any], rates: dict[bool, float]) -> list[dict[str, Any]]:
    """Return groups that each belong to one half, in the order given, hidden matrices first."""
    items = list(params)
    given = items if items and all(isinstance(item, dict) for item in items) else [{"params": items}]
    groups: list[dict[str, Any]] = []
    for group in given:
        members: list[Any] = list(group["params"])
        halves: dict[bool, list[Any]] = {True: [], False: []}
        for member in members:
            halves[_belongs_to_muon(group, member)].append(member)
        for use_muon, half in halves.items():
            if half:
                groups.append({"lr": rates[use_muon], **group, "params": half, "use_muon": use_muon})
    return groups


def _belongs_to_muon(group: dict[str, Any], member: Any) -> bool:
    name, param = member if isinstance(member, tuple) else (None, member)
    if "use_muon" not in group:
        return is_hidden_matrix(param, name)
    if group["use_muon"] and param.ndim < 2:
        raise ValueError(
            f"a group with use_muon: true holds a parameter of shape {tuple(param.shape)}: Muon is for "
            "matrices, put it into a group with use_muon: false"
        )
    return bool(group["use_muon"])
