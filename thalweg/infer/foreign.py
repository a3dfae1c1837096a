"""A runner for any Hugging Face model that generates: its own modelling code, a cache of its own for each
sequence.

No blocks are shared and nothing is batched; what it gives is exactly the model's own result, for families
that ``models/`` does not describe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thalweg.infer.batch import Batch, Source


class ForeignRunner:
    """Runs a live model; ``num_slots`` sequences of ``max_length`` at most."""

    block_size = 16

    def __init__(self, model: Any, *, num_slots: int, max_length: int) -> None:
        per_slot = -(-max_length // self.block_size)
        self.num_blocks = num_slots * per_slot  # a count for the scheduler: no memory stands behind them
        self.tables = np.zeros((num_slots, per_slot), dtype=np.int32)
        self.sources = np.zeros((num_slots, per_slot), dtype=np.int32)
        self.source_lengths = np.zeros(num_slots, dtype=np.int64)
        self.adapter_of = np.full(num_slots, -1, dtype=np.int64)
        self._model: Any = model.eval()
        self._caches: dict[int, Any] = {}
        self._heard: dict[int, Any] = {}

    @torch.inference_mode()
    def encode(self, sources: Sequence[Source]) -> None:
        """Let the model's encoder compute sources."""
        device = next(self._model.parameters()).device
        for source in sources:
            tokens = torch.tensor([list(source.tokens)], device=device)
            self._heard[source.slot] = self._model.get_encoder()(
                input_ids=tokens, attention_mask=torch.ones_like(tokens), return_dict=True
            )

    @torch.inference_mode()
    def run(self, batch: Batch) -> Tensor:
        """Return fp32 logits (len(batch.rows), vocab)."""
        logits = torch.cat([part.logits[0].float() for part in self._forward(batch, hidden=False)])
        return logits[list(batch.rows)]

    @torch.inference_mode()
    def hidden(self, batch: Batch) -> Tensor:
        """Return the final hidden states, fp32 (tokens, width)."""
        return torch.cat([part.hidden_states[-1][0].float() for part in self._forward(batch, hidden=True)])

    def _forward(self, batch: Batch, hidden: bool) -> list[Any]:
        device = next(self._model.parameters()).device
        outputs, at = [], 0
        for slot, start, count in batch.spans:
            tokens = torch.tensor([batch.tokens[at : at + count]], device=device)
            at += count
            if start == 0:
                self._caches.pop(slot, None)
            if slot in self._heard:
                given = {"encoder_outputs": self._heard[slot], "decoder_input_ids": tokens}
            else:
                mask = torch.ones(1, start + count, dtype=torch.int64, device=device)
                given = {"input_ids": tokens, "attention_mask": mask, "output_hidden_states": hidden}
            out = self._model(**given, past_key_values=self._caches.get(slot), use_cache=True)
            self._caches[slot] = out.past_key_values
            outputs.append(out)
        return outputs

    def best(self) -> None:
        """Nothing is at hand: the sampler looks for it."""

    def release(self, slot: int) -> None:
        """Drop the slot's cache."""
        self._caches.pop(slot, None)
        self._heard.pop(slot, None)

    def close(self) -> None:
        """Drop the model and the caches."""
        self._caches.clear()
        self._heard.clear()
        self._model = None
