"""Speculative decoding: draft tokens looked up in the sequence itself (prompt lookup, Saxena 2023), or from a
smaller model (``draft_model.py``).

A step computes a decoding sequence's token together with a few draft tokens.  The sampler then goes through
their logits in order: what it would have drawn is the next token, and as long as that equals the draft token
the logits of the next row are valid too.  A draw depends on seed, sample and length alone, so the output is
the same with drafts as without, sampled ones included; only the number of steps is less.
"""

from thalweg.infer.engine.scheduler import Proposer, Sequence

_MAX_NGRAM, _MIN_NGRAM = 4, 2  # tokens that must match before a proposal


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
                while len(proposed) < count:  # a repetition is expected to go on
                    proposed += proposed[: count - len(proposed)]
                return proposed
        return []


class NgramProposer(Proposer):
    """Looks up in each sequence's own :class:`NgramIndex`."""

    def num_proposals(self, sequence: Sequence, limit: int) -> int:
        """Look up, and keep the result for :meth:`propose`."""
        if sequence.ngram_index is None:
            sequence.ngram_index = NgramIndex()
        sequence.ngram_index.proposed = sequence.ngram_index.propose(sequence.tokens, limit)
        return len(sequence.ngram_index.proposed)

    def propose(self, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Return what the lookup gave."""
        return [sequence.ngram_index.proposed[:count] for sequence, count in requests]
