"""Calls of tools in what a model writes: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

That is the form that Hermes, Qwen and many others are trained on.  Llama, Mistral, Granite and others write
nothing but the JSON (behind a mark, which often is a special token and so no text), with ``parameters`` for
``arguments``, several in a list or one behind the other.  The parser takes text in pieces, lets through what
is not a call, and holds back what may be the beginning of one.
"""

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from thalweg.config.errors import escape_surrogates
from thalweg.infer.engine.detokenizer import partial_suffix_length

_OPEN_TAG, _CALL_END = "<tool_call>", "</tool_call>|(?=<tool_call>)"  # models forget to close
_PREFIXES = ("<|python_tag|>", "[TOOL_CALLS]", "<|tool_call|>", "functools")
# With which a call in JSON may begin.
_CALL_KEYS = ("name", "type", "function", "arguments", "parameters", "id")
_PARTIAL_CALL = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"arguments"\s*:\s*([\s\S]*)')


def tool_choice_schema(choice: Literal["required"] | dict[str, Any], tools: Sequence[Any]) -> dict[str, Any]:
    """Return the JSON schema of the call that ``tool_choice`` demands.

    ``tools`` have ``name`` and ``parameters``.  Raises ValueError where no such tool was given.
    """
    if isinstance(choice, dict):
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, dict) else None
        tools = [tool for tool in tools if tool.name == name]
        if not tools:
            raise ValueError('tool_choice must be {"type": "function", "function": {"name": one of tools}}')
    if not tools:
        raise ValueError("tool_choice demands a call and tools has none: give some")
    shared_defs: dict[str, Any] = {}
    calls = []
    for tool in tools:
        arguments = _strict_schema(tool.parameters or {"type": "object", "properties": {}})
        for key in ("$defs", "definitions"):  # references to them begin at the root
            for name, schema in dict(arguments.pop(key, {})).items():
                if shared_defs.setdefault(key, {}).setdefault(name, schema) != schema:
                    raise ValueError(f"two tools define {name[:80]} differently: rename one of them")
        calls.append({
            "type": "object", "properties": {"name": {"const": tool.name}, "arguments": arguments},
            "required": ["name", "arguments"], "additionalProperties": False,
        })  # fmt: skip
    return {"anyOf": calls, **shared_defs}


def filter_allowed_tools(choice: dict[str, Any], tools: Sequence[Any]) -> tuple[str, list[Any]]:
    """Return mode and tools of a ``tool_choice`` of type ``allowed_tools``; ValueError where it is none."""
    allowed_tools = choice.get("allowed_tools")
    if not isinstance(allowed_tools, dict):
        allowed_tools = {}
    mode, names = allowed_tools.get("mode"), [one["function"]["name"] for one in allowed_tools.get("tools") or ()]
    matching = [tool for tool in tools if tool.function.name in names]
    if mode not in ("auto", "required") or not matching:
        raise ValueError('allowed_tools must have mode "auto" or "required", and some of the tools')
    return mode, matching


def _strict_schema(parameters: dict[str, Any]) -> dict[str, Any]:
    """A plain list of parameters is all of them, although JSON schema would let a model invent more."""
    plain_keys = {"type", "properties", "required", "title", "description", "$defs", "definitions", "$schema"}
    if "properties" in parameters and parameters.keys() <= plain_keys:
        return {**parameters, "additionalProperties": False}
    return dict(parameters)


