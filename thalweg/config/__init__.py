"""Reading, checking and resolving a ``ds_config.json``; imports no torch."""

from thalweg.config.load import load, load_config
from thalweg.config.problems import ConfigError, NotBuiltYet, Problem
from thalweg.config.resolve import resolve
from thalweg.config.schema import Config, ModelFacts

__all__ = ["Config", "ConfigError", "ModelFacts", "NotBuiltYet", "Problem", "load", "load_config", "resolve"]
