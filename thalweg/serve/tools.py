"""Calls of tools in what a model writes: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

That is the form that Hermes, Qwen and many others are trained on.  The parser takes text in pieces, lets
through what is not a call, and holds back what may be the beginning of one.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any, Literal

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


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
        arguments: dict[str, Any] = dict(tool.parameters or {"type": "object"})
        for key in ("$defs", "definitions"):  # references to them begin at the root
            for name, schema in dict(arguments.pop(key, {})).items():
                if shared.setdefault(key, {}).setdefault(name, schema) != schema:
                    raise ValueError(f"two tools define {name[:80]} differently: rename one of them")
        calls.append({
            "type": "object", "properties": {"name": {"const": tool.name}, "arguments": arguments},
            "required": ["name", "arguments"], "additionalProperties": False,
        })  # fmt: skip
    return {"anyOf": calls, **shared}


class ToolParser:
    """Parts one answer into text and calls; ``bare``: all of it is a call, as :func:`forced` demands."""

    def __init__(self, bare: bool = False) -> None:
        self.num_calls = 0
        self._held, self._bare = "", bare

    def feed(self, text: str, last: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """Return the text that is surely none of a call, and the calls that are complete."""
        self._held += text
        out, calls = "", []
        if self._bare:
            if not last:
                return "", []
            call = self._read(self._held)
            return (self._held, []) if call is None else ("", [call])
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
            call = self._read(body)
            out += self._held[:start]
            if call is None:  # not a call after all: the client sees what the model wrote
                out += self._held[start : stop + len(_CLOSE)]
            else:
                calls.append(call)
            self._held = after

    def _read(self, body: str) -> dict[str, Any] | None:
        try:
            fields = json.loads(body)
            name, arguments = fields["name"], fields.get("arguments", fields.get("parameters", {}))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        if not isinstance(name, str):
            return None
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        self.num_calls += 1
        return {
            "index": self.num_calls - 1,
            "id": f"call_{secrets.token_hex(8)}",
            "type": "function",
            "function": {"name": name, "arguments": text},
        }


def _overlap(text: str, word: str) -> int:
    """How many characters at the end of ``text`` may begin ``word``."""
    return next((n for n in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:n])), 0)
