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

from thalweg.config.errors import ConfigProblem, join_path

MAX_DEPTH = 64
MAX_VALUES = 20_000
_JSON = json.JSONDecoder()
_BLANK = re.compile(r"(?:\s|//[^\n]*|#[^\n]*|/\*.*?\*/)*", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_KEY = re.compile(r"[^\s,:{}\[\]\"'#]+")
_BARE = re.compile(r"[^\n,:{}\[\]\"'#]+")
_VALUE_END = re.compile(r"[ \t\r]*(?:[\n,}\]#]|//|/\*|\Z)")
_CONSTANTS = {"true": True, "false": False, "null": None, "NaN": float("nan")}
_CONSTANTS |= {"Infinity": float("inf"), "-Infinity": float("-inf")}


@dataclass
class ParsedText:
    """The parsed tree, the line of each dotted path, and the faults of the text itself."""

    tree: Any = None
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[ConfigProblem] = field(default_factory=list)


class _HjsonSyntaxError(Exception):
    pass


def parse(text: str) -> ParsedText:
    """Parse ``text``; a syntax fault ends the reading and is the last of ``problems``."""
    parser = _Parser(text)
    try:
        parser.parsed.tree = parser.parse_root()
    except _HjsonSyntaxError:
        parser.parsed.tree = None
    parser.parsed.problems[:0] = parser.duplicate_problems()
    return parser.parsed


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.pos = 0
        self._num_values = 0
        self.parsed = ParsedText()
        self._lines_by_path: dict[tuple[str | int, ...], list[int]] = {}
        self._last_value: dict[tuple[str | int, ...], Any] = {}
        self._line_cache = (0, 1)  # a position and its line: positions only grow, so lines are counted once

    def parse_root(self) -> Any:
        self._skip_blanks()
        if self.pos == len(self.text):
            self._fail("a config; the text is empty")
        braces = self.text[self.pos] == "{"
        tree = self._parse_value((), 0) if braces or self.text[self.pos] == "[" else self._parse_members((), 0, end="")
        self._skip_blanks()
        if self.pos < len(self.text):
            self._fail("nothing after the end of the config")
        return tree

    def _parse_value(self, path: tuple[str | int, ...], depth: int) -> Any:
        self._num_values += 1
        if depth > MAX_DEPTH or self._num_values > MAX_VALUES:
            self._fail(f"at most {MAX_DEPTH} levels and {MAX_VALUES} values", path[:4])
        head = self.text[self.pos : self.pos + 1]
        if head == "{":
            self.pos += 1
            return self._parse_members(path, depth, end="}")
        if head == "[":
            self.pos += 1
            return self._parse_items(path, depth)
        if head and head in "\"'":
            return self._parse_string(path)
        return self._parse_word(path)

    def _parse_members(self, path: tuple[str | int, ...], depth: int, end: str) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        self._skip_blanks()
        while not self._consume_end(end, path):
            line = self._current_line()
            key = self._parse_key(path)
            key_path = (*path, key)
            self._skip_blanks()
            if self.text[self.pos : self.pos + 1] != ":":
                self._fail(f'":" after the key "{key}"', key_path)
            self.pos += 1
            self._skip_blanks()
            value = self._parse_value(key_path, depth + 1)
            self._record_key(key_path, line, value)
            tree[key] = value
            self._parse_separator(end, path)
        return tree

    def _parse_items(self, path: tuple[str | int, ...], depth: int) -> list[Any]:
        items: list[Any] = []
        self._skip_blanks()
        while not self._consume_end("]", path):
            self.parsed.lines[join_path(*path, len(items))] = self._current_line()
            items.append(self._parse_value((*path, len(items)), depth + 1))
            self._parse_separator("]", path)
        return items

    def _consume_end(self, end: str, path: tuple[str | int, ...]) -> bool:
        if self.pos == len(self.text):
            if end:
                self._fail(f'"{end}" to close what was opened', path)
            return True
        if end and self.text[self.pos] == end:
            self.pos += 1
            return True
        return False

    def _parse_separator(self, end: str, path: tuple[str | int, ...]) -> None:
        """One comma, or a line end in its place; a comma before the closing brace is allowed."""
        new_lines = self._skip_blanks()
        if self.text[self.pos : self.pos + 1] == ",":
            self.pos += 1
            self._skip_blanks()
        elif not new_lines and self.pos < len(self.text) and self.text[self.pos] != end:
            self._fail("a comma or the end of the line", path)

    def _parse_key(self, path: tuple[str | int, ...]) -> str:
        if self.text[self.pos] in "\"'":
            return self._parse_string(path)
        match = _KEY.match(self.text, self.pos)
        if not match:
            self._fail("a key", path)
        self.pos = match.end()
        return match.group()

    def _parse_string(self, path: tuple[str | int, ...]) -> str:
        quote = self.text[self.pos]
        if quote == '"':
            try:
                value, self.pos = _JSON.raw_decode(self.text, self.pos)
            except json.JSONDecodeError as error:
                self._fail(f"a text closed on the same line ({error.msg})", path)
            return value
        for delimiter in ("'''", "'"):
            if self.text.startswith(delimiter, self.pos):
                start = self.pos + len(delimiter)
                stop = self.text.find(delimiter, start)
                if stop < 0 or (delimiter == "'" and "\n" in self.text[start:stop]):
                    self._fail(f"a text closed by {delimiter}", path)
                self.pos = stop + len(delimiter)
                return self.text[start:stop]
        raise AssertionError("called without a quote")

    def _parse_word(self, path: tuple[str | int, ...]) -> Any:
        match = _BARE.match(self.text, self.pos)
        raw = match.group() if match else ""
        word = re.split(r"\s//|/\*", raw, maxsplit=1)[0].rstrip()
        if not word:
            self._fail("a value", path)
        self.pos += len(word)
        if not _VALUE_END.match(self.text, self.pos):
            self._fail("the end of the value; put a text with punctuation in double quotes", path)
        if word in _CONSTANTS:
            return _CONSTANTS[word]
        number = _NUMBER.fullmatch(word)
        if not number:
            return word
        if number.group(1) or number.group(2):
            return float(word)
        return int(word) if len(word) < 400 else float("inf")

    def _record_key(self, path: tuple[str | int, ...], line: int, value: Any) -> None:
        name = join_path(*path)
        self._lines_by_path.setdefault(path, []).append(line)
        self._last_value[path] = value
        self.parsed.lines[name] = line

    def duplicate_problems(self) -> list[ConfigProblem]:
        """One problem for each key given more than once, with all its lines."""
        problems = []
        for path, lines in self._lines_by_path.items():
            if len(lines) > 1:
                line_numbers = " and ".join(map(str, lines[:20])) + (" and more" if len(lines) > 20 else "")
                expected = f"the key once; it is on lines {line_numbers}"
                problems.append(ConfigProblem(join_path(*path), self._last_value[path], expected, None, lines[-1]))
        return sorted(problems, key=lambda problem: problem.line or 0)

    def _skip_blanks(self) -> int:
        """Pass blanks and comments; the number of line ends passed."""
        match = _BLANK.match(self.text, self.pos)
        start, self.pos = self.pos, match.end() if match else self.pos
        if self.text.startswith("/*", self.pos):
            self._fail("the end of a comment: */")
        return self.text.count("\n", start, self.pos)

    def _current_line(self) -> int:
        position, line = self._line_cache
        if self.pos >= position:
            line += self.text.count("\n", position, self.pos)
        else:
            line = self.text.count("\n", 0, self.pos) + 1
        self._line_cache = (self.pos, line)
        return line

    def _fail(self, expected: str, path: tuple[str | int, ...] = ()) -> NoReturn:
        snippet = self.text[self.pos : self.pos + 24].split("\n")[0]
        problem = ConfigProblem(
            join_path(*path), snippet or "the end of the text", expected, None, self._current_line()
        )
        self.parsed.problems.append(problem)
        raise _HjsonSyntaxError
