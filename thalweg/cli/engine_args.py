"""The engine's options on the command line, derived from the one declaration in ``infer/config.py``.

``max_num_seqs`` is ``--max-num-seqs`` (and ``--max-batch``, its other name); an option that is on by default has a
``--no-...``; sizes are written as 4GiB; a mapping is NAME=DIR, once for each entry.
"""

import argparse
import importlib.util
from typing import Any

from thalweg.infer.config import EngineConfig, EngineOption, engine_options
from thalweg.utils.formatting import parse_bytes
from thalweg.utils.hub import check_model_path


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each option of the engine, with its other names."""
    group = parser.add_argument_group("the engine")
    for option in engine_options():
        group.add_argument(*option_flags(option), dest=option.name, **_argument(option))
    group.add_argument("--loader", help=argparse.SUPPRESS)  # module:function that makes the engine; tests


def option_flags(option: EngineOption) -> list[str]:
    """Return an option's flags, its own name first."""
    prefix = "--no-" if option.default is True else "--"
    return [prefix + name.replace("_", "-") for name in (option.name, *option.aliases)]


def _argument(option: EngineOption) -> dict[str, Any]:
    """Return the other arguments of ``add_argument``."""
    help = option.help.replace("%", "%%")
    if option.value_type is bool and option.default is None:
        return {"action": argparse.BooleanOptionalAction, "default": None, "help": help}
    if option.value_type is bool:
        action = "store_false" if option.default else "store_true"
        return {"action": action, "help": f"do not {help}" if option.default else help}
    if option.value_type is dict:
        return {"action": "append", "default": [], "metavar": option.metavar, "help": f"{help}; may be repeated"}
    shared: dict[str, Any] = {"default": option.default, "help": help}
    if option.default is not None:
        shared["help"] += " (default: %(default)s)"
    if option.choices is not None:
        return {**shared, "choices": [choice for choice in option.choices if choice is not None]}
    if option.is_size:
        return {**shared, "metavar": "SIZE"}
    return {**shared, "type": option.value_type, "metavar": option.metavar}


def build_engine_config(args: argparse.Namespace) -> EngineConfig:
    """Return the config that the flags ask for; ValueError where a value is wrong."""
    values = {option.name: getattr(args, option.name) for option in engine_options()}
    for option in engine_options():
        value = values[option.name]
        if option.is_size and isinstance(value, str):
            values[option.name] = parse_bytes(value, option_flags(option)[0])
        elif option.value_type is dict:
            values[option.name] = _parse_pairs(option_flags(option)[0], value)
    return EngineConfig(**values)


def build_engine_spec(args: argparse.Namespace) -> Any:
    """Return the model and the config of the arguments; raises where the model cannot be one."""
    from thalweg.serve.replicas.launcher import LOADER, EngineSpec

    if args.loader is None and importlib.util.find_spec("transformers") is None:
        raise ImportError("transformers is not installed: pip install 'thalweg[serve]'")
    for model in [args.model, args.draft_model] if args.loader is None else []:
        if model is not None:
            check_model_path(model)
    return EngineSpec(args.model, build_engine_config(args), args.loader or LOADER)


def _parse_pairs(flag: str, values: list[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in values:
        name, _, folder = text.partition("=")
        if not name or not folder or name in pairs:
            raise ValueError(f"{flag} {text}: write NAME=DIR, each name once")
        pairs[name] = folder
    return pairs
