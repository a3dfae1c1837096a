"""Batch-invariant computation on runners whose sums depend on how many rows there are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thalweg.infer.batch import Batch, Runner, Source, Span


class OneByOne:
    """Gives every token to another runner alone, so that no result depends on the token's company.

    Not on other sequences, not on how prompts are cut into pieces, not on what a prefix cache has saved.
    The native kernels have this by themselves and need no wrapper.
    """

    def __init__(self, runner: Runner) -> None:
        self.inner = runner
        self.num_blocks, self.block_size = runner.num_blocks, runner.block_size
        self.tables, self.sources = runner.tables, runner.sources
        self.adapter_of, self.source_lengths = runner.adapter_of, runner.source_lengths

    def encode(self, sources: Sequence[Source]) -> None:
        """Compute sources, one after the other."""
        for source in sources:
            self.inner.encode([source])

    def run(self, batch: Batch) -> Tensor:
        """Return fp32 logits (len(batch.rows), vocab)."""
        wanted = {row: number for number, row in enumerate(batch.rows)}
        found: list[Tensor] = [torch.empty(0)] * len(wanted)
        for at, (token, span) in enumerate(self._tokens(batch)):
            logits = self.inner.run(Batch([token], [span], [0] if at in wanted else []))
            if at in wanted:
                found[wanted[at]] = logits[0].clone()
        return torch.stack(found) if found else torch.empty(0, 0)

    def hidden(self, batch: Batch) -> Tensor:
        """Return the last hidden states, fp32 (tokens, width)."""
        return torch.cat([self.inner.hidden(Batch([t], [s], [0])).clone() for t, s in self._tokens(batch)])

    def _tokens(self, batch: Batch) -> list[tuple[int, Span]]:
        places = [Span(s.slot, s.start + i, 1) for s in batch.spans for i in range(s.count)]
        return list(zip(batch.tokens, places, strict=True))

    def best(self) -> None:
        """Nothing is at hand."""

    def release(self, slot: int) -> None:
        """Forget what the slot's sequence has left."""
        self.inner.release(slot)

    def close(self) -> None:
        """Free the weights and the cache."""
        self.inner.close()
