"""What is wrong with a config, said once and completely.

A reader never stops at the first fault: every part of this room returns ``ConfigProblem``
objects, and whoever was called by the user raises them together as one ``ConfigError``.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

_MAX_LISTED = 100  # problems that the message of an error spells out; `problems` holds them all
_MAX_VALUE_CHARS = 80  # characters of an offending value that a message repeats


@dataclass(frozen=True)
class ConfigProblem:
    """One fault: where (dotted ``path``), what stood there, what was expected, the nearest key or value."""

    path: str
    value: Any
    expected: str
    suggestion: str | None = None
    line: int | None = None
    _form: ClassVar[str] = "{where} = {value}: expected {expected}"

    def __str__(self) -> str:
        where = (self.path or "the config") + ("" if self.line is None else f" (line {self.line})")
        text = self._form.format(where=where, value=to_json_snippet(self.value), expected=self.expected)
        return escape_surrogates(text + (f"; did you mean {self.suggestion}?" if self.suggestion else ""))


class ConfigError(ValueError):
    """A config that cannot be used; ``problems`` holds every fault found, in the order of the text."""

    def __init__(self, problems: Iterable[ConfigProblem], source: str = "") -> None:
        self.problems = tuple(problems)
        self.source = source
        count = len(self.problems)
        lines = [str(problem) for problem in self.problems[:_MAX_LISTED]]
        if count > _MAX_LISTED:
            lines.append(f"and {count - _MAX_LISTED} more")
        head = f"{count} problem{'s' if count != 1 else ''} in the config{f' {source}' if source else ''}:"
        super().__init__(escape_surrogates("\n  ".join([head, *lines])))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems, self.source)


def to_json_snippet(value: Any) -> str:
    """The value as JSON writes it where it can be written so, cut to one short line."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        try:
            text = repr(value)
        except Exception:  # a foreign object's own __repr__ may fail in any way
            text = f"<{type(value).__name__}>"
    text = " ".join(text.split())
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."


def escape_surrogates(text: str) -> str:
    """The text without lone surrogates, so that writing it to any stream cannot fail."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def join_path(*keys: str | int) -> str:
    """A dotted path: ``join("optimizer", "betas", 0)`` is ``optimizer.betas[0]``."""
    path = ""
    for key in keys:
        path += f"[{key}]" if isinstance(key, int) else f".{key}" if path else str(key)
    return path


@dataclass(frozen=True)
class UnknownKey(ConfigProblem):
    """A key that its block does not have."""

    _form = "unknown key {where} = {value}: expected {expected}"


@dataclass(frozen=True)
class UnsupportedOption(ConfigProblem):
    """A switch of later work that is on; ``expected`` says what to do today."""

    _form = "not built yet: {where} = {value}; {expected}"


@dataclass(frozen=True)
class OptionNotOffered(UnsupportedOption):
    """A switch that is on of what will not be built; ``expected`` says what to do instead."""

    _form = "not offered: {where} = {value}; {expected}"
