"""Reading, checking and resolving a ``ds_config.json``; imports no torch."""

from thalweg.config.load import load, load_config
from thalweg.config.problems import ConfigError, UnsupportedOption, ConfigProblem
from thalweg.config.resolve import resolve
from thalweg.config.schema import Config, ModelSize

__all__ = ["Config", "ConfigError", "ModelSize", "UnsupportedOption", "ConfigProblem", "load", "load_config", "resolve"]
