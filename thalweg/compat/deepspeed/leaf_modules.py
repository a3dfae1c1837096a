"""What programs say of a model before ``initialize`` and Thalweg reads from the config: leaf modules, tensor ranks."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass
class ModelSettings:
    """``leaf_classes``: names of classes that are gathered as a whole; ``tp_size``: ranks that split each layer."""

    leaf_classes: list[str] = field(default_factory=list)
    tp_size: int = 1


_settings_by_model: weakref.WeakKeyDictionary[nn.Module, ModelSettings] = weakref.WeakKeyDictionary()


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Sequence[type | str]) -> list[nn.Module]:
    """Gather each module of these classes as a whole at stage 3; returns the modules.

    Raises:
        ValueError: the model has none.
    """
    names = _class_names(leaf_module_classes)
    found = [module for module in model.modules() if type(module).__name__ in names]
    if not found:
        raise ValueError(f"no module of type {names} is in {type(model).__name__}: name classes that the model has")
    settings = _settings_by_model.setdefault(model, ModelSettings())
    settings.leaf_classes = list(dict.fromkeys(settings.leaf_classes + names))
    return found


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Sequence[type | str]) -> list[nn.Module]:
    """Undo :func:`set_z3_leaf_modules`; returns the modules."""
    names = _class_names(leaf_module_classes)
    settings = _settings_by_model.setdefault(model, ModelSettings())
    settings.leaf_classes = [name for name in settings.leaf_classes if name not in names]
    return [module for module in model.modules() if type(module).__name__ in names]


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that are gathered as a whole."""
    classes = _settings_by_model.get(model, ModelSettings()).leaf_classes
    return [module for module in model.modules() if type(module).__name__ in classes]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether a module is one of them in any model."""
    return any(type(model).__name__ in settings.leaf_classes for settings in _settings_by_model.values())


def tp_model_init(model: nn.Module, tp_size: int, dtype: torch.dtype | None = None, config: Any = None) -> nn.Module:
    """Split the model's layers over ``tp_size`` ranks when it is initialized; returns the model."""
    _settings_by_model.setdefault(model, ModelSettings()).tp_size = tp_size
    return model if dtype is None else model.to(dtype)


def add_model_settings(model: nn.Module, tree: Mapping[str, Any]) -> dict[str, Any]:
    """The config with what was said of the model."""
    settings, result = _settings_by_model.get(model, ModelSettings()), dict(tree)
    if settings.leaf_classes:
        zero = dict(result.get("zero_optimization") or {})
        leaf = dict(zero.get("leaf_module") or {})
        leaf["classes"] = list(dict.fromkeys([*leaf.get("classes", ()), *settings.leaf_classes]))
        result["zero_optimization"] = {**zero, "leaf_module": leaf}
    if settings.tp_size > 1:
        result["tensor_parallel"] = {"autotp_size": settings.tp_size, **(result.get("tensor_parallel") or {})}
    return result


def _class_names(classes: Sequence[type | str]) -> list[str]:
    return [name.rpartition(".")[2] if isinstance(name, str) else name.__name__ for name in classes]