class ToolParser:
    """Parts one answer into text and calls; ``bare``: all of it is a call, as :func:`forced` demands.

    ``names`` are the tools': an answer that is nothing but calls of them in JSON needs no tags.
    """

    def __init__(self, forced: bool = False, names: Iterable[str] = ()) -> None:
        self.num_calls = 0
        # Whether the answer ended amid its only call; its arguments are what there is of them.
        self.truncated = False
        self._buffer, self._forced, self._names = "", forced, frozenset(names)
        self._maybe_untagged = bool(self._names)  # all of it so far may be calls without tags

    def feed(self, text: str, final: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """Return the text that is surely none of a call, and the calls that are complete."""
        self._buffer += text
        if self._forced:
            if not final:
                return "", []
            calls = self._parse_calls(self._buffer) or self._parse_partial_call(self._buffer)
            return ("", calls) if calls else (self._buffer, [])
        if self._maybe_untagged and _may_be_calls(self._buffer):
            if not final:
                return "", []
            if calls := self._parse_calls(_strip_prefix(self._buffer), self._names):
                return "", calls
        self._maybe_untagged = False
        return self._parse_tagged(final)

    def _parse_tagged(self, final: bool) -> tuple[str, list[dict[str, Any]]]:
        out, calls = "", []
        while True:
            before, open_tag, rest = self._buffer.partition(_OPEN_TAG)
            end = re.compile(_CALL_END + r"|\Z" * final).search(rest, _json_length(rest, final))
            if not open_tag or end is None:  # what may be, or become, a call is held back
                length = len(before) - (0 if final or open_tag else partial_suffix_length(before, _OPEN_TAG))
                out, self._buffer = out + before[:length], self._buffer[length:]
                return out, calls
            parsed = self._parse_calls(rest[: end.start()])
            # If it is not a call after all, the client sees what the model wrote.
            out += before if parsed else before + open_tag + rest[: end.end()]
            calls += parsed
            self._buffer = rest[end.end() :]

    def _parse_calls(self, body: str, names: frozenset[str] | None = None) -> list[dict[str, Any]]:
        """The calls that ``body`` is, one behind the other or in a list; none where it is anything else."""
        try:
            parsed = [(call["name"], call.get("arguments", call.get("parameters", {}))) for call in _json_objects(body)]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return []
        if not all(isinstance(name, str) and (names is None or name in names) for name, _ in parsed):
            return []
        return [
            self._make_call(name, given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))
            for name, given in parsed
        ]

    def _parse_partial_call(self, body: str) -> list[dict[str, Any]]:
        """The call that ``body`` is the beginning of, where its name is whole."""
        if (match := _PARTIAL_CALL.match(body)) is None:
            return []
        self.truncated = True
        return [self._make_call(match[1], match[2])]

    def _make_call(self, name: str, arguments: str) -> dict[str, Any]:
        self.num_calls += 1
        return {
            "index": self.num_calls - 1,
            "id": secrets.token_hex(5)[:9],  # as long as Mistral's templates want it when it comes back
            "type": "function",
            "function": {"name": escape_surrogates(name), "arguments": escape_surrogates(arguments)},
        }


def _json_objects(text: str) -> list[Any]:
    """The JSON objects of a text that holds nothing else but lists of them, blanks, commas and semicolons."""
    objects, position, decoder = [], 0, json.JSONDecoder()
    while position < len(text):
        if text[position].isspace() or text[position] in ",;":
            position += 1
            continue
        value, position = decoder.raw_decode(text, position)
        objects += value if isinstance(value, list) else [value]
    return [one.get("function", one) if isinstance(one.get("function"), dict) else one for one in objects]


def _json_length(text: str, final: bool) -> int:
    """Of the value that a text begins with, in whose strings a tag is no tag; the whole while it may become a value."""
    value = text.lstrip()
    try:
        return len(text) - len(value) + json.JSONDecoder().raw_decode(value)[1]
    except (ValueError, RecursionError):
        return len(text) if value.startswith(("{", "[")) and not final else 0


def _strip_prefix(text: str) -> str:
    text = text.strip()
    return next((text.removeprefix(mark).lstrip() for mark in _PREFIXES if text.startswith(mark)), text)


def _may_be_calls(text: str) -> bool:
    """Whether an answer that begins so may be nothing but calls in JSON."""
    text = text.lstrip()
    if any(mark.startswith(text) for mark in _PREFIXES):
        return True
    first = re.match(r'(?:\[\s*)?(?:\{\s*)?(?:(?<=[{\s])"(\w*)("?))?', _strip_prefix(text))
    assert first is not None
    if first[1] is None:
        return first.end() == len(_strip_prefix(text))
    return first[1] in _CALL_KEYS if first[2] else any(key.startswith(first[1]) for key in _CALL_KEYS)
