"""``deepspeed.runtime.config``: a checked config as an object, and its sections."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import torch.distributed as dist

from thalweg.config import Config, load_config
from thalweg.config.format import DEEPSPEED_DEFAULTS
from thalweg.config.reader import read_source
from thalweg.config.schema.training import BF16, FP16
from thalweg.config.schema.zero import OffloadOptimizer, OffloadParam, ZeroOptimization

DeepSpeedZeroConfig = ZeroOptimization
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
