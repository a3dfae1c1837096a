"""From what the user hands over to a plain tree: a path, text, base64, or a mapping.

The tree holds only dicts with text keys, lists, texts, numbers, booleans and null; whatever
else a mapping may carry (numpy numbers, torch dtypes, paths, enums) is read as its plain form.
"""

from __future__ import annotations

import base64
import binascii
import enum
import math
import numbers
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thalweg.config.expected import near
from thalweg.config.problems import Problem, join, printable, show
from thalweg.config.text import MAX_DEPTH, MAX_VALUES, Document, parse

_MAX_BYTES = 1024 * 1024
_INFINITE_ALLOWED = "steps_per_print"


def read(source: str | os.PathLike[str] | Mapping[str, Any] | None) -> tuple[Document, str]:
    """The document of any source, cleaned, and a short name for messages."""
    if source is None:
        document, label = Document(tree={}), ""
    elif isinstance(source, Mapping):
        document, label = Document(tree=source), ""
    elif isinstance(source, str | os.PathLike):
        document, label = _read_text(source)
    else:
        found = Problem("", source, "a path, a mapping, JSON text, or url-safe base64 of JSON")
        document, label = Document(problems=[found]), ""
    if document.tree is not None:
        _Cleaner(document).run()
    return document, label


def _read_text(source: str | os.PathLike[str]) -> tuple[Document, str]:
    name = os.fspath(source)
    if isinstance(name, bytes):
        name = os.fsdecode(name)
    if isinstance(source, str) and name.lstrip().startswith("{"):
        return (_too_long(len(name)) if len(name) > _MAX_BYTES else parse(name)), "text"
    path = Path(name)
    try:
        if os.path.exists(name):
            return _parse_bytes(_bytes_of(path)), name
    except OSError as error:
        return Document(problems=[Problem("", name, f"a readable file ({error.strerror or error})")]), name
    decoded = _decode(name) if isinstance(source, str) else None
    if decoded is not None:
        return _parse_bytes(decoded), "base64"
    expected = "an existing file, a mapping, or url-safe base64 of JSON"
    return Document(problems=[Problem("", name, expected, _sibling(path))]), ""


def _bytes_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MAX_BYTES + 1)


def _parse_bytes(raw: bytes) -> Document:
    if len(raw) > _MAX_BYTES:
        return _too_long(len(raw))
    try:
        return parse(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        found = Problem("", raw[error.start : error.start + 8], f"UTF-8 text; byte {error.start} is not")
        return Document(problems=[found])


def _too_long(length: int) -> Document:
    return Document(problems=[Problem("", f"{length} bytes", f"at most {_MAX_BYTES} bytes of JSON")])


def _decode(text: str) -> bytes | None:
    body = text.strip().rstrip("=")
    try:
        raw = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    return raw if raw.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{" else None


def _sibling(path: Path) -> str | None:
    try:
        names = [item.name for item in path.parent.iterdir()][:1000]
    except (OSError, ValueError):
        return None
    found = near(path.name, names)
    return str(path.with_name(found)) if found else None


class _Cleaner:
    """Copies the tree in plain types; what has none is reported and left out."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.nodes = 0

    def run(self) -> None:
        tree = self.document.tree
        if not isinstance(tree, Mapping):
            self._report((), tree, "a block { ... } of options")
            self.document.tree = None
            return
        self.document.tree = self._plain(tree, ())

    def _report(self, path: tuple[str | int, ...], value: Any, expected: str) -> Any:
        name = join(*path)
        self.document.problems.append(Problem(name, value, expected, None, self.document.lines.get(name)))
        return _LEAVE_OUT

    def _plain(self, value: Any, path: tuple[str | int, ...]) -> Any:
        self.nodes += 1
        if self.nodes > MAX_VALUES or len(path) > MAX_DEPTH:
            limit = f"at most {MAX_DEPTH} levels and {MAX_VALUES} values"
            return (
                self._report(path[:4], type(value).__name__, limit)
                if self.nodes <= MAX_VALUES + 1
                else _LEAVE_OUT
            )
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, enum.Enum):
            return self._plain(value.value, path)
        if isinstance(value, str):
            return self._text(value, path)
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if isinstance(value, list | tuple):
            items = (self._plain(item, (*path, index)) for index, item in enumerate(value))
            return [item for item in items if item is not _LEAVE_OUT]
        return self._scalar(value, path)

    def _mapping(self, value: Mapping[Any, Any], path: tuple[str | int, ...]) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for key, item in value.items():
            if not isinstance(key, str) or not _encodes(key):
                self._report(
                    (*path, printable(key if isinstance(key, str) else show(key))),
                    item,
                    "a key that is a text",
                )
                continue
            plain = self._plain(item, (*path, str(key)))
            if plain is not _LEAVE_OUT:
                tree[str(key)] = plain
        return tree

    def _text(self, value: str, path: tuple[str | int, ...]) -> Any:
        return str(value) if _encodes(value) else self._report(path, value, "a text of valid Unicode")

    def _scalar(self, value: Any, path: tuple[str | int, ...]) -> Any:
        if isinstance(value, os.PathLike):
            return self._plain(os.fspath(value), path)
        if isinstance(value, numbers.Integral):
            return int(value)
        if isinstance(value, numbers.Real):
            number = float(value)
            if path == (_INFINITE_ALLOWED,) and number == math.inf:
                return None
            if not math.isfinite(number):
                return self._report(path, value, "a finite number")
            return number
        kind = type(value)
        if kind.__module__ == "torch" and kind.__name__ == "dtype":
            return str(value)
        return self._report(path, value, "a value that JSON can hold")


def _encodes(text: str) -> bool:
    return printable(text) == text


_LEAVE_OUT: Any = object()
