"""What is wrong with a config, said once and completely.

A reader never stops at the first fault: every part of this room returns ``Problem``
objects, and whoever was called by the user raises them together as one ``ConfigError``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_LISTED = 100  # problems that the message of an error spells out; `problems` holds them all
_SHOWN = 80  # characters of an offending value that a message repeats


@dataclass(frozen=True)
class Problem:
    """One fault: where (dotted ``path``), what stood there, what was expected, the nearest key or value."""

    path: str
    value: Any
    expected: str
    nearest: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        where = self.path or "the config"
        if self.line is not None:
            where += f" (line {self.line})"
        hint = f"; did you mean {self.nearest}?" if self.nearest else ""
        return printable(f"{where} = {show(self.value)}: expected {self.expected}{hint}")


class ConfigError(ValueError):
    """A config that cannot be used; ``problems`` holds every fault found, in the order of the text."""

    def __init__(self, problems: Iterable[Problem], source: str = "") -> None:
        self.problems = tuple(problems)
        self.source = source
        count = len(self.problems)
        lines = [str(problem) for problem in self.problems[:_LISTED]]
        if count > _LISTED:
            lines.append(f"and {count - _LISTED} more")
        head = f"{count} problem{'s' if count != 1 else ''} in the config{f' {source}' if source else ''}:"
        super().__init__(printable("\n  ".join([head, *lines])))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems, self.source)


def show(value: Any) -> str:
    """The value as JSON writes it where it can be written so, cut to one short line."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        try:
            text = repr(value)
        except Exception:  # a foreign object's own __repr__ may fail in any way
            text = f"<{type(value).__name__}>"
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def printable(text: str) -> str:
    """The text without lone surrogates, so that writing it to any stream cannot fail."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def join(*parts: str | int) -> str:
    """A dotted path: ``join("optimizer", "betas", 0)`` is ``optimizer.betas[0]``."""
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


@dataclass(frozen=True)
class UnknownKey(Problem):
    """A key that its block does not have."""

    def __str__(self) -> str:
        where = f" (line {self.line})" if self.line is not None else ""
        hint = f"; did you mean {self.nearest}?" if self.nearest else ""
        return printable(
            f"unknown key {self.path}{where} = {show(self.value)}: expected {self.expected}{hint}"
        )


@dataclass(frozen=True)
class NotBuiltYet(Problem):
    """A switch of later work that is on; ``expected`` says what to do today."""

    def __str__(self) -> str:
        where = f" (line {self.line})" if self.line is not None else ""
        return printable(f"not built yet: {self.path}{where} = {show(self.value)}; {self.expected}")
