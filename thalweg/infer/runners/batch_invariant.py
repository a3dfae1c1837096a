"""Batch-invariant computation on runners whose sums depend on how many rows there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from thalweg.infer.models.spec import DecoderSpec
from thalweg.infer.runners.base import EncoderInput, ModelInput, ModelRunner, QuerySpan


class BatchInvariantRunner(ModelRunner):
    """Gives every token to another runner alone, so that no result depends on the token's company.

    Not on other sequences, not on how prompts are chunked, not on what the prefix cache holds.  The CPU kernels
    have this by themselves and need no wrapper.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.inner = runner
        self.num_blocks, self.block_size, self.num_slots = runner.num_blocks, runner.block_size, runner.num_slots

    def run_encoder(self, inputs: Sequence[EncoderInput]) -> None:
        """Compute encoder prompts, one after the other."""
        for encoder_input in inputs:
            self.inner.run_encoder([encoder_input])

    def run(self, batch: ModelInput) -> Tensor:
        """Return fp32 logits (len(batch.logit_indices), vocab)."""
        output_index = {row: number for number, row in enumerate(batch.logit_indices)}
        outputs: list[Tensor] = [torch.empty(0)] * len(output_index)
        for index, single in enumerate(self._single_tokens(batch)):
            single.logit_indices = [0] if index in output_index else []
            logits = self.inner.run(single)
            if index in output_index:
                outputs[output_index[index]] = logits[0].clone()
        return torch.stack(outputs) if outputs else torch.empty(0, 0)

    def hidden_states(self, batch: ModelInput) -> Tensor:
        """Return the last hidden states, fp32 (tokens, width)."""
        return torch.cat([self.inner.hidden_states(single).clone() for single in self._single_tokens(batch)])

    def _single_tokens(self, batch: ModelInput) -> Iterator[ModelInput]:
        """Yield each token of a batch as a batch of its own."""
        tokens = iter(batch.tokens)
        for number, span in enumerate(batch.spans):
            own = slice(number, number + 1)
            for offset in range(span.num_tokens):
                yield ModelInput(
                    [next(tokens)],
                    [QuerySpan(span.slot, span.start + offset, 1)],
                    [0],
                    block_tables=batch.block_tables[own],
                    encoder_block_tables=batch.encoder_block_tables[own],
                    encoder_seq_lens=batch.encoder_seq_lens[own],
                    lora_ids=batch.lora_ids[own],
                )

    def free_slot(self, slot: int) -> None:
        """Drop what the slot's sequence keeps."""
        self.inner.free_slot(slot)

    def sleep(self) -> None:
        """Give the memory back."""
        self.inner.sleep()

    def wake_up(self, spec: DecoderSpec | None) -> None:
        """Take new weights."""
        self.inner.wake_up(spec)

    def close(self) -> None:
        """Free the weights and the cache."""
        self.inner.close()
