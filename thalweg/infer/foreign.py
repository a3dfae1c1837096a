"""A runner for any Hugging Face model that generates: its own modelling code, a cache of its own for each
sequence.

No blocks are shared and nothing is batched; what it gives is exactly the model's own result, for families
that ``models/`` does not describe.  The model sees what ``generate`` would show it: a prompt in one piece,
whatever pieces the scheduler cuts it into (rotations that change with the length, and states that take a
prompt only at their beginning, depend on it), then token by token.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thalweg.infer.batch import Batch, Source
from thalweg.infer.forms import evaluating

_ENDLESS = 2048  # the longest sequence of a model that names none, unless asked otherwise
_LENGTHS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_decoder_position_embeddings",
)  # fmt: skip
_CACHES = ("past_key_values", "cache_params", "state")  # as what models take and return their memory


@dataclass
class _Said:
    """A slot's tokens so far, how many of them the model has seen, and what it remembers of these."""

    tokens: list[int] = field(default_factory=list)
    seen: int = 0
    memory: dict[str, Any] = field(default_factory=dict)


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
        self._model: Any = model
        self._stateful = bool(getattr(model, "_is_stateful", False))
        taken = inspect.signature(model.forward).parameters
        self._placed = "position_ids" in taken
        anything = any(parameter.kind == parameter.VAR_KEYWORD for parameter in taken.values())
        self._taken = None if anything else set(taken)
        self._switch = _switch(model.config)
        self._said: dict[int, _Said] = {}
        self._heard: dict[int, Any] = {}

    @torch.inference_mode()
    def encode(self, sources: Sequence[Source]) -> None:
        """Let the model's encoder compute sources."""
        device = next(self._model.parameters()).device
        for source in sources:
            tokens = torch.tensor([list(source.tokens)], device=device)
            encoder = self._model.get_encoder()
            with evaluating(encoder):
                self._heard[source.slot] = encoder(
                    input_ids=tokens, attention_mask=torch.ones_like(tokens), return_dict=True
                )

    @torch.inference_mode()
    def run(self, batch: Batch) -> Tensor:
        """Return fp32 logits (len(batch.rows), vocab)."""
        found = self._forward(batch, lambda out: out["logits"][0], hidden=False)
        return torch.stack([found[row] for row in batch.rows]) if found else torch.empty(0, 0)

    @torch.inference_mode()
    def hidden(self, batch: Batch) -> Tensor:
        """Return the final hidden states, fp32 (tokens, width)."""
        every = Batch(batch.tokens, batch.spans, range(len(batch.tokens)))
        found = self._forward(every, lambda out: out["hidden_states"][-1][0], hidden=True)
        return torch.stack([found[row] for row in every.rows])

    def _forward(self, batch: Batch, rows_of: Any, hidden: bool) -> dict[int, Tensor]:
        """Return the fp32 rows that are wanted, by their places in the batch."""
        found, at, wanted = {}, 0, set(batch.rows)
        for slot, start, count in batch.spans:
            if start == 0:
                self._said[slot] = _Said()
            said = self._said[slot]
            said.tokens += batch.tokens[at : at + count]
            mine = [row for row in range(at, at + count) if row in wanted]
            if mine:  # without, the tokens wait for those behind them
                rows = torch.cat([rows_of(out) for out in self._see(slot, said, hidden)])
                # Of tokens that waited, and are wanted no more, there are rows in front.
                found |= {row: rows[row - at - count].float() for row in mine}
            at += count
        return found

    def _see(self, slot: int, said: _Said, hidden: bool) -> list[Any]:
        """Show the model what it has not seen; returns its outputs."""
        if not said.memory or said.seen <= self._switch < len(said.tokens):
            said.memory, said.seen = {}, 0
        outputs = []
        while said.seen < len(said.tokens):
            # A state can be begun with many tokens, and goes on with one at a time.
            stop = said.seen + 1 if self._stateful and said.seen else len(said.tokens)
            outputs.append(self._call(slot, said, stop, hidden))
            said.seen = stop
        return outputs

    def _call(self, slot: int, said: _Said, stop: int, hidden: bool) -> Any:
        device = next(self._model.parameters()).device
        tokens = torch.tensor([said.tokens[said.seen : stop]], device=device)
        given: dict[str, Any]
        if slot in self._heard:
            given = {"encoder_outputs": self._heard[slot], "decoder_input_ids": tokens}
        elif self._stateful:
            given = {"input_ids": tokens}
        else:
            mask = torch.ones(1, stop, dtype=torch.int64, device=device)
            given = {"input_ids": tokens, "attention_mask": mask}
        if self._placed and slot not in self._heard:  # not every model counts what it remembers
            given["position_ids"] = torch.arange(said.seen, stop, device=device)[None]
        if hidden:
            given["output_hidden_states"] = True
        given |= {"use_cache": True, **said.memory}
        if self._taken is not None:  # a model of somebody's own, which takes less than others do
            given = {name: value for name, value in given.items() if name in self._taken}
        with evaluating(self._model):
            out = self._model(**given)
        if isinstance(out, tuple):  # without names, so without a memory: it sees everything anew each time
            out = {"logits": out[0]}
        said.memory = {name: out[name] for name in _CACHES if out.get(name) is not None}
        return out

    def best(self) -> None:
        """Nothing is at hand: the sampler looks for it."""

    def release(self, slot: int) -> None:
        """Drop the slot's cache."""
        self._said.pop(slot, None)
        self._heard.pop(slot, None)

    def close(self) -> None:
        """Drop the model and the caches."""
        self._said.clear()
        self._heard.clear()
        self._model = None


def own_length(config: Any, asked: int | None) -> int:
    """Return the longest sequence that a model's config lets it have, of at most the tokens asked for."""
    sizes = [getattr(config, name, None) for name in _LENGTHS]
    most = next((size for size in sizes if size is not None and size > 0), None)
    if most is None:  # a state, or relative positions: nothing ends
        return asked or _ENDLESS
    return min(asked or most, most)


def _switch(config: Any) -> int:
    """Return the length behind which a model of the kind of Phi 3 rotates all positions otherwise.

    Its ``generate`` then drops the cache once (``prepare_inputs_for_generation``).
    """
    if config.model_type not in ("phi3", "phimoe", "phi4_multimodal"):
        return -1
    return getattr(config, "original_max_position_embeddings", None) or -1
