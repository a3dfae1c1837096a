"""A runner for any Hugging Face causal model: its own modelling code, its own cache, one for each sequence.

No blocks are shared and nothing is batched; what it gives is exactly the model's own result, for families
that ``models/`` does not describe.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thalweg.infer.batch import Batch


class ForeignRunner:
    """Runs a live model; ``num_slots`` sequences of ``max_length`` at most."""

    block_size = 16

    def __init__(self, model: Any, *, num_slots: int, max_length: int) -> None:
        per_slot = -(-max_length // self.block_size)
        self.num_blocks = num_slots * per_slot  # a count for the scheduler: no memory stands behind them
        self.tables = np.zeros((num_slots, per_slot), dtype=np.int32)
        self._model: Any = model.eval()
        self._caches: dict[int, Any] = {}

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
            out = self._model(
                input_ids=tokens,
                past_key_values=self._caches.get(slot),
                attention_mask=torch.ones(1, start + count, dtype=torch.int64, device=device),
                use_cache=True,
                output_hidden_states=hidden,
            )
            self._caches[slot] = out.past_key_values
            outputs.append(out)
        return outputs

    def best(self) -> None:
        """Nothing is at hand: the sampler looks for it."""

    def release(self, slot: int) -> None:
        """Drop the slot's cache."""
        self._caches.pop(slot, None)

    def close(self) -> None:
        """Drop the model and the caches."""
        self._caches.clear()
        self._model = None
