"""Guesses by a smaller model with the same vocabulary (Leviathan et al. 2023; Chen et al. 2023).

The draft's keys and values lie in a cache of its own that is cut as the large model's: the same block
numbers, the same tables, so the scheduler knows of one cache only.  How far a sequence's tokens are in it is
the sequence's ``drafted``; what is missing (a whole prompt at first, a token or two later) is computed before
the first guess, then each guess takes one step of the draft for all sequences together.

The draft draws as the large model will, with the same number in [0, 1) for a position (``sampler.py``):
guesses are right far more often than by chance, and a right one is what would have been drawn anyway.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from thalweg.infer.batch import Batch, Runner, Span
from thalweg.infer.sampler import draw_ahead
from thalweg.infer.sequence import Sequence


class Draft:
    """Guesses by ``runner``, which takes ``max_tokens`` at a time, among the model's ``vocab`` tokens.

    ``known``: how many tokens the draft has; others, of a model whose table is longer, are shown to it as 0.
    """

    def __init__(self, runner: Runner, *, max_tokens: int, vocab: int, known: int) -> None:
        self._runner, self._max_tokens, self._vocab, self._known = runner, max_tokens, vocab, known

    def count(self, sequence: Sequence, most: int) -> int:
        """As many as may be."""
        return most

    def guess(self, asked: list[tuple[Sequence, int]], tables: np.ndarray) -> list[list[int]]:
        """Run the draft once for each guess, all sequences together."""
        for sequence, _ in asked:
            self._runner.tables[sequence.slot] = tables[sequence.slot]
            sequence.drafted = min(sequence.drafted, len(sequence.tokens) - 1)
        rows = self._catch_up([sequence for sequence, _ in asked])
        guesses: list[list[int]] = [[] for _ in asked]
        going = list(range(len(asked)))
        while going:
            for place, row in zip(going, rows, strict=True):
                sequence = asked[place][0]
                guesses[place].append(draw_ahead(row[: self._vocab], sequence, len(guesses[place])))
            going = [place for place in going if len(guesses[place]) < asked[place][1]]
            if going:
                spans = [
                    Span(asked[p][0].slot, len(asked[p][0].tokens) + len(guesses[p]) - 1, 1) for p in going
                ]
                rows = self._runner.run(Batch([guesses[p][-1] for p in going], spans, range(len(going))))
        for (sequence, count), found in zip(asked, guesses, strict=True):
            assert len(found) == count
            sequence.drafted = len(sequence.tokens) + count - 1
        return guesses

    def _catch_up(self, sequences: list[Sequence]) -> list[Tensor]:
        """Compute what is missing of each sequence; return the logits of their last tokens."""
        last: dict[int, Tensor] = {}
        batch = Batch([], [], [])
        rows: list[int] = []
        for number, sequence in enumerate(sequences):
            while sequence.drafted < len(sequence.tokens):
                room = self._max_tokens - len(batch.tokens)
                part = sequence.tokens[sequence.drafted : sequence.drafted + room]
                batch.spans.append(Span(sequence.slot, sequence.drafted, len(part)))
                batch.tokens += part if max(part) < self._known else [t * (t < self._known) for t in part]
                sequence.drafted += len(part)
                if sequence.drafted == len(sequence.tokens):
                    rows.append(number)
                    batch.rows = [*batch.rows, len(batch.tokens) - 1]
                if len(batch.tokens) == self._max_tokens:
                    last |= self._run(batch, rows)
                    batch, rows = Batch([], [], []), []
        if batch.tokens:
            last |= self._run(batch, rows)
        return [last[number] for number in range(len(sequences))]

    def _run(self, batch: Batch, rows: list[int]) -> dict[int, Tensor]:
        logits = self._runner.run(batch)
        return {number: logits[at].clone() for at, number in enumerate(rows)}

    def close(self) -> None:
        """Free the draft."""
        self._runner.close()
