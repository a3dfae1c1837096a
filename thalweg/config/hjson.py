"""Reads the text of a config: JSON with the habits of hand-written files.

Beyond JSON it takes ``//``, ``#`` and ``/* */`` comments, trailing commas, commas left out
at the end of a line, unquoted keys and one-word values, single quotes and the outer braces
left out (as Hjson does).  What Hjson would read in a surprising way, such as an unquoted
text with a comma in it, is refused.  A key given twice is reported with all its lines; the
line of every path is kept, so that later complaints can name it.
"""

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
    """Holds the one :class:`ConfigProblem` that ends the reading."""


def parse(text: str) -> ParsedText:
    """Parse ``text``; a syntax fault ends the reading and is the last of ``problems``."""
    parser, faults = _Parser(text), []
    try:
        parser.parsed.tree = parser.parse_root()
    except _HjsonSyntaxError as error:
        faults = [*error.args]
    parser.parsed.problems = sorted(parser.parsed.problems, key=lambda problem: problem.line or 0) + faults
    return parser.parsed


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.pos, self.parsed = text, 0, ParsedText()
        self._path: list[str | int] = []  # of the value at hand
        self._num_values = 0
        self._line_cache = (0, 1)  # a position and its line: positions only grow, so lines are counted once

    def parse_root(self) -> Any:
        self._skip_blanks()
        if self.pos == len(self.text):
            self._fail("a config; the text is empty")
        tree = self._parse_value() if self.text[self.pos] in "{[" else self._parse_block("")
        self._skip_blanks()
        if self.pos < len(self.text):
            self._fail("nothing after the end of the config")
        return tree

    def _parse_value(self) -> Any:
        self._num_values += 1
        if len(self._path) > MAX_DEPTH or self._num_values > MAX_VALUES:
            del self._path[4:]
            self._fail(f"at most {MAX_DEPTH} levels and {MAX_VALUES} values")
        head = self._peek()
        if head and head in "{[":
            self.pos += 1
            return self._parse_block("}" if head == "{" else "]")
        return self._parse_string() if head and head in "\"'" else self._parse_word()

    def _parse_block(self, end: str) -> Any:
        """The members of a block, or the items of a list (``end`` is "]"); without ``end`` to the end of the text."""
        values: dict[Any, Any] = {}
        lines: dict[Any, list[int]] = {}
        path = tuple(self._path)
        self._skip_blanks()
        try:
            while not self._consume_end(end):
                line = self._current_line()
                key = len(values) if end == "]" else self._parse_key()
                self._path.append(key)
                if end != "]":
                    self._skip_blanks()
                    if self._peek() != ":":
                        self._fail(f'":" after the key "{key}"')
                    self.pos += 1
                    self._skip_blanks()
                self.parsed.lines[join_path(*self._path)] = line
                values[key] = self._parse_value()
                lines.setdefault(key, []).append(line)
                self._path.pop()
                self._parse_separator(end)
        finally:
            for repeated, numbers in lines.items():  # a key given more than once, with all its lines
                if len(numbers) > 1:
                    told = " and ".join(map(str, numbers[:20])) + (" and more" if len(numbers) > 20 else "")
                    where, expected = join_path(*path, repeated), f"the key once; it is on lines {told}"
                    problem = ConfigProblem(where, values[repeated], expected, None, numbers[-1])
                    self.parsed.problems.append(problem)
        return list(values.values()) if end == "]" else values

    def _peek(self) -> str:
        return self.text[self.pos : self.pos + 1]

    def _consume_end(self, end: str) -> bool:
        if self.pos == len(self.text) and end:
            self._fail(f'"{end}" to close what was opened')
        is_end = self._peek() == end
        self.pos += len(end) * is_end
        return is_end

    def _parse_separator(self, end: str) -> None:
        """One comma, or a line end in its place; a comma before the closing brace is allowed."""
        new_lines = self._skip_blanks()
        if self._peek() == ",":
            self.pos += 1
            self._skip_blanks()
        elif not new_lines and self.pos < len(self.text) and self._peek() != end:
            self._fail("a comma or the end of the line")

    def _parse_key(self) -> str:
        if self._peek() in "\"'":
            return self._parse_string()
        match = _KEY.match(self.text, self.pos)
        if not match:
            self._fail("a key")
        self.pos = match.end()
        return match.group()

    def _parse_string(self) -> str:
        if self._peek() == '"':
            try:
                value, self.pos = _JSON.raw_decode(self.text, self.pos)
            except json.JSONDecodeError as error:
                self._fail(f"a text closed on the same line ({error.msg})")
            return value
        delimiter = "'''" if self.text.startswith("'''", self.pos) else "'"
        start = self.pos + len(delimiter)
        stop = self.text.find(delimiter, start)
        if stop < 0 or (delimiter == "'" and "\n" in self.text[start:stop]):
            self._fail(f"a text closed by {delimiter}")
        self.pos = stop + len(delimiter)
        return self.text[start:stop]

    def _parse_word(self) -> Any:
        match = _BARE.match(self.text, self.pos)
        raw = match.group() if match else ""
        word = re.split(r"\s//|/\*", raw, maxsplit=1)[0].rstrip()
        if not word:
            self._fail("a value")
        self.pos += len(word)
        if not _VALUE_END.match(self.text, self.pos):
            self._fail("the end of the value; put a text with punctuation in double quotes")
        number = _NUMBER.fullmatch(word)
        if word in _CONSTANTS or not number:
            return _CONSTANTS.get(word, word)
        if number.group(1) or number.group(2):
            return float(word)
        return int(word) if len(word) < 400 else float("inf")

    def _skip_blanks(self) -> int:
        """Pass blanks and comments; the number of line ends passed."""
        match = _BLANK.match(self.text, self.pos)
        start, self.pos = self.pos, match.end() if match else self.pos
        if self.text.startswith("/*", self.pos):
            self._path.clear()
            self._fail("the end of a comment: */")
        return self.text.count("\n", start, self.pos)

    def _current_line(self) -> int:
        position, line = self._line_cache
        self._line_cache = (self.pos, line + self.text.count("\n", position, self.pos))
        return self._line_cache[1]

    def _fail(self, expected: str) -> NoReturn:
        snippet = self.text[self.pos : self.pos + 24].split("\n")[0] or "the end of the text"
        raise _HjsonSyntaxError(ConfigProblem(join_path(*self._path), snippet, expected, None, self._current_line()))
