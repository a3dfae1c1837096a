"""``deepspeed.runtime.config``: a checked config as an object, and its sections."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import torch.distributed as dist

from thalweg.config import Config, load_config
from thalweg.config.format import DEEPSPEED_DEFAULTS
from thalweg.config.load import read_partial_config
from thalweg.config.reader import read_source
from thalweg.config.schema.base import AUTO
from thalweg.config.schema.training import BF16, FP16
from thalweg.config.schema.zero import OffloadOptimizer, OffloadParam

DeepSpeedZeroOffloadParamConfig, DeepSpeedZeroOffloadOptimizerConfig = OffloadParam, OffloadOptimizer
DEFAULT_LEAF_MODULE_CLASSES: list[str] = []
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []
ADAM_OPTIMIZER, LAMB_OPTIMIZER, ADAGRAD_OPTIMIZER = "adam", "lamb", "adagrad"
LION_OPTIMIZER, MUON_OPTIMIZER = "lion", "muon"
GRADIENT_CLIPPING = "gradient_clipping"
GRADIENT_CLIPPING_DEFAULT = DEEPSPEED_DEFAULTS[GRADIENT_CLIPPING]


class OffloadDeviceEnum(StrEnum):
    """Where something lives."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> float:
    """The limit of a config; without one, DeepSpeed's."""
    return param_dict.get(GRADIENT_CLIPPING, GRADIENT_CLIPPING_DEFAULT)


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> BF16:
    """The section by either of its names."""
    return BF16.model_validate(param_dict.get("bf16", param_dict.get("bfloat16", {})))


def get_float16_config(param_dict: Mapping[str, Any]) -> FP16:
    """The section."""
    return FP16.model_validate(param_dict.get("fp16", {}))


class DeepSpeedZeroConfig:
    """The section ``zero_optimization`` by its keys, those of stage 3 with and without ``stage3_``.

    Raises:
        ConfigError: with every problem at once.
    """

    def __init__(self, **keys: Any) -> None:
        partial = read_partial_config({"zero_optimization": keys})
        partial.raise_if_any([])
        self.resolved = partial.config.zero_optimization

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "resolved":
            raise AttributeError(name)
        value = getattr(self.resolved, name if hasattr(self.resolved, name) else f"stage3_{name}")
        if name.startswith("offload_") and name not in self.resolved.model_fields_set:
            return None
        return self.resolved.stage == 3 if value == AUTO else value


class DeepSpeedConfig:
    """A config read and checked for this job; its attributes are the keys.

    Raises:
        ConfigError: with every problem at once.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        self._param_dict = dict(read_source(config)[0].tree or {})
        self.resolved: Config = load_config(config, world_size=dist.get_world_size() if dist.is_initialized() else 1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "resolved" not in vars(self):
            raise AttributeError(name)
        return getattr(self.resolved, name)
