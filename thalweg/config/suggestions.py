"""Says what an option takes, in words, and which key or value a slip of the pen was near."""

import difflib
from functools import cache
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from thalweg.config.errors import to_json_snippet
from thalweg.config.schema.base import Section, list_options, literal_choices, union_members
from thalweg.config.schema.optimizer import PARAMS_SCHEMAS

_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Any: "any value"}


def describe_type(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    """What an annotation takes, such as ``a whole number, at least 1``."""
    origin = get_origin(annotation)
    is_one = origin is None or origin is Annotated or origin in (dict, tuple, list, Literal)
    options = [annotation] if is_one else get_args(annotation)
    members = [_describe_member(option) for option in options if option not in (NoneType, None)]
    text, words = " or ".join(dict.fromkeys(members)), {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    for item in metadata:
        for name, word in words.items():
            bound = getattr(item, name, None)
            if bound is not None:
                text += f", {word} {bound:g}" if isinstance(bound, float) else f", {word} {bound}"
    if NoneType in union_members(annotation):
        text += ", or null"
    return text


def _describe_member(option: Any) -> str:
    origin = get_origin(option)
    if origin is Annotated:
        inner, *given = get_args(option)
        metadata: list[Any] = []
        for item in given:
            metadata += getattr(item, "metadata", None) or [item]
        return describe_type(inner, metadata)
    if origin is Literal:
        names = [to_json_snippet(value) for value in get_args(option)]
        return names[0] if len(names) == 1 else "one of " + ", ".join(names)
    if origin is tuple:
        items = get_args(option)
        if len(items) == 2 and items[1] is Ellipsis:
            return f"a list, each item {describe_type(items[0])}"
        return f"a list of {len(items)}, each item {describe_type(items[0])}"
    if option is dict or origin is dict or (isinstance(option, type) and issubclass(option, Section)):
        return "a block { ... }"
    return _TYPE_NAMES.get(option, str(option))


def suggest_value(annotation: Any, value: Any) -> str | None:
    """What the user may have meant by a text that stands for another type, or is a near choice."""
    if not isinstance(value, str):
        return None
    string_choices = [choice for choice in literal_choices(annotation) if isinstance(choice, str)]
    if string_choices:
        match = closest_match(value, string_choices)
        return to_json_snippet(match) if match else None
    member_types = set(union_members(annotation))
    if bool in member_types and value.strip().lower() in ("true", "false", "yes", "no", "on", "off"):
        return "true" if value.strip().lower() in ("true", "yes", "on") else "false"
    if member_types & {int, float}:
        try:
            number = float(value)
        except ValueError:
            return None
        is_integral = number.is_integer() and int in member_types
        return f"{int(number) if is_integral else value.strip()}, without quotes"
    return None


def closest_match(name: str, candidates: Any) -> str | None:
    """The candidate nearest to ``name`` (difflib), whatever the case of letters."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    matches = difflib.get_close_matches(name.lower()[:100], by_lower, n=1)
    return by_lower[matches[0]] if matches else None


@cache
def paths_by_key(root: type[Section]) -> dict[str, tuple[str, ...]]:
    """For each key, the dotted paths at which it is known."""
    result: dict[str, list[str]] = {}
    paths = [path for path, _ in list_options(root)]
    for block, table in PARAMS_SCHEMAS.items():
        keys = dict.fromkeys(key for model in table.values() for key in model.model_fields)
        paths += [f"{block}.params.{key}" for key in keys]
    for path in paths:
        result.setdefault(path.rpartition(".")[2], []).append(path)
    return {key: tuple(key_paths) for key, key_paths in result.items()}
