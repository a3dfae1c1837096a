"""Reading, checking and resolving a ``ds_config.json``; imports no torch."""

from thalweg.config.errors import ConfigError, ConfigProblem, UnsupportedOption
from thalweg.config.load import load, load_config
from thalweg.config.resolve import resolve
from thalweg.config.schema import Config, ModelSize

__all__ = ["Config", "ConfigError", "ConfigProblem", "ModelSize", "UnsupportedOption", "load", "load_config", "resolve"]
