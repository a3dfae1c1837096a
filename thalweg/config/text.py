"""Reads the text of a config: JSON with the habits of hand-written files.

Beyond JSON it takes ``//``, ``#`` and ``/* */`` comments, trailing commas, commas left out
at the end of a line, unquoted keys and one-word values, single quotes and the outer braces
left out (as Hjson does).  What Hjson would read in a surprising way, such as an unquoted
text with a comma in it, is refused.  A key given twice is reported with all its lines; the
line of every path is kept, so that later complaints can name it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, NoReturn

from thalweg.config.problems import Problem, join

MAX_DEPTH = 64
MAX_VALUES = 20_000
_JSON = json.JSONDecoder()
_BLANK = re.compile(r"(?:\s|//[^\n]*|#[^\n]*|/\*.*?\*/)*", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_KEY = re.compile(r"[^\s,:{}\[\]\"'#]+")
_BARE = re.compile(r"[^\n,:{}\[\]\"'#]+")
_ENDS_VALUE = re.compile(r"[ \t\r]*(?:[\n,}\]#]|//|/\*|\Z)")
_WORDS = {"true": True, "false": False, "null": None, "NaN": float("nan")}
_WORDS |= {"Infinity": float("inf"), "-Infinity": float("-inf")}


@dataclass
class Document:
    """The parsed tree, the line of each dotted path, and the faults of the text itself."""

    tree: Any = None
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


class _SyntaxFault(Exception):
    pass


def parse(text: str) -> Document:
    """Parse ``text``; a syntax fault ends the reading and is the last of ``problems``."""
    reader = _Reader(text)
    try:
        reader.document.tree = reader.root()
    except _SyntaxFault:
        reader.document.tree = None
    reader.document.problems[:0] = reader.duplicates()
    return reader.document


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self._num_values = 0
        self.document = Document()
        self._seen: dict[tuple[str | int, ...], list[int]] = {}
        self._last: dict[tuple[str | int, ...], Any] = {}
        self._counted = (0, 1)  # a position and its line: positions only grow, so lines are counted once

    def root(self) -> Any:
        self._skip()
        if self.at == len(self.text):
            self._fault("a config; the text is empty")
        braces = self.text[self.at] == "{"
        tree = self._value((), 0) if braces or self.text[self.at] == "[" else self._members((), 0, end="")
        self._skip()
        if self.at < len(self.text):
            self._fault("nothing after the end of the config")
        return tree

    def _value(self, path: tuple[str | int, ...], depth: int) -> Any:
        self._num_values += 1
        if depth > MAX_DEPTH or self._num_values > MAX_VALUES:
            self._fault(f"at most {MAX_DEPTH} levels and {MAX_VALUES} values", path[:4])
        head = self.text[self.at : self.at + 1]
        if head == "{":
            self.at += 1
            return self._members(path, depth, end="}")
        if head == "[":
            self.at += 1
            return self._items(path, depth)
        if head and head in "\"'":
            return self._string(path)
        return self._word(path)

    def _members(self, path: tuple[str | int, ...], depth: int, end: str) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        self._skip()
        while not self._closed(end, path):
            line = self._line()
            key = self._key(path)
            here = (*path, key)
            self._skip()
            if self.text[self.at : self.at + 1] != ":":
                self._fault(f'":" after the key "{key}"', here)
            self.at += 1
            self._skip()
            value = self._value(here, depth + 1)
            self._note(here, line, value)
            tree[key] = value
            self._separator(end, path)
        return tree

    def _items(self, path: tuple[str | int, ...], depth: int) -> list[Any]:
        items: list[Any] = []
        self._skip()
        while not self._closed("]", path):
            self.document.lines[join(*path, len(items))] = self._line()
            items.append(self._value((*path, len(items)), depth + 1))
            self._separator("]", path)
        return items

    def _closed(self, end: str, path: tuple[str | int, ...]) -> bool:
        if self.at == len(self.text):
            if end:
                self._fault(f'"{end}" to close what was opened', path)
            return True
        if end and self.text[self.at] == end:
            self.at += 1
            return True
        return False

    def _separator(self, end: str, path: tuple[str | int, ...]) -> None:
        """One comma, or a line end in its place; a comma before the closing brace is allowed."""
        new_lines = self._skip()
        if self.text[self.at : self.at + 1] == ",":
            self.at += 1
            self._skip()
        elif not new_lines and self.at < len(self.text) and self.text[self.at] != end:
            self._fault("a comma or the end of the line", path)

    def _key(self, path: tuple[str | int, ...]) -> str:
        if self.text[self.at] in "\"'":
            return self._string(path)
        found = _KEY.match(self.text, self.at)
        if not found:
            self._fault("a key", path)
        self.at = found.end()
        return found.group()

    def _string(self, path: tuple[str | int, ...]) -> str:
        quote = self.text[self.at]
        if quote == '"':
            try:
                value, self.at = _JSON.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                self._fault(f"a text closed on the same line ({error.msg})", path)
            return value
        for mark in ("'''", "'"):
            if self.text.startswith(mark, self.at):
                start = self.at + len(mark)
                stop = self.text.find(mark, start)
                if stop < 0 or (mark == "'" and "\n" in self.text[start:stop]):
                    self._fault(f"a text closed by {mark}", path)
                self.at = stop + len(mark)
                return self.text[start:stop]
        raise AssertionError("called without a quote")

    def _word(self, path: tuple[str | int, ...]) -> Any:
        found = _BARE.match(self.text, self.at)
        raw = found.group() if found else ""
        word = re.split(r"\s//|/\*", raw, maxsplit=1)[0].rstrip()
        if not word:
            self._fault("a value", path)
        self.at += len(word)
        if not _ENDS_VALUE.match(self.text, self.at):
            self._fault("the end of the value; put a text with punctuation in double quotes", path)
        if word in _WORDS:
            return _WORDS[word]
        number = _NUMBER.fullmatch(word)
        if not number:
            return word
        if number.group(1) or number.group(2):
            return float(word)
        return int(word) if len(word) < 400 else float("inf")

    def _note(self, path: tuple[str | int, ...], line: int, value: Any) -> None:
        name = join(*path)
        self._seen.setdefault(path, []).append(line)
        self._last[path] = value
        self.document.lines[name] = line

    def duplicates(self) -> list[Problem]:
        """One problem for each key given more than once, with all its lines."""
        found = []
        for path, lines in self._seen.items():
            if len(lines) > 1:
                said = " and ".join(map(str, lines[:20])) + (" and more" if len(lines) > 20 else "")
                expected = f"the key once; it is on lines {said}"
                found.append(Problem(join(*path), self._last[path], expected, None, lines[-1]))
        return sorted(found, key=lambda problem: problem.line or 0)

    def _skip(self) -> int:
        """Pass blanks and comments; the number of line ends passed."""
        found = _BLANK.match(self.text, self.at)
        start, self.at = self.at, found.end() if found else self.at
        if self.text.startswith("/*", self.at):
            self._fault("the end of a comment: */")
        return self.text.count("\n", start, self.at)

    def _line(self) -> int:
        position, line = self._counted
        if self.at >= position:
            line += self.text.count("\n", position, self.at)
        else:
            line = self.text.count("\n", 0, self.at) + 1
        self._counted = (self.at, line)
        return line

    def _fault(self, expected: str, path: tuple[str | int, ...] = ()) -> NoReturn:
        found = self.text[self.at : self.at + 24].split("\n")[0]
        problem = Problem(join(*path), found or "the end of the text", expected, None, self._line())
        self.document.problems.append(problem)
        raise _SyntaxFault
