"""From tokens to text, as they come, with stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNKNOWN = "\ufffd"  # what a decoder puts in the place of bytes that are no character (yet)
_INCOMPLETE = 3  # bytes that a character may lack its last one of; tokens that they can lie in
_WINDOW = 32  # tokens that are decoded again for each new one, at most


class TextStream:
    """The text of one sequence's output; give it the tokens one by one.

    Text is held back while its last character is incomplete and while its end may be the beginning of a stop
    string.  Once a stop string is found nothing follows it.  An incomplete character has at most three bytes,
    and decoders put one U+FFFD in the place of each or of all: those before the last three stand for bytes
    that never become a character, and go out.

    ``before``: what the output continues.  Its last tokens are decoded with the first ones of the output, as
    many tokenizers drop the space in front of what they decode first.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str],
        *,
        include_stop: bool,
        skip_special: bool,
        before: Sequence[int] = (),
    ) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._include, self._skip = include_stop, skip_special
        self._tokens = list(before[-_INCOMPLETE - 1 :])
        try:
            if self._decode(self._tokens).endswith(_UNKNOWN):
                self._tokens = []  # an incomplete character stays the prompt's
        except (IndexError, TypeError, ValueError):  # tokens that the model has and the tokenizer has not
            self._tokens = []
        self._start = self._sent = 0  # ``_sent``: characters that went out after ``_read``
        self._read = len(self._tokens)
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
        before = len(self._decode(self._tokens[self._start : self._read])) + self._sent
        now = self._decode(self._tokens[self._start :])
        if now.endswith(_UNKNOWN) and not final:
            trailing = len(now) - len(now.rstrip(_UNKNOWN))
            settled = now[: len(now) - min(trailing, _INCOMPLETE)]
            text = settled[before:]
            self._sent += len(text)
            if len(self._tokens) - self._read > _WINDOW:
                text += self._move(now)
            return text
        if len(now) <= before:
            return ""
        # The next call decodes from what is new now: leading spaces depend on what comes before.
        self._start, self._read, self._sent = self._read, len(self._tokens), 0
        return now[before:]

    def _move(self, now: str) -> str:
        """Let the window begin later, at a token that no character reaches into; return what that settles."""
        end = len(self._tokens) - _INCOMPLETE
        for cut in range(end, end - _INCOMPLETE, -1):
            part = self._decode(self._tokens[self._start : cut])
            if not now.startswith(part):  # ``cut`` is within a character
                continue
            went = len(self._decode(self._tokens[self._start : self._read])) + self._sent
            self._start, self._read, self._sent = cut - 1, cut, max(0, went - len(part))
            return part[went:]
        return ""


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that is a beginning of ``stop``."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
