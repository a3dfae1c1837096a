"""Guesses at what a sequence says next, looked up in what it has said (prompt lookup, Saxena 2023).

A step computes a decoding sequence's token together with a few guesses that follow it.  The sampler then
goes through their logits in order: what it would have drawn is the next token, guess or not, and as long as
it was the guess the logits behind it are good as well.  A draw depends on seed, sample and length alone, so
the output is the same with guesses as without, drawn ones included; only the number of steps is less.
"""

from __future__ import annotations

from thalweg.infer.sequence import Sequence

_LONGEST, _SHORTEST = 4, 2  # tokens that must be the same before a guess
_ROWS = 12  # of a step, guesses included: as many meet the weights at the price of one


class Lookup:
    """Where each run of tokens of one sequence was last followed by another token."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._seen = 0
        self.trust = 1 << 30
        """Guesses that seem worth while: one more than the last ones that were right."""

    def guess(self, tokens: list[int], count: int) -> list[int]:
        """Return up to ``count`` tokens that may follow."""
        for end in range(max(self._seen, 1), len(tokens)):
            for length in range(_SHORTEST, min(_LONGEST, end) + 1):
                self._after[tuple(tokens[end - length : end])] = end
        self._seen = len(tokens)
        for length in range(min(_LONGEST, len(tokens)), _SHORTEST - 1, -1):
            start = self._after.get(tuple(tokens[-length:]))
            if start is not None:
                found = tokens[start : start + count]
                while len(found) < count:  # what repeats itself goes on doing so
                    found += found[: count - len(found)]
                return found
        return []


def propose(sequence: Sequence, most: int, rows: int) -> list[int]:
    """Return guesses for a decoding sequence in a step that has ``rows`` rows so far."""
    if sequence.lookup is None:
        sequence.lookup = Lookup()
    room = sequence.limit - len(sequence.tokens) - 1
    count = min(most, sequence.lookup.trust, room, _ROWS - rows)
    return sequence.lookup.guess(sequence.tokens, count) if count > 0 else []
