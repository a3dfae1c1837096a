"""From tokens to text, as they come, with stop strings."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

_REPLACEMENT_CHAR = "\ufffd"  # what a decoder puts in the place of bytes that are no character (yet)
_MAX_INCOMPLETE = 3  # bytes that a character may lack its last one of; tokens that they can lie in
_MAX_WINDOW = 32  # tokens that are decoded again for each new one, at most


class IncrementalDetokenizer:
    """The text of one sequence's output; give it the tokens one by one.

    Text is held back while its last character is incomplete and while its end may be the beginning of a stop
    string.  Once a stop string is found nothing follows it.  An incomplete character has at most three bytes,
    and decoders put one U+FFFD in the place of each or of all: those before the last three stand for bytes
    that never become a character, and go out.

    ``prompt_tokens``: what the output continues.  Its last tokens are decoded with the first ones of the output,
    as many tokenizers drop the space in front of what they decode first.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str],
        *,
        include_stop: bool,
        skip_special_tokens: bool,
        prompt_tokens: Sequence[int] = (),
    ) -> None:
        # Without a cleaning up, by which text that has gone out would change with the next token.
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        self._decode: Callable[[Sequence[int]], str] = partial(tokenizer.decode, **options)
        self._stop, self._include_stop = tuple(stop), include_stop
        self._tokens = list(prompt_tokens[-_MAX_INCOMPLETE - 1 :])
        try:
            if self._decode(self._tokens).endswith(_REPLACEMENT_CHAR):
                self._tokens = []  # an incomplete character stays the prompt's
        except (IndexError, TypeError, ValueError):  # tokens that the model has and the tokenizer has not
            self._tokens = []
        self._prefix_offset = self._num_sent_chars = 0  # characters sent after ``_read_offset``
        self._read_offset = len(self._tokens)
        self._pending = ""

    def append(self, token: int, check_stop: bool = True) -> tuple[str, str | None]:
        """Take a token; return new text and, where one has been reached, the stop string.

        ``check_stop``: whether stop strings count yet (they do not before ``min_tokens``).
        """
        self._tokens.append(token)
        self._pending += self._decode_new()
        if not check_stop or not self._stop:
            text, self._pending = self._pending, ""
            return text, None
        matches = [(self._pending.find(stop), stop) for stop in self._stop if stop in self._pending]
        if matches:
            position, stop = min(matches)
            text = self._pending[: position + len(stop) if self._include_stop else position]
            self._pending = ""
            return text, stop
        end = len(self._pending) - max(partial_suffix_length(self._pending, stop) for stop in self._stop)
        text, self._pending = self._pending[:end], self._pending[end:]
        return text, None

    def flush(self) -> str:
        """Return what was held back."""
        text, self._pending = self._pending, ""
        return text + self._decode_new(final=True)

    def _decode_new(self, final: bool = False) -> str:
        """Decode the tokens since the last whole character, next to a few before them."""
        known = self._decode(self._tokens[self._prefix_offset : self._read_offset])
        num_known_chars = len(known) + self._num_sent_chars
        decoded = self._decode(self._tokens[self._prefix_offset :])
        if decoded.endswith(_REPLACEMENT_CHAR) and not final:
            num_incomplete = len(decoded) - len(decoded.rstrip(_REPLACEMENT_CHAR))
            complete = decoded[: len(decoded) - min(num_incomplete, _MAX_INCOMPLETE)]
            text = complete[num_known_chars:]
            self._num_sent_chars += len(text)
            if len(self._tokens) - self._read_offset > _MAX_WINDOW:
                text += self._advance_window(decoded)
            return text
        if len(decoded) <= num_known_chars:
            return ""
        # The next call decodes from what is new now: leading spaces depend on what comes before.
        self._prefix_offset, self._read_offset, self._num_sent_chars = self._read_offset, len(self._tokens), 0
        return decoded[num_known_chars:]

    def _advance_window(self, decoded: str) -> str:
        """Let the window begin later, at a token that no character reaches into; return the text before it."""
        end = len(self._tokens) - _MAX_INCOMPLETE
        for split in range(end, end - _MAX_INCOMPLETE, -1):
            prefix = self._decode(self._tokens[self._prefix_offset : split])
            if not decoded.startswith(prefix):  # ``split`` is within a character
                continue
            num_sent = len(self._decode(self._tokens[self._prefix_offset : self._read_offset])) + self._num_sent_chars
            self._prefix_offset, self._read_offset = split - 1, split
            self._num_sent_chars = max(0, num_sent - len(prefix))
            return prefix[num_sent:]
        return ""


def partial_suffix_length(text: str, word: str) -> int:
    """Return how many characters at the end of ``text`` may begin ``word``."""
    return next((n for n in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:n])), 0)
