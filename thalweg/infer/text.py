"""From tokens to text, as they come, with stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TextStream:
    """The text of one sequence's output; give it the tokens one by one.

    Text is held back while its last character is incomplete and while its end may be the beginning of a stop
    string.  Once a stop string is found nothing follows it.
    """

    def __init__(
        self, tokenizer: Any, stop: Sequence[str], *, include_stop: bool, skip_special: bool
    ) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._include, self._skip = include_stop, skip_special
        self._tokens: list[int] = []
        self._start = self._read = 0
        self._held = ""

    def push(self, token: int, look: bool = True) -> tuple[str, str | None]:
        """Take a token; return new text and, where one has been reached, the stop string.

        ``look``: whether stop strings count yet (they do not before ``min_tokens``).
        """
        self._tokens.append(token)
        self._held += self._decoded()
        if not look or not self._stop:
            text, self._held = self._held, ""
            return text, None
        found = [(self._held.find(stop), stop) for stop in self._stop if stop in self._held]
        if found:
            at, stop = min(found)
            text = self._held[: at + len(stop) if self._include else at]
            self._held = ""
            return text, stop
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text, None

    def finish(self) -> str:
        """Return what was held back."""
        text, self._held = self._held, ""
        return text + self._decoded(final=True)

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip)

    def _decoded(self, final: bool = False) -> str:
        """Decode the tokens since the last whole character, next to a few before them."""
        before = self._decode(self._tokens[self._start : self._read])
        now = self._decode(self._tokens[self._start :])
        if len(now) <= len(before) or (now.endswith("\ufffd") and not final):
            return ""
        # The next call decodes from what is new now: leading spaces depend on what comes before.
        self._start, self._read = self._read, len(self._tokens)
        return now[len(before) :]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that is a beginning of ``stop``."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
