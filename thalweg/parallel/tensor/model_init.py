"""``tp_model_init``: say of a model, before ``initialize``, over how many ranks its layers are split."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

_tp_size_by_model: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def tp_model_init(model: nn.Module, tp_size: int, dtype: torch.dtype | None = None, config: Any = None) -> nn.Module:
    """Split the model's layers over ``tp_size`` ranks when it is initialized; returns the model, as ``dtype``.

    ``tensor_parallel.autotp_size`` in the config does the same.
    """
    _tp_size_by_model[model] = tp_size
    return model if dtype is None else model.to(dtype)


def requested_tp_size(model: nn.Module) -> int | None:
    """What :func:`tp_model_init` was told of a model."""
    return _tp_size_by_model.get(model)
