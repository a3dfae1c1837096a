"""Reads a config and checks it whole: every fault is found before anything is raised.

``load``     source -> Config, with each ``"auto"`` still in place
``load_config``  the same and ``resolve``: what ``initialize`` calls

Phases: read the source into a plain tree; move older spellings to today's; validate the tree
against the schema; cut out what is wrong and validate the rest, so that the rules between
options can still be judged; raise all problems together, in the order of the text.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from thalweg.config.check import find_conflicts, find_not_built
from thalweg.config.expected import expected, homes, near, nearest_value
from thalweg.config.older import Renames, modernise
from thalweg.config.problems import ConfigError, Problem, UnknownKey, join
from thalweg.config.resolve import find_batch_problems, resolve_all
from thalweg.config.schema import Config, ModelFacts, Provenance
from thalweg.config.schema_base import AUTO, Section, alternatives, plain, section_of
from thalweg.config.schema_optim import (
    OPTIMIZERS,
    UNUSABLE_OPTIMIZERS,
    params_of,
    proper_name,
)
from thalweg.config.schema_schedules import SCHEDULES, UNUSABLE_SCHEDULES
from thalweg.config.source import read

Source = str | os.PathLike[str] | Mapping[str, Any] | None
_HINTS = 100  # faults for which the nearest key is looked up, which takes a millisecond each
_AUTO_TYPES = {"optimizer": "AdamW", "scheduler": "WarmupLR"}
_TABLES = {"optimizer": OPTIMIZERS, "scheduler": SCHEDULES}


@dataclass
class Draft:
    """A config as far as it could be read: ``config`` leaves out what ``problems`` name."""

    config: Config = field(default_factory=Config)
    problems: list[Problem] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)
    renames: Renames = field(default_factory=Renames)
    label: str = ""

    @property
    def bad_paths(self) -> tuple[str, ...]:
        """The options whose values are unknown, in today's spelling."""
        paths = (
            problem.path.partition("[")[0] for problem in self.problems if type(problem) is not UnknownKey
        )
        return tuple(dict.fromkeys(self.renames.today(path) for path in paths))

    def finish(self, more: Iterable[Problem]) -> None:
        """Raise every problem, the draft's own and ``more``, if there is any."""
        own = [self._placed(problem) for problem in self.problems]
        seen = {problem.path for problem in own}
        own += [p for p in (self._placed(problem) for problem in more) if p.path not in seen]
        if own:
            raise ConfigError(sorted(own, key=lambda p: p.line or 0), self.label)

    def _placed(self, problem: Problem) -> Problem:
        path = self.renames.given(problem.path)
        line = problem.line
        at = path
        while line is None and at:
            line = self.lines.get(at)
            at = at.rpartition(".")[0]
        return dataclasses.replace(problem, path=path, line=line)


def load(source: Source = None, *, world_size: int | None = None) -> Config:
    """Read and check a config; ``"auto"`` stays in place.

    ``source``: a path to JSON (comments allowed), a mapping, JSON text, url-safe base64 of JSON,
    or ``None`` for the defaults.  With ``world_size`` the batch equation is checked as well.
    Raises ``ConfigError``, whose ``problems`` are all faults at once.
    """
    draft = draft_of(source)
    more = list(find_conflicts(draft.config, draft.bad_paths))
    if world_size is not None:
        more += find_batch_problems(draft.config, world_size, draft.bad_paths)
    if draft.problems or more:
        more += find_not_built(draft.config, draft.bad_paths)
    draft.finish(more)
    return draft.config


def load_config(
    source: Source = None, *, world_size: int | None = None, model: ModelFacts | None = None
) -> Config:
    """``load`` and ``resolve`` in one, with the problems of both in one ``ConfigError``.

    ``world_size`` is the number of ranks in all (1 if not given).
    """
    draft = draft_of(source)
    config, more = resolve_all(draft.config, 1 if world_size is None else world_size, model, draft.bad_paths)
    draft.finish(more)
    return config


def draft_of(source: Source) -> Draft:
    """Read as much of a config as can be read, with all faults of reading and of the schema."""
    if isinstance(source, Config):
        return Draft(config=source)
    document, label = read(source)
    draft = Draft(problems=document.problems, lines=document.lines, label=label)
    if document.tree is None:
        return draft
    tree, draft.renames, faults = modernise(document.tree)
    draft.problems += faults
    given = frozenset(_leaves(tree))
    filled = tuple(
        (f"{block}.type", "asked for without a name") for block in _TABLES if _type_of(tree, block) == AUTO
    )
    draft.problems += _check_params(tree)
    config = _validated(tree, draft.problems)
    config._provenance = Provenance(given=given, filled=filled, notes=draft.renames.notes())
    draft.config = config
    return draft


