"""Reads a config and checks all of it: every fault is found before anything is raised.

``load``     source -> Config, with each ``"auto"`` still in place
``load_config``  the same and ``resolve``: what ``initialize`` calls

Phases: read the source into a plain tree; move older spellings to today's; validate the tree
against the schema; cut out what is wrong and validate the rest, so that the rules between
options can still be judged; raise all problems together, in the order of the text.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from thalweg.config.aliases import KeyAliases, apply_key_aliases
from thalweg.config.errors import ConfigError, ConfigProblem, UnknownKey, join_path
from thalweg.config.reader import read_source
from thalweg.config.resolve import try_resolve
from thalweg.config.rules import find_rule_violations, find_unsupported
from thalweg.config.schema import Config, ModelSize, Provenance
from thalweg.config.schema.base import AUTO, Section, get_section_type, to_jsonable, union_members
from thalweg.config.schema.optimizer import PARAMS_SCHEMAS, canonical_name, get_params_schema
from thalweg.config.schema.unsupported import UNUSABLE_TYPES
from thalweg.config.suggestions import closest_match, describe_type, paths_by_key, suggest_value

ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | None
Translation = Callable[[dict[str, Any]], dict[str, Any]]
_MAX_HINTS = 100  # faults for which the nearest key is looked up, which takes a millisecond each
_DEFAULT_TYPES = {"optimizer": "AdamW", "scheduler": "WarmupLR"}


@dataclass
class PartialConfig:
    """A config as far as it could be read: ``config`` leaves out what ``problems`` name."""

    config: Config = field(default_factory=Config)
    problems: list[ConfigProblem] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)
    aliases: KeyAliases = field(default_factory=KeyAliases)
    label: str = ""

    @property
    def invalid_paths(self) -> tuple[str, ...]:
        """The options whose values are unknown, in today's spelling."""
        paths = (problem.path.partition("[")[0] for problem in self.problems if type(problem) is not UnknownKey)
        return tuple(dict.fromkeys(self.aliases.to_schema_path(path) for path in paths))

    def raise_if_any(self, more: Iterable[ConfigProblem]) -> None:
        """Raise every problem, its own and ``more``, if there is any."""
        all_problems = [self._locate(problem) for problem in self.problems]
        known_paths = {problem.path for problem in all_problems}
        all_problems += [p for p in (self._locate(problem) for problem in more) if p.path not in known_paths]
        if all_problems:
            raise ConfigError(sorted(all_problems, key=lambda p: p.line or 0), self.label)

    def _locate(self, problem: ConfigProblem) -> ConfigProblem:
        path = self.aliases.to_user_path(problem.path)
        line = problem.line
        ancestor = path
        while line is None and ancestor:
            line = self.lines.get(ancestor)
            ancestor = ancestor.rpartition(".")[0]
        return dataclasses.replace(problem, path=path, line=line)


def load(source: ConfigSource = None, *, translate: Translation | None = None) -> Config:
    """Read and check a config; ``"auto"`` stays in place.

    ``source``: a path to JSON (comments allowed), a mapping, JSON text, url-safe base64 of JSON,
    or ``None`` for the defaults.
    ``translate`` makes the plain tree that was read into the one that is checked.
    Raises ``ConfigError``, whose ``problems`` are all faults at once.
    """
    partial = read_partial_config(source, translate)
    more = list(find_rule_violations(partial.config, partial.invalid_paths))
    if partial.problems or more:
        more += find_unsupported(partial.config, partial.invalid_paths)
    partial.raise_if_any(more)
    return partial.config


def load_config(
    source: ConfigSource = None,
    *,
    world_size: int | None = None,
    model: ModelSize | None = None,
    translate: Translation | None = None,
) -> Config:
    """``load`` and ``resolve`` in one, with the problems of both in one ``ConfigError``.

    ``world_size`` is the number of ranks in all (1 if not given).
    """
    partial = read_partial_config(source, translate)
    config, more = try_resolve(partial.config, 1 if world_size is None else world_size, model, partial.invalid_paths)
    partial.raise_if_any(more)
    return config


def read_partial_config(source: ConfigSource, translate: Translation | None = None) -> PartialConfig:
    """Read as much of a config as can be read, with all faults of reading and of the schema."""
    if isinstance(source, Config):
        return PartialConfig(config=source)
    parsed, label = read_source(source)
    partial = PartialConfig(problems=parsed.problems, lines=parsed.lines, label=label)
    if parsed.tree is None:
        return partial
    tree, partial.aliases, alias_problems = apply_key_aliases(translate(parsed.tree) if translate else parsed.tree)
    partial.problems += alias_problems
    user_set = frozenset(_leaf_paths(tree))
    unnamed = [block for block in PARAMS_SCHEMAS if _get_type(tree, block) == AUTO]
    derived = tuple((f"{block}.type", "asked for without a name") for block in unnamed)
    partial.problems += _validate_params_blocks(tree)
    config = _validate(tree, partial.problems)
    config._provenance = Provenance(user_set=user_set, derived=derived, renamed=partial.aliases.describe())
    partial.config = config
    return partial


