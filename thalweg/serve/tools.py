"""Calls of tools in what a model writes: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

That is the form that Hermes, Qwen and many others are trained on.  Llama, Mistral, Granite and others write
nothing but the JSON (behind a mark, which often is a special token and so no text), with ``parameters`` for
``arguments``, several in a list or one behind the other.  The parser takes text in pieces, lets through what
is not a call, and holds back what may be the beginning of one.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, Literal

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MARKS = ("<|python_tag|>", "[TOOL_CALLS]", "<|tool_call|>", "functools")
_KEYS = ("name", "type", "function", "arguments", "parameters", "id")
"""With which a call in JSON may begin."""
_BEGUN = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"arguments"\s*:\s*([\s\S]*)')


def forced(
    choice: Literal["none", "auto", "required"] | dict[str, Any] | None, tools: Sequence[Any]
) -> dict[str, Any] | None:
    """Return the JSON schema of the call that ``tool_choice`` demands, or None where it demands none.

    ``tools`` have ``name`` and ``parameters``.  Raises ValueError where no such tool was given.
    """
    if choice in (None, "none", "auto"):
        return None
    if isinstance(choice, dict):
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, dict) else None
        tools = [tool for tool in tools if tool.name == name]
        if not tools:
            raise ValueError('tool_choice must be {"type": "function", "function": {"name": one of tools}}')
    if not tools:
        raise ValueError("tool_choice demands a call and tools has none: give some")
    shared: dict[str, Any] = {}
    calls = []
    for tool in tools:
        arguments = _closed(tool.parameters or {"type": "object", "properties": {}})
        for key in ("$defs", "definitions"):  # references to them begin at the root
            for name, schema in dict(arguments.pop(key, {})).items():
                if shared.setdefault(key, {}).setdefault(name, schema) != schema:
                    raise ValueError(f"two tools define {name[:80]} differently: rename one of them")
        calls.append({
            "type": "object", "properties": {"name": {"const": tool.name}, "arguments": arguments},
            "required": ["name", "arguments"], "additionalProperties": False,
        })  # fmt: skip
    return {"anyOf": calls, **shared}


def allowed(choice: dict[str, Any], tools: Sequence[Any]) -> tuple[str, list[Any]]:
    """Return mode and tools of a ``tool_choice`` of type ``allowed_tools``; ValueError where it is none."""
    given = choice.get("allowed_tools")
    mode, named = (given.get("mode"), given.get("tools")) if isinstance(given, dict) else (None, None)
    names = [one["function"]["name"] for one in named or ()]
    kept = [tool for tool in tools if tool.function.name in names]
    if mode not in ("auto", "required") or not kept:
        raise ValueError('allowed_tools must have mode "auto" or "required", and some of the tools')
    return mode, kept


def _closed(parameters: dict[str, Any]) -> dict[str, Any]:
    """A plain list of parameters is all of them, although JSON schema would let a model invent more."""
    plain = {"type", "properties", "required", "title", "description", "$defs", "definitions", "$schema"}
    if "properties" in parameters and parameters.keys() <= plain:
        return {**parameters, "additionalProperties": False}
    return dict(parameters)


class ToolParser:
    """Parts one answer into text and calls; ``bare``: all of it is a call, as :func:`forced` demands.

    ``names`` are the tools': an answer that is nothing but calls of them in JSON needs no tags.
    """

    def __init__(self, bare: bool = False, names: Iterable[str] = ()) -> None:
        self.num_calls = 0
        self.cut = False
        """Whether the answer ended amid its only call; its arguments are what there is of them."""
        self._held, self._bare, self._names = "", bare, frozenset(names)
        self._untagged = bool(self._names)  # all of it so far may be calls without tags

    def feed(self, text: str, last: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """Return the text that is surely none of a call, and the calls that are complete."""
        self._held += text
        if self._bare:
            if not last:
                return "", []
            calls = self._read(self._held) or self._begun(self._held)
            return ("", calls) if calls else (self._held, [])
        if self._untagged and _may_be_calls(self._held):
            if not last:
                return "", []
            if calls := self._read(_unmarked(self._held), self._names):
                return "", calls
        self._untagged = False
        return self._tagged(last)

    def _tagged(self, last: bool) -> tuple[str, list[dict[str, Any]]]:
        out, calls = "", []
        while True:
            start = self._held.find(_OPEN)
            if start < 0:
                keep = 0 if last else _overlap(self._held, _OPEN)
                cut = len(self._held) - keep
                out, self._held = out + self._held[:cut], self._held[cut:]
                return out, calls
            end = self._held.find(_CLOSE, start)
            if end < 0 and not last:
                out, self._held = out + self._held[:start], self._held[start:]
                return out, calls
            stop = end if end >= 0 else len(self._held)
            body, after = self._held[start + len(_OPEN) : stop], self._held[stop + len(_CLOSE) :]
            found = self._read(body)
            out += self._held[:start]
            if not found:  # not a call after all: the client sees what the model wrote
                out += self._held[start : stop + len(_CLOSE)]
            calls += found
            self._held = after

    def _read(self, body: str, names: frozenset[str] | None = None) -> list[dict[str, Any]]:
        """The calls that ``body`` is, one behind the other or in a list; none where it is anything else."""
        try:
            found = [(call["name"], _arguments(call)) for call in _objects(body)]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return []
        if not all(isinstance(name, str) and (names is None or name in names) for name, _ in found):
            return []
        return [
            self._call(name, given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))
            for name, given in found
        ]

    def _begun(self, body: str) -> list[dict[str, Any]]:
        """The call that ``body`` is the beginning of, where its name is whole."""
        if (begun := _BEGUN.match(body)) is None:
            return []
        self.cut = True
        return [self._call(begun[1], begun[2])]

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        self.num_calls += 1
        return {
            "index": self.num_calls - 1,
            "id": f"call_{secrets.token_hex(8)}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }


def _objects(text: str) -> list[Any]:
    """The JSON objects of a text that holds nothing else but lists of them, blanks, commas and semicolons."""
    found, at, decoder = [], 0, json.JSONDecoder()
    while at < len(text):
        if text[at].isspace() or text[at] in ",;":
            at += 1
            continue
        value, at = decoder.raw_decode(text, at)
        found += value if isinstance(value, list) else [value]
    return [one.get("function", one) if isinstance(one.get("function"), dict) else one for one in found]


def _arguments(call: dict[str, Any]) -> Any:
    return call.get("arguments", call.get("parameters", {}))


def _unmarked(text: str) -> str:
    text = text.strip()
    return next((text.removeprefix(mark).lstrip() for mark in _MARKS if text.startswith(mark)), text)


def _may_be_calls(text: str) -> bool:
    """Whether an answer that begins so may be nothing but calls in JSON."""
    text = text.lstrip()
    if any(mark.startswith(text) for mark in _MARKS):
        return True
    first = re.match(r'(?:\[\s*)?(?:\{\s*)?(?:(?<=[{\s])"(\w*)("?))?', _unmarked(text))
    assert first is not None
    if first[1] is None:
        return first.end() == len(_unmarked(text))
    return first[1] in _KEYS if first[2] else any(key.startswith(first[1]) for key in _KEYS)


def _overlap(text: str, word: str) -> int:
    """How many characters at the end of ``text`` may begin ``word``."""
    return next((n for n in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:n])), 0)