def _validated(tree: dict[str, Any], problems: list[Problem]) -> Config:
    """The config of what is right in ``tree``; what is wrong is cut out of it and reported."""
    for _ in range(4):
        try:
            return Config.model_validate(tree)
        except ValidationError as error:
            faults = error.errors(include_url=False, include_context=False)
        known = {problem.path for problem in problems}
        found = [_problem(fault, hint=number < _HINTS) for number, fault in enumerate(faults)]
        problems += {problem.path: problem for problem in found if problem.path not in known}.values()
        for fault in faults:
            _cut(tree, fault["loc"])
    raise AssertionError(f"a tree without its faults must validate: {problems}")


def _problem(fault: Any, hint: bool) -> Problem:
    """A fault of pydantic's in our words; ``loc`` may end in names of union members, which are dropped."""
    annotation: Any = Config
    metadata: Any = ()
    path: list[str | int] = []
    for part in fault["loc"]:
        section = section_of(annotation)
        if section and isinstance(part, str):
            option = section.model_fields.get(part)
            if option is None:
                return _unknown_key(section, join(*path), part, fault["input"], hint=hint)
            annotation, metadata = option.annotation, option.metadata
        else:
            inner = _item_of(annotation, part)
            if inner is None:
                break
            annotation, metadata = inner, ()
        path.append(part)
    value = fault["input"]
    return Problem(join(*path), value, expected(annotation, metadata), nearest_value(annotation, value))


def _item_of(annotation: Any, part: str | int) -> Any:
    for option in alternatives(annotation):
        origin, arguments = get_origin(option), get_args(option)
        if isinstance(part, str) and origin is dict:
            return arguments[1]
        if isinstance(part, int) and origin is tuple:
            return arguments[0]
    return None


def _unknown_key(
    section: type[Section], block: str, key: str, value: Any, places: str = "", hint: bool = True
) -> Problem:
    path = join(block, key) if block else key
    close = near(key, section.model_fields) if hint else None
    elsewhere = [place for place in homes(Config).get(key, ()) if place != path][:3]
    text = f"one of the keys of {block or 'the top level'}{places}"
    if elsewhere:
        text += f" ({key} is known as {', '.join(elsewhere)})"
    return UnknownKey(path, value, text, close or (elsewhere[0] if len(elsewhere) == 1 else None))


def _cut(tree: Any, loc: tuple[str | int, ...]) -> None:
    """Remove the innermost key on the way of ``loc`` that is there."""
    holder, name = None, None
    for part in loc:
        if not isinstance(tree, dict) or part not in tree:
            break
        holder, name, tree = tree, part, tree[part]
    if holder is not None:
        del holder[name]


def _check_params(tree: dict[str, Any]) -> list[Problem]:
    """Check type and parameters of ``optimizer`` and ``scheduler``; ``tree`` gets the checked values."""
    problems: list[Problem] = []
    for block in ("optimizer", "scheduler"):
        kind = _type_of(tree, block)
        if not isinstance(kind, str):
            continue
        section = tree[block]
        name = _AUTO_TYPES[block] if kind == AUTO else proper_name(block, kind)
        if name is None:
            problems.append(_unknown_type(block, kind))
            tree.pop(block)
            name = near(kind, _TABLES[block])
            if name is None:
                continue
        section["type"] = name
        params = section.get("params")
        if params is None:
            section.pop("params", None)
        elif isinstance(params, dict):
            section["params"] = _checked_params(block, name, params, problems)
    return problems


def _type_of(tree: dict[str, Any], block: str) -> Any:
    section = tree.get(block)
    return section.get("type") if isinstance(section, dict) else None


def _checked_params(block: str, name: str, params: dict[str, Any], problems: list[Problem]) -> dict[str, Any]:
    model = params_of(block, name)
    assert model is not None
    try:
        checked = model.model_validate(params)
    except ValidationError as error:
        known = {problem.path for problem in problems}
        for number, fault in enumerate(error.errors(include_url=False, include_context=False)):
            key = str(fault["loc"][0])
            option = model.model_fields.get(key)
            path = f"{block}.params.{key}"
            params.pop(key, None)
            if option is None:
                problem = _unknown_key(
                    model, f"{block}.params", key, fault["input"], f" of {name}", number < _HINTS
                )
            else:
                value = fault["input"]
                hint = nearest_value(option.annotation, value)
                problem = Problem(path, value, expected(option.annotation, option.metadata), hint)
            if path not in known:
                problems.append(problem)
                known.add(path)
        checked = model.model_validate(params)
    return {key: plain(getattr(checked, key)) for key in params}


def _unknown_type(block: str, kind: str) -> Problem:
    unusable = UNUSABLE_OPTIMIZERS if block == "optimizer" else UNUSABLE_SCHEDULES
    reason = next((why for name, why in unusable.items() if name.lower() == kind.lower()), None)
    if reason:
        return Problem(f"{block}.type", kind, f"another type: {kind} {reason}")
    names = ", ".join(_TABLES[block])
    other = "; any other can be built by you and handed to initialize"
    return Problem(f"{block}.type", kind, f"one of {names}{other}", near(kind, _TABLES[block]))


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterable[str]:
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from _leaves(value, path + ".")
        else:
            yield path
