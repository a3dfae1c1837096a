"""The ``tiling`` section of a config, applied to a model."""

from __future__ import annotations

from torch import nn

from thalweg.config.schema.training import Tiling
from thalweg.nn.losses.lazy_logits import LossTiling
from thalweg.nn.losses.lm_head import make_logits_lazy
from thalweg.nn.tiled_mlp import find_mlps, tiled


def apply_tiling(model: nn.Module, section: Tiling) -> LossTiling | None:
    """Tile the MLPs and the loss of ``model`` as ``section`` says; comes before sharding.

    Raises:
        ValueError: a layer that the section names or needs is not there, or cannot be tiled.
    """
    if section.mlp > 1:
        for module in find_mlps(model, section.mlp_modules).values():
            tiled(module, section.mlp)
    if not section.loss:
        return None
    if section.head is not None and section.head not in dict(model.named_modules()):
        raise ValueError(f"tiling.head is {section.head!r}, and the model has no module of that name")
    head = None if section.head is None else model.get_submodule(section.head)
    return make_logits_lazy(model, head, section.loss_tokens)
