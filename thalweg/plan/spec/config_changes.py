"""A config with a few values exchanged, read and resolved anew, so that every rule is asked again."""

from __future__ import annotations

import copy
from typing import Any

from thalweg.config import Config, load, resolve

_DERIVED_KEYS = ("train_batch_size", "data_parallel_size")


def resolve_with_changes(
    config: Config, changes: dict[str, Any], world_size: int, fixed_keys: tuple[str, ...] = ()
) -> Config:
    """The config with ``changes`` (dotted keys), resolved; ``fixed_keys``: totals that do not follow from factors.

    Raises:
        ConfigError: the values contradict each other.
    """
    return resolve(load(apply_changes(config.to_dict(), changes, fixed_keys)), world_size=world_size)


def apply_changes(
    config_dict: dict[str, Any], changes: dict[str, Any], fixed_keys: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A ds_config with ``changes`` (dotted keys); the total batch size is left to follow from its factors."""
    config_dict = copy.deepcopy(config_dict)
    for key in _DERIVED_KEYS:
        if key not in fixed_keys:
            config_dict.pop(key, None)
    for path, value in changes.items():
        node = config_dict
        *outer, last = path.split(".")
        for key in outer:
            if not isinstance(node.get(key), dict):
                node[key] = {}
            node = node[key]
        node[last] = value
    return config_dict


def find_nvme_path(config: Config) -> str | None:
    """The folder that the config names for what goes to a disk, by whatever option."""
    zero = config.zero_optimization
    paths = (config.memory.nvme_path, zero.offload_optimizer.nvme_path, zero.offload_param.nvme_path)
    return next((path for path in paths if path and path != "auto"), None)
