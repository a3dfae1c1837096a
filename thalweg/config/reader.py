"""From what the user hands over to a plain tree: a path, text, base64, or a mapping.

The tree holds only dicts with text keys, lists, texts, numbers, booleans and null; whatever
else a mapping may carry (numpy numbers, torch dtypes, paths, enums) is read as its plain form.
"""

import base64
import binascii
import enum
import math
import numbers
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thalweg.config.errors import ConfigProblem, escape_surrogates, join_path, to_json_snippet
from thalweg.config.hjson import MAX_DEPTH, MAX_VALUES, ParsedText, parse
from thalweg.config.suggestions import closest_match

_MAX_BYTES = 1024 * 1024
_INFINITE_ALLOWED_KEY = "steps_per_print"
_COMMENT_KEYS = ("_comment", "//", "#")  # as people write remarks into JSON


def read_source(source: str | os.PathLike[str] | Mapping[str, Any] | None) -> tuple[ParsedText, str]:
    """The document of any source, cleaned, and a short name for messages."""
    if source is None or isinstance(source, Mapping):
        parsed, label = ParsedText(tree={} if source is None else source), ""
    elif isinstance(source, str | os.PathLike):
        parsed, label = _read_text(source)
    else:
        problem = ConfigProblem("", source, "a path, a mapping, JSON text, or url-safe base64 of JSON")
        parsed, label = ParsedText(problems=[problem]), ""
    if isinstance(parsed.tree, Mapping):
        parsed.tree = _PlainTypeConverter(parsed).to_plain(parsed.tree, ())
    elif parsed.tree is not None:
        parsed.problems.append(ConfigProblem("", parsed.tree, "a block { ... } of options"))
        parsed.tree = None
    return parsed, label


def _read_text(source: str | os.PathLike[str]) -> tuple[ParsedText, str]:
    name = os.fsdecode(source)
    if isinstance(source, str) and name.lstrip().startswith("{"):
        return (_too_long_error(len(name)) if len(name) > _MAX_BYTES else parse(name)), "text"
    path = Path(name)
    try:
        if os.path.exists(name):
            with path.open("rb") as file:
                return _parse_bytes(file.read(_MAX_BYTES + 1)), name
    except OSError as error:
        return ParsedText(problems=[ConfigProblem("", name, f"a readable file ({error.strerror or error})")]), name
    decoded = _decode_base64(name) if isinstance(source, str) else None
    if decoded is not None:
        return _parse_bytes(decoded), "base64"
    expected = "an existing file, a mapping, or url-safe base64 of JSON"
    return ParsedText(problems=[ConfigProblem("", name, expected, _similar_filename(path))]), ""


def _parse_bytes(raw: bytes) -> ParsedText:
    if len(raw) > _MAX_BYTES:
        return _too_long_error(len(raw))
    try:
        return parse(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        problem = ConfigProblem("", raw[error.start : error.start + 8], f"UTF-8 text; byte {error.start} is not")
        return ParsedText(problems=[problem])


def _too_long_error(length: int) -> ParsedText:
    return ParsedText(problems=[ConfigProblem("", f"{length} bytes", f"at most {_MAX_BYTES} bytes of JSON")])


def _decode_base64(text: str) -> bytes | None:
    body = text.strip().rstrip("=")
    try:
        raw = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    return raw if raw.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{" else None


def _similar_filename(path: Path) -> str | None:
    try:
        names = [item.name for item in path.parent.iterdir()][:1000]
    except (OSError, ValueError):
        return None
    match = closest_match(path.name, names)
    return str(path.with_name(match)) if match else None


class _PlainTypeConverter:
    """Copies the tree in plain types; what has none is reported and left out."""

    def __init__(self, parsed: ParsedText) -> None:
        self.parsed, self.num_nodes = parsed, 0

    def _add_problem(self, path: tuple[str | int, ...], value: Any, expected: str) -> Any:
        name = join_path(*path)
        self.parsed.problems.append(ConfigProblem(name, value, expected, None, self.parsed.lines.get(name)))
        return _SKIP

    def to_plain(self, value: Any, path: tuple[str | int, ...]) -> Any:
        """The value in plain types, or ``_SKIP``."""
        self.num_nodes += 1
        if self.num_nodes > MAX_VALUES or len(path) > MAX_DEPTH:
            if self.num_nodes > MAX_VALUES + 1:  # which has been told
                return _SKIP
            return self._add_problem(
                path[:4], type(value).__name__, f"at most {MAX_DEPTH} levels and {MAX_VALUES} values"
            )
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, enum.Enum):
            return self.to_plain(value.value, path)
        if isinstance(value, str):
            valid = _is_valid_unicode(value)
            return str(value) if valid else self._add_problem(path, value, "a text of valid Unicode")
        if isinstance(value, Mapping):
            return self._mapping_to_plain(value, path)
        if isinstance(value, list | tuple):
            items = (self.to_plain(item, (*path, index)) for index, item in enumerate(value))
            return [item for item in items if item is not _SKIP]
        if isinstance(value, os.PathLike):
            return self.to_plain(os.fspath(value), path)
        if isinstance(value, numbers.Integral):
            return int(value)
        if isinstance(value, numbers.Real):
            number = float(value)
            if math.isfinite(number):
                return number
            never = path == (_INFINITE_ALLOWED_KEY,) and number == math.inf
            return None if never else self._add_problem(path, value, "a finite number")
        if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
            return str(value)
        return self._add_problem(path, value, "a value that JSON can hold")

    def _mapping_to_plain(self, value: Mapping[Any, Any], path: tuple[str | int, ...]) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for key, item in value.items():
            if not isinstance(key, str) or not _is_valid_unicode(key):
                name = escape_surrogates(key if isinstance(key, str) else to_json_snippet(key))
                self._add_problem((*path, name), item, "a key that is a text")
            elif key.startswith(_COMMENT_KEYS):
                continue
            elif (converted := self.to_plain(item, (*path, str(key)))) is not _SKIP:
                tree[str(key)] = converted
        return tree


def _is_valid_unicode(text: str) -> bool:
    return escape_surrogates(text) == text


_SKIP: Any = object()
