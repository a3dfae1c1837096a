"""Draft tokens from a smaller model with the same vocabulary (Leviathan et al. 2023; Chen et al. 2023).

The draft model has a KV cache of its own with the same block numbers and the same tables as the target's, so
the scheduler knows of one cache only.  A sequence's ``num_draft_computed`` counts its tokens in that cache;
what is missing (a whole prompt at first, a token or two later) is computed before the first draft token, then
each draft token takes one step of the draft model for all sequences together.

The draft model draws as the target will, with the same number in [0, 1) for a position (``sampler.py``): its
tokens are accepted far more often than by chance, and an accepted one is what would have been drawn anyway.
"""

import torch
from torch import Tensor

from thalweg.infer.engine.sampler import SampledRow, draw_tokens
from thalweg.infer.engine.scheduler import Proposer, Sequence
from thalweg.infer.runners.base import ModelInput, ModelRunner, QuerySpan


class DraftModelProposer(Proposer):
    """Runs the draft model by ``runner``, ``max_num_batched_tokens`` at a time.

    ``vocab_size`` is the target's.  Target tokens from ``draft_vocab_size`` on, which the draft model has no
    embedding for, are shown to it as 0.
    """

    def __init__(
        self, runner: ModelRunner, *, max_num_batched_tokens: int, vocab_size: int, draft_vocab_size: int
    ) -> None:
        self._runner, self._max_num_batched_tokens = runner, max_num_batched_tokens
        self._vocab_size, self._draft_vocab_size = vocab_size, draft_vocab_size

    def propose(self, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Run the draft model once for each token, all sequences together."""
        for sequence, _ in requests:
            sequence.num_draft_computed = min(sequence.num_draft_computed, len(sequence.tokens) - 1)
        logits = self._prefill_missing([sequence for sequence, _ in requests])
        proposals: list[list[int]] = [[] for _ in requests]
        active = list(range(len(requests)))
        while active:
            draws = [SampledRow(n, requests[at][0], proposals[at]) for n, at in enumerate(active)]
            for at, token in zip(active, draw_tokens(logits[:, : self._vocab_size], draws), strict=True):
                proposals[at].append(token)
            active = [place for place in active if len(proposals[place]) < requests[place][1]]
            if active:
                running = [(requests[p][0], len(proposals[p])) for p in active]
                spans = [QuerySpan(sequence.slot, len(sequence.tokens) + n - 1, 1) for sequence, n in running]
                block_tables = [sequence.blocks for sequence, _ in running]
                tokens = [proposals[p][-1] for p in active]
                logits = self._runner.run(ModelInput(tokens, spans, range(len(active)), block_tables))
        for (sequence, count), proposed in zip(requests, proposals, strict=True):
            assert len(proposed) == count
            sequence.num_draft_computed = len(sequence.tokens) + count - 1
        return proposals

    def _prefill_missing(self, sequences: list[Sequence]) -> Tensor:
        """Compute what is missing of each sequence; return the logits of their last tokens (sequences, vocab)."""
        last_logits: dict[int, Tensor] = {}
        batch = ModelInput([], [], [])
        sequence_indices: list[int] = []
        for number, sequence in enumerate(sequences):
            while sequence.num_draft_computed < len(sequence.tokens):
                remaining = self._max_num_batched_tokens - len(batch.tokens)
                chunk = sequence.tokens[sequence.num_draft_computed : sequence.num_draft_computed + remaining]
                batch.spans.append(QuerySpan(sequence.slot, sequence.num_draft_computed, len(chunk)))
                batch.block_tables.append(sequence.blocks)
                batch.tokens += [token * (token < self._draft_vocab_size) for token in chunk]
                sequence.num_draft_computed += len(chunk)
                if sequence.num_draft_computed == len(sequence.tokens):
                    sequence_indices.append(number)
                    batch.logit_indices = [*batch.logit_indices, len(batch.tokens) - 1]
                if len(batch.tokens) == self._max_num_batched_tokens:
                    last_logits |= self._run(batch, sequence_indices)
                    batch, sequence_indices = ModelInput([], [], []), []
        if batch.tokens:
            last_logits |= self._run(batch, sequence_indices)
        return torch.stack([last_logits[number] for number in range(len(sequences))])

    def _run(self, batch: ModelInput, sequence_indices: list[int]) -> dict[int, Tensor]:
        logits = self._runner.run(batch)
        return {number: logits[at].clone() for at, number in enumerate(sequence_indices)}

    def close(self) -> None:
        """Free the draft model."""
        self._runner.close()
