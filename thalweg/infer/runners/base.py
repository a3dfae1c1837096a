"""What one step computes, and who computes it.

A step is a flat row of tokens in spans: each span is a whole prompt of one sequence, a chunk of one, or its
latest token.  A sequence owns a slot, a row of ``block_tables`` that names its KV blocks in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, NamedTuple, Protocol

from torch import Tensor


def to_token_ids(prompt: Any) -> list[int]:
    """Return a prompt as numbers, whatever kind of them it is made of; ValueError where it is not."""
    try:
        return [index(token) for token in prompt]
    except TypeError as error:
        raise ValueError(
            f"the prompt must be token ids, whole numbers ({error}): encode text by the tokenizer first"
        ) from None


class QuerySpan(NamedTuple):
    """``num_tokens`` tokens of the sequence in ``slot``, the first of them at position ``start``."""

    slot: int
    start: int
    num_tokens: int


class EncoderInput(NamedTuple):
    """The whole encoder prompt of the sequence in ``slot``."""

    slot: int
    tokens: Sequence[int]


@dataclass
class ModelInput:
    """The tokens of all spans one after the other, and the rows whose logits are wanted."""

    tokens: list[int]
    spans: list[QuerySpan]
    logit_indices: Sequence[int]


class ModelRunner(Protocol):
    """A model with its KV cache."""

    num_blocks: int
    """Blocks of the cache; 0 where each slot has a cache of its own kind, without blocks."""
    block_size: int
    block_tables: Any
    """A numpy int32 array (slots, blocks of the longest sequence) that the scheduler writes."""

    encoder_block_tables: Any
    """The same for encoder prompts, whose blocks come from the same cache; no rows where the model has no encoder."""

    encoder_seq_lens: Any
    """A numpy int64 array (slots,) that the scheduler writes: the lengths of their sequences' encoder prompts."""
    lora_ids: Any
    """A numpy int64 array (slots,): which adapter a slot's sequence has, -1 for none."""

    def run_encoder(self, inputs: Sequence[EncoderInput]) -> None:
        """Compute encoder prompts and store the keys and values of cross attention in their slots' blocks."""
        ...

    def run(self, batch: ModelInput) -> Tensor:
        """Compute, store keys and values; return fp32 logits (len(logit_indices), vocab), valid until the next run."""
        ...

    def argmax(self) -> tuple[list[int], list[float]] | None:
        """Return the most likely token of each row of the last run and its logit, or None where it is not computed.

        Of several equal ones the first; a logit that is NaN stands for a row that holds one.
        """
        ...

    def free_slot(self, slot: int) -> None:
        """Drop what the slot's sequence keeps outside of the blocks."""
        ...

    def hidden_states(self, batch: ModelInput) -> Tensor:
        """Like ``run`` with all rows, but return the last hidden states, fp32 (tokens, width)."""
        ...

    def close(self) -> None:
        """Free the weights and the cache."""
        ...
