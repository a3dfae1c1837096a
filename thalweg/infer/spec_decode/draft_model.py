"""Guesses by a smaller model with the same vocabulary (Leviathan et al. 2023; Chen et al. 2023).

The draft's keys and values lie in a cache of its own that is cut as the large model's: the same block
numbers, the same tables, so the scheduler knows of one cache only.  How far a sequence's tokens are in it is
the sequence's ``num_draft_computed``; what is missing (a whole prompt at first, a token or two later) is computed before
the first guess, then each guess takes one step of the draft for all sequences together.

The draft draws as the large model will, with the same number in [0, 1) for a position (``sampler.py``):
guesses are right far more often than by chance, and a right one is what would have been drawn anyway.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from thalweg.infer.engine.sampler import sample_draft_token
from thalweg.infer.engine.sequence import Sequence
from thalweg.infer.runners.base import ModelInput, ModelRunner, QuerySpan


class DraftModelProposer:
    """Guesses by ``runner``, which takes ``max_tokens`` at a time, among the model's ``vocab`` tokens.

    ``known``: how many tokens the draft has; others, of a model whose table is longer, are shown to it as 0.
    """

    def __init__(
        self, runner: ModelRunner, *, max_num_batched_tokens: int, vocab_size: int, draft_vocab_size: int
    ) -> None:
        self._runner, self._max_num_batched_tokens, self._vocab_size, self._draft_vocab_size = (
            runner,
            max_num_batched_tokens,
            vocab_size,
            draft_vocab_size,
        )

    def num_proposals(self, sequence: Sequence, limit: int) -> int:
        """As many as may be."""
        return limit

    def propose(self, requests: list[tuple[Sequence, int]], block_tables: np.ndarray) -> list[list[int]]:
        """Run the draft once for each guess, all sequences together."""
        for sequence, _ in requests:
            self._runner.block_tables[sequence.slot] = block_tables[sequence.slot]
            sequence.num_draft_computed = min(sequence.num_draft_computed, len(sequence.tokens) - 1)
        rows = self._prefill_missing([sequence for sequence, _ in requests])
        proposals: list[list[int]] = [[] for _ in requests]
        active = list(range(len(requests)))
        while active:
            for index, row in zip(active, rows, strict=True):
                sequence = requests[index][0]
                proposals[index].append(sample_draft_token(row[: self._vocab_size], sequence, len(proposals[index])))
            active = [place for place in active if len(proposals[place]) < requests[place][1]]
            if active:
                spans = [
                    QuerySpan(requests[p][0].slot, len(requests[p][0].tokens) + len(proposals[p]) - 1, 1)
                    for p in active
                ]
                rows = self._runner.run(ModelInput([proposals[p][-1] for p in active], spans, range(len(active))))
        for (sequence, count), proposed in zip(requests, proposals, strict=True):
            assert len(proposed) == count
            sequence.num_draft_computed = len(sequence.tokens) + count - 1
        return proposals

    def _prefill_missing(self, sequences: list[Sequence]) -> list[Tensor]:
        """Compute what is missing of each sequence; return the logits of their last tokens."""
        last_logits: dict[int, Tensor] = {}
        batch = ModelInput([], [], [])
        sequence_indices: list[int] = []
        for number, sequence in enumerate(sequences):
            while sequence.num_draft_computed < len(sequence.tokens):
                remaining = self._max_num_batched_tokens - len(batch.tokens)
                chunk = sequence.tokens[sequence.num_draft_computed : sequence.num_draft_computed + remaining]
                batch.spans.append(QuerySpan(sequence.slot, sequence.num_draft_computed, len(chunk)))
                batch.tokens += (
                    chunk if max(chunk) < self._draft_vocab_size else [t * (t < self._draft_vocab_size) for t in chunk]
                )
                sequence.num_draft_computed += len(chunk)
                if sequence.num_draft_computed == len(sequence.tokens):
                    sequence_indices.append(number)
                    batch.logit_indices = [*batch.logit_indices, len(batch.tokens) - 1]
                if len(batch.tokens) == self._max_num_batched_tokens:
                    last_logits |= self._run(batch, sequence_indices)
                    batch, sequence_indices = ModelInput([], [], []), []
        if batch.tokens:
            last_logits |= self._run(batch, sequence_indices)
        return [last_logits[number] for number in range(len(sequences))]

    def _run(self, batch: ModelInput, sequence_indices: list[int]) -> dict[int, Tensor]:
        logits = self._runner.run(batch)
        return {number: logits[at].clone() for at, number in enumerate(sequence_indices)}

    def close(self) -> None:
        """Free the draft."""
        self._runner.close()
