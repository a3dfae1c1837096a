"""Guesses at what a sequence says next: looked up in what it has said (prompt lookup, Saxena 2023), or by a
smaller model (``draft.py``).

A step computes a decoding sequence's token together with a few guesses that follow it.  The sampler then
goes through their logits in order: what it would have drawn is the next token, guess or not, and as long as
it was the guess the logits behind it are good as well.  A draw depends on seed, sample and length alone, so
the output is the same with guesses as without, drawn ones included; only the number of steps is less.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from thalweg.infer.sequence import Sequence

_LONGEST, _SHORTEST = 4, 2  # tokens that must be the same before a guess
ROWS = 12  # of a step, guesses included: as many meet the weights at the price of one


class Guesser(Protocol):
    """Guesses what decoding sequences say next; wrong guesses cost time alone."""

    def count(self, sequence: Sequence, most: int) -> int:
        """Return how many guesses there will be for a sequence, up to ``most`` (at least 1)."""
        ...

    def guess(self, asked: list[tuple[Sequence, int]], tables: np.ndarray) -> list[list[int]]:
        """Return as many guesses as asked for; ``tables`` has the blocks of the tokens and of the guesses."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...


class Lookup:
    """Where each run of tokens of one sequence was last followed by another token."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._seen = 0
        self.found: list[int] = []

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


class Lookups:
    """Guesses by each sequence's own :class:`Lookup`."""

    def count(self, sequence: Sequence, most: int) -> int:
        """Look up, and keep what was found until it is asked for."""
        if sequence.lookup is None:
            sequence.lookup = Lookup()
        sequence.lookup.found = sequence.lookup.guess(sequence.tokens, most)
        return len(sequence.lookup.found)

    def guess(self, asked: list[tuple[Sequence, int]], tables: np.ndarray) -> list[list[int]]:
        """Return what was found."""
        return [sequence.lookup.found[:count] for sequence, count in asked]

    def close(self) -> None:
        """Nothing is held."""