def _validate(tree: dict[str, Any], problems: list[ConfigProblem]) -> Config:
    """The config of what is right in ``tree``; what is wrong is cut out of it and reported."""
    for _ in range(4):
        try:
            return Config.model_validate(tree)
        except ValidationError as error:
            faults: list[Any] = error.errors(include_url=False, include_context=False)
        _report_faults(faults, problems)
        for fault in faults:  # the innermost key on the way to it that is there
            node, parent, name = tree, None, ""
            for key in fault["loc"]:
                if not isinstance(node, dict) or key not in node:
                    break
                parent, name, node = node, key, node[key]
            if parent is not None:
                del parent[name]
    raise AssertionError(f"a tree without its faults must validate: {problems}")


def _report_faults(
    faults: Sequence[Any],
    problems: list[ConfigProblem],
    root: type[Section] = Config,
    block: str = "",
    context: str = "",
) -> None:
    """Add the faults of ``root``, which stands at ``block``, one for each path, in our words."""

    def to_problem(fault: Any, hint: bool) -> ConfigProblem:
        annotation: Any = root
        metadata: Any = ()
        value, path = fault["input"], [block] if block else []
        for key in fault["loc"]:  # it may end in names of union members, which are dropped
            section = get_section_type(annotation)
            if section and isinstance(key, str):
                option = section.model_fields.get(key)
                if option is None:
                    return unknown_key(section, join_path(*path), key, value, hint)
                annotation, metadata = option.annotation, option.metadata
            else:
                inner = _item_type(annotation, key)
                if inner is None:
                    break
                annotation, metadata = inner, ()
            path.append(key)
        described = describe_type(annotation, metadata)
        return ConfigProblem(join_path(*path), value, described, suggest_value(annotation, value))

    def unknown_key(section: type[Section], at: str, key: str, value: Any, hint: bool) -> ConfigProblem:
        path = join_path(at, key) if at else key
        suggestion = closest_match(key, section.model_fields) if hint else None
        others = [other for other in paths_by_key(Config).get(key, ()) if other != path][:3]
        text = f"one of the keys of {at or 'the top level'}{context}"
        if others:
            text += f" ({key} is known as {', '.join(others)})"
        likely = [other for other in others if other.startswith("optimizer.")] or others
        return UnknownKey(path, value, text, suggestion or (likely[0] if len(likely) == 1 else None))

    known_paths = {problem.path for problem in problems}
    for number, fault in enumerate(faults):
        problem = to_problem(fault, hint=number < _MAX_HINTS)
        if problem.path not in known_paths:
            known_paths.add(problem.path)
            problems.append(problem)


def _item_type(annotation: Any, key: str | int) -> Any:
    for option in union_members(annotation):
        origin, arguments = get_origin(option), get_args(option)
        if isinstance(key, str) and origin is dict:
            return arguments[1]
        if isinstance(key, int) and origin is tuple:
            return arguments[0]
    return None


def _validate_params_blocks(tree: dict[str, Any]) -> list[ConfigProblem]:
    """Check type and parameters of ``optimizer`` and ``scheduler``; ``tree`` gets the checked values."""
    problems: list[ConfigProblem] = []
    for block in ("optimizer", "scheduler"):
        type_name = _get_type(tree, block)
        if not isinstance(type_name, str):
            continue
        section = tree[block]
        name = _DEFAULT_TYPES[block] if type_name == AUTO else canonical_name(block, type_name)
        if name is None:
            tree.pop(block)
            name = closest_match(type_name, PARAMS_SCHEMAS[block])
            unusable = UNUSABLE_TYPES[block].items()
            if reason := next((why for other, why in unusable if other.lower() == type_name.lower()), None):
                problem = ConfigProblem(f"{block}.type", type_name, f"another type: {type_name} {reason}")
            else:
                known = ", ".join(PARAMS_SCHEMAS[block])
                expected = f"one of {known}; any other can be built by you and handed to initialize"
                problem = ConfigProblem(f"{block}.type", type_name, expected, name)
            problems.append(problem)
            if name is None:
                continue
        section["type"] = name
        params = section.get("params")
        if params is None:
            section.pop("params", None)
        elif isinstance(params, dict):
            section["params"] = _validate_params(block, name, params, problems)
    return problems


def _get_type(tree: dict[str, Any], block: str) -> Any:
    section = tree.get(block)
    return section.get("type") if isinstance(section, dict) else None


def _validate_params(block: str, name: str, params: dict[str, Any], problems: list[ConfigProblem]) -> dict[str, Any]:
    model = get_params_schema(block, name)
    assert model is not None
    try:
        checked = model.model_validate(params)
    except ValidationError as error:
        # A parameter is wrong as a whole, whichever of its items is.
        faults = [{**one, "loc": one["loc"][:1]} for one in error.errors(include_url=False, include_context=False)]
        _report_faults(faults, problems, model, f"{block}.params", f" of {name}")
        for fault in faults:
            params.pop(str(fault["loc"][0]), None)
        checked = model.model_validate(params)
    return {key: to_jsonable(getattr(checked, key)) for key in params}


def _leaf_paths(tree: Mapping[str, Any], prefix: str = "") -> Iterable[str]:
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from _leaf_paths(value, path + ".")
        else:
            yield path
