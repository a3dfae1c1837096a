"""A config with a few values exchanged, resolved anew, so that every rule is asked again."""

from __future__ import annotations

import copy
from typing import Any

from thalweg.config import Config, resolve
from thalweg.config.schema.base import AUTO, replace_by_path

_DERIVED_KEYS = ("train_batch_size", "data_parallel_size")


def resolve_with_changes(config: Config, changes: dict[str, Any], world_size: int) -> Config:
    """The checked ``config`` with ``changes`` (dotted keys), resolved; the batch of a step stays as it is.

    Raises:
        ConfigError: the values contradict each other.
    """
    changed = replace_by_path(config, {"data_parallel_size": AUTO, **changes})
    assert isinstance(changed, Config)
    return resolve(changed, world_size=world_size)


def apply_changes(config_dict: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A ds_config with ``changes`` (dotted keys); the total batch size is left to follow from its factors."""
    config_dict = copy.deepcopy(config_dict)
    for key in _DERIVED_KEYS:
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
