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

from thalweg.infer.engine.sequence import Sequence

_MAX_NGRAM, _MIN_NGRAM = 4, 2  # tokens that must be the same before a guess
MAX_STEP_ROWS = 12  # of a step, guesses included: as many meet the weights at the price of one


class Proposer(Protocol):
    """Guesses what decoding sequences say next; wrong guesses cost time alone."""

    def num_proposals(self, sequence: Sequence, limit: int) -> int:
        """Return how many guesses there will be for a sequence, up to ``most`` (at least 1)."""
        ...

    def propose(self, requests: list[tuple[Sequence, int]], block_tables: np.ndarray) -> list[list[int]]:
        """Return as many guesses as asked for; ``tables`` has the blocks of the tokens and of the guesses."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...


class NgramIndex:
    """Where each run of tokens of one sequence was last followed by another token."""

    def __init__(self) -> None:
        self._next_position: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0
        self.proposed: list[int] = []

    def propose(self, tokens: list[int], count: int) -> list[int]:
        """Return up to ``count`` tokens that may follow."""
        for end in range(max(self._num_indexed, 1), len(tokens)):
            for length in range(_MIN_NGRAM, min(_MAX_NGRAM, end) + 1):
                self._next_position[tuple(tokens[end - length : end])] = end
        self._num_indexed = len(tokens)
        for length in range(min(_MAX_NGRAM, len(tokens)), _MIN_NGRAM - 1, -1):
            start = self._next_position.get(tuple(tokens[-length:]))
            if start is not None:
                proposed = tokens[start : start + count]
                while len(proposed) < count:  # what repeats itself goes on doing so
                    proposed += proposed[: count - len(proposed)]
                return proposed
        return []


class NgramProposer:
    """Guesses by each sequence's own :class:`NgramIndex`."""

    def num_proposals(self, sequence: Sequence, limit: int) -> int:
        """Look up, and keep what was found until it is asked for."""
        if sequence.ngram_index is None:
            sequence.ngram_index = NgramIndex()
        sequence.ngram_index.found = sequence.ngram_index.guess(sequence.tokens, limit)
        return len(sequence.ngram_index.found)

    def propose(self, requests: list[tuple[Sequence, int]], block_tables: np.ndarray) -> list[list[int]]:
        """Return what was found."""
        return [sequence.ngram_index.found[:count] for sequence, count in requests]

    def close(self) -> None:
        """Nothing is held."""
