"""A config with a few values exchanged, and those that a plan chooses itself."""

from __future__ import annotations

import copy
from typing import Any

from thalweg.config import Config
from thalweg.zero.storage.nvme import MOST_IN_MEMORY

MAX_IN_CPU_KEY = "zero_optimization.offload_param.max_in_cpu"
# Of the memory of a rank, for parameters that stay in it though they might rest on a disk; each takes its master, its
# copy in the compute dtype and holes between them.
_RESIDENT_SHARE, _RESIDENT_BYTES = 1 / 8, 8
_DERIVED_KEYS = ("train_batch_size", "data_parallel_size")


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


def choose_max_in_cpu(config: Config, rank_memory: int | None) -> dict[str, Any]:
    """The changes that keep paged parameters in memory where a rank has ``rank_memory`` bytes: none where the config
    says how many, or has no tier that asks."""
    section = config.zero_optimization.offload_param
    if section.device != "nvme" or section.max_in_cpu is not None or rank_memory is None:
        return {}
    return {MAX_IN_CPU_KEY: min(MOST_IN_MEMORY, int(rank_memory * _RESIDENT_SHARE) // _RESIDENT_BYTES)}
