"""``deepspeed.runtime.config``: a checked config as an object, and its sections."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from thalweg.compat.deepspeed.logs import logger
from thalweg.config import Config, ConfigError, load_config
from thalweg.config.aliases import find_parent
from thalweg.config.batch_size import MICRO, STEPS, TOTAL, resolve_batch_sizes
from thalweg.config.errors import ConfigProblem
from thalweg.config.format import DEEPSPEED_DEFAULTS
from thalweg.config.load import read_partial_config
from thalweg.config.reader import read_source
from thalweg.config.schema.base import AUTO, list_options, replace_by_path
from thalweg.config.schema.training import BF16, FP16
from thalweg.config.schema.zero import OffloadOptimizer, OffloadParam
from thalweg.zero.offload_states import STATES

DeepSpeedZeroOffloadParamConfig, DeepSpeedZeroOffloadOptimizerConfig = OffloadParam, OffloadOptimizer
DEFAULT_LEAF_MODULE_CLASSES: list[str] = []
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []
ADAM_OPTIMIZER, LAMB_OPTIMIZER, ADAGRAD_OPTIMIZER = "adam", "lamb", "adagrad"
LION_OPTIMIZER, MUON_OPTIMIZER = "lion", "muon"
GRADIENT_CLIPPING = "gradient_clipping"
GRADIENT_CLIPPING_DEFAULT = DEEPSPEED_DEFAULTS[GRADIENT_CLIPPING]


class DeepSpeedConfigError(ConfigError, AssertionError):
    """A config with problems; DeepSpeed asserts some of its rules."""


@dataclass(frozen=True)
class InvalidValue(ConfigProblem):
    """A value that its key does not take, in the words that DeepSpeed begins with."""

    _form = f"Invalid {ConfigProblem._form}"


@contextmanager
def raising_deepspeed_errors() -> Iterator[None]:
    """A config's problems as DeepSpeed's error."""
    try:
        yield
    except ConfigError as error:
        problems = [InvalidValue(**vars(one)) if type(one) is ConfigProblem else one for one in error.problems]
        raise DeepSpeedConfigError(problems, error.source) from None


def read_numbers_as_flags(tree: dict[str, Any]) -> dict[str, Any]:
    """A config whose 1 and 0 are true and false, where they must be."""
    tree = copy.deepcopy(tree)
    for path, field in list_options(Config):
        block, name = find_parent(tree, path)
        if block is not None and field.annotation is bool and type(block.get(name)) is int and block[name] in (0, 1):
            block[name] = bool(block[name])
    return tree


def translate_config(tree: dict[str, Any]) -> dict[str, Any]:
    """A config as DeepSpeed reads it: numbers as flags too, and what a stage has no use for, or stands nowhere, is
    passed over."""
    tree = read_numbers_as_flags(tree)
    for key in [key for key in tree if "." in key]:  # TRL writes "zero_optimization.reduce_bucket_size" and the like
        del tree[key]
        logger.warning("%s is passed over: a key of a block is written within the block", key)
    found = tree.get("zero_optimization")
    zero = found if isinstance(found, dict) else {}
    stage = zero.get("stage", 0)
    for name, least in (("offload_param", 3), ("offload_optimizer", 1)):
        if isinstance(stage, int) and stage < least and isinstance(zero.get(name), dict):
            device = zero.pop(name).get("device")
            if device not in (None, "none"):  # accelerate writes "none" of its own accord
                logger.warning("zero_optimization.%s does nothing at stage %d", name, stage)
    return tree


class OffloadDeviceEnum(StrEnum):
    """Where something lives."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


# What ``engine.offload_states`` may move.
OffloadStateTypeEnum = StrEnum("OffloadStateTypeEnum", list(STATES))


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
        with raising_deepspeed_errors():
            partial = read_partial_config({"zero_optimization": keys}, read_numbers_as_flags)
            partial.raise_if_any([])
        self.resolved = partial.config.zero_optimization
        named = {*keys, *self.resolved.model_fields_set}  # by older spellings too
        self.given = {name for name in named if keys.get(name, True) is not None}
        if self.resolved.stage == 3 and self.resolved.elastic_checkpoint:
            logger.warning("elastic checkpointing is deprecated: every checkpoint loads at any number of ranks")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "given" not in vars(self):
            raise AttributeError(name)
        if name == "leaf_module":
            return SimpleNamespace(**{key: list(names) for key, names in dict(self.resolved.leaf_module).items()})
        value = getattr(self.resolved, name if hasattr(self.resolved, name) else f"stage3_{name}")
        if name.startswith("offload_") and name not in self.given:
            return None
        return self.resolved.stage == 3 if value == AUTO else value


class DeepSpeedConfig:
    """A config read and checked for this job; its attributes are the keys.

    Raises:
        ConfigError: with every problem at once.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        self._param_dict = dict(read_source(config)[0].tree or {})
        self._world_size = dist.get_world_size() if dist.is_initialized() else 1
        with raising_deepspeed_errors():
            self.resolved: Config = load_config(config, world_size=self._world_size, translate=translate_config)

    def _configure_train_batch_size(self) -> None:
        """Derive, of the three batch sizes, those that a program has set to None."""
        given = {name: getattr(self, name) for name in (TOTAL, MICRO, STEPS)}
        sizes, _, problems = resolve_batch_sizes(replace_by_path(self.resolved, given), self._world_size)
        if given[TOTAL] is None and given[MICRO] is None:
            problems.append(ConfigProblem(TOTAL, None, f"a number of samples, or one for {MICRO}"))
        if problems:
            raise DeepSpeedConfigError(problems)
        vars(self).update({name: sizes[name] for name in given})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "resolved" not in vars(self):
            raise AttributeError(name)
        return getattr(self.resolved, name)
