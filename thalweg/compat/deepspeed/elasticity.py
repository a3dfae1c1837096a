"""``deepspeed.elasticity``: the batch that an ``elasticity`` block comes to, as the config finds it."""

import json
import os
from collections.abc import Mapping
from typing import Any

from thalweg.config import ConfigError, load
from thalweg.config.batch_size import find_elastic_sizes
from thalweg.config.errors import ConfigProblem

ElasticityError = ElasticityConfigError = ConfigError
_LEAST_DEEPSPEED = (0, 3, 8)  # which had elasticity first
_SCHEDULERS_CONFIG = "DEEPSPEED_ELASTICITY_CONFIG"
_MUST_STAY = ("max_train_batch_size", "micro_batch_sizes", "version")


class ElasticityIncompatibleWorldSize(ConfigError):
    """The batch goes with other numbers of ranks."""


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether a config asks for it."""
    return bool(ds_config.get("elasticity", {}).get("enabled", False))


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str = "",
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[Any, ...]:
    """(batch, numbers of data-parallel ranks that it goes with), and the micro-batch of ``world_size`` ranks, if given.

    Raises:
        ElasticityError: no such block, or one with faults.
        ElasticityIncompatibleWorldSize: the batch does not go with ``world_size``.
    """
    version = target_deepspeed_version.split("+")[0].split(".")
    if target_deepspeed_version and tuple(map(int, version[:3])) < _LEAST_DEEPSPEED:
        raise _error("target_deepspeed_version", target_deepspeed_version, "at least 0.3.8")
    elasticity = load({"elasticity": ds_config.get("elasticity", {})}).elasticity
    if not elasticity.enabled:
        raise _error("elasticity.enabled", False, "true")
    ranks = world_size
    if elasticity.version >= 0.2 and not ranks:
        if not os.environ.get("WORLD_SIZE", "").isdecimal():
            raise _error(
                "world_size", None, "the number of ranks, or WORLD_SIZE in the environment, from version 0.2 on"
            )
        ranks = int(os.environ["WORLD_SIZE"])
    degree = elasticity.model_parallel_size
    batch, fitting, micro, problems = find_elastic_sizes(elasticity, ranks // degree or None, degree)
    if problems:
        raise (ElasticityIncompatibleWorldSize if fitting else ConfigError)(problems)
    return (batch, fitting, micro) if world_size or return_microbatch else (batch, fitting)


def ensure_immutable_elastic_config(runtime_elastic_config_dict: Mapping[str, Any]) -> None:
    """Raise ``ElasticityError`` where a scheduler has planned with another block than the job's.

    It leaves its block in ``DEEPSPEED_ELASTICITY_CONFIG``.
    """
    planned = json.loads(os.environ.get(_SCHEDULERS_CONFIG, "{}"))
    for key in _MUST_STAY:
        value = runtime_elastic_config_dict.get(key)
        if planned and planned.get(key) != value:
            raise _error(f"elasticity.{key}", value, f"{planned.get(key)}, as {_SCHEDULERS_CONFIG} has it")


def _error(path: str, value: Any, expected: str) -> ConfigError:
    return ConfigError([ConfigProblem(path, value, expected)])
