"""Says what an option takes, in words, and which key or value a slip of the pen was near."""

from __future__ import annotations

import difflib
from functools import cache
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from thalweg.config.problems import show
from thalweg.config.schema_base import Section, alternatives, choices, options
from thalweg.config.schema_optim import OPTIMIZERS
from thalweg.config.schema_schedules import SCHEDULES

_CLOSE = 0.6
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Any: "any value"}


def expected(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    """What an annotation takes, such as ``a whole number, at least 1``."""
    parts = [_one(option) for option in _unions(annotation) if option is not NoneType and option is not None]
    text = _bounded(" or ".join(dict.fromkeys(parts)), metadata)
    if NoneType in alternatives(annotation):
        text += ", or null"
    return text


def _unions(annotation: Any) -> list[Any]:
    origin = get_origin(annotation)
    if origin is None or origin is Annotated or origin in (dict, tuple, list, Literal):
        return [annotation]
    return list(get_args(annotation))


def _one(option: Any) -> str:
    origin = get_origin(option)
    if origin is Annotated:
        inner, *metadata = get_args(option)
        return expected(inner, _flatten(metadata))
    if origin is Literal:
        names = [show(value) for value in get_args(option)]
        return names[0] if len(names) == 1 else "one of " + ", ".join(names)
    if origin is tuple:
        items = get_args(option)
        if len(items) == 2 and items[1] is Ellipsis:
            return f"a list, each item {expected(items[0])}"
        return f"a list of {len(items)}, each item {expected(items[0])}"
    if option is dict or origin is dict or (isinstance(option, type) and issubclass(option, Section)):
        return "a block { ... }"
    return _WORDS.get(option, str(option))


def _flatten(metadata: list[Any]) -> list[Any]:
    flat: list[Any] = []
    for item in metadata:
        flat += getattr(item, "metadata", None) or [item]
    return flat


def _bounded(text: str, metadata: list[Any] | tuple[Any, ...]) -> str:
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    for item in metadata:
        for name, word in words.items():
            bound = getattr(item, name, None)
            if bound is not None:
                text += f", {word} {bound:g}" if isinstance(bound, float) else f", {word} {bound}"
    return text


def nearest_value(annotation: Any, value: Any) -> str | None:
    """What the user may have meant by a text that stands for another type, or is a near choice."""
    if not isinstance(value, str):
        return None
    names = [choice for choice in choices(annotation) if isinstance(choice, str)]
    if names:
        found = near(value, names)
        return show(found) if found else None
    kinds = set(alternatives(annotation))
    if bool in kinds and value.strip().lower() in ("true", "false", "yes", "no", "on", "off"):
        return "true" if value.strip().lower() in ("true", "yes", "on") else "false"
    if kinds & {int, float}:
        try:
            number = float(value)
        except ValueError:
            return None
        whole = number.is_integer() and int in kinds
        return f"{int(number) if whole else value.strip()}, without quotes"
    return None


def near(word: str, names: Any) -> str | None:
    """The name nearest to ``word`` (difflib), whatever the case of letters."""
    by_lower = {name.lower(): name for name in names}
    found = difflib.get_close_matches(word.lower()[:100], by_lower, n=1, cutoff=_CLOSE)
    return by_lower[found[0]] if found else None


@cache
def homes(root: type[Section]) -> dict[str, tuple[str, ...]]:
    """For each key, the dotted paths at which it is known."""
    found: dict[str, list[str]] = {}
    paths = [path for path, _ in options(root)]
    for block, table in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULES)):
        keys = dict.fromkeys(key for model in table.values() for key in model.model_fields)
        paths += [f"{block}.params.{key}" for key in keys]
    for path in paths:
        found.setdefault(path.rpartition(".")[2], []).append(path)
    return {key: tuple(places) for key, places in found.items()}
