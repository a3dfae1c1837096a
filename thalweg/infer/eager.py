"""A runner out of plain torch operators: the reference, mixtures of experts, and devices other than CPUs.

Keys and values of a layer lie in a pool (slot of the cache, kv head, dim); position p of a sequence is at
``16 * table[p // 16] + p % 16``.  Each span gathers its context and attends by SDPA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from thalweg.infer.adapters import Adapters
from thalweg.infer.batch import Batch, Source
from thalweg.infer.describe import Attention, Cross, Decoder
from thalweg.infer.operators import MakeLinear, Operators
from thalweg.infer.pool import Pool
from thalweg.infer.team import Team


class EagerRunner(Operators):
    """Runs a :class:`Decoder` in ``dtype`` on ``device``; ``make_linear`` may pack the linear layers.

    Without ``keep`` nothing of a linear layer outlives its product: the weights stay where the model has them
    (a mapped file, the host's memory) and come anew each time.  ``cache``: see :class:`Pool`.
    ``team``: the ranks with which this one, which has a shard of the decoder, adds up its parts.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        dtype: torch.dtype,
        num_blocks: int,
        num_slots: int,
        max_length: int,
        block_size: int = 16,
        device: torch.device | str = "cpu",
        make_linear: MakeLinear | None = None,
        keep: bool = True,
        cache: str = "auto",
        adapters: Adapters | None = None,
        team: Team | None = None,
    ) -> None:
        self.team = team
        super().__init__(
            dtype, device, reach=max_length, make_linear=make_linear, keep=keep, adapters=adapters
        )
        self.decoder = decoder
        self.num_blocks, self.block_size = num_blocks, block_size
        empty = np.zeros((num_slots, -(-max_length // block_size)), dtype=np.int32)
        self.tables = empty if team is None else team.tables
        listens = decoder.encoder is not None
        self.sources = np.zeros_like(self.tables) if listens else np.zeros((0, 0), dtype=np.int32)
        self.source_lengths = np.zeros(num_slots, dtype=np.int64)
        self.adapter_of = np.full(num_slots, -1, dtype=np.int64)
        slots = num_blocks * block_size
        self._keys, self._values = (
            [
                Pool(slots, a.kv_heads, a.dim, dtype=dtype, cache=cache, device=self.device)
                for a in (x.attention for x in decoder.layers)
            ]
            for _ in range(2)
        )

    @torch.inference_mode()
    def run(self, batch: Batch) -> Tensor:
        """Return fp32 logits (len(batch.rows), vocab)."""
        d, team, x = self.decoder, self.team, self._states(batch)
        if team is not None and not team.last:
            team.end(x)
            logits = self._later(batch)
        else:
            logits = self._logits(x, batch)
            if team is not None:
                team.end()
        if d.logit_softcap:
            logits = d.logit_softcap * torch.tanh(logits / d.logit_softcap)
        return logits

    def _logits(self, x: Tensor, batch: Batch) -> Tensor:
        if len(batch.rows) == 0:
            return torch.empty(0, self.decoder.vocab)
        rows = torch.tensor(list(batch.rows), device=self.device)
        self.who = self.who[rows]
        logits = self._linear(self.decoder.head, self._norm(self.decoder.norm, x[rows])).float()
        return logits if self.team is None else self.team.gather(logits)

    def _later(self, batch: Batch) -> Tensor:
        """Return what the last stage has made of the step; only rank 0 needs it."""
        assert self.team is not None, "without ranks there are no stages"
        if not self.team.first:
            return torch.empty(0, self.decoder.vocab)
        self.team.finish()
        return self.team.logits[: len(batch.rows), : self.decoder.vocab]

    @torch.inference_mode()
    def hidden(self, batch: Batch) -> Tensor:
        """Return the final hidden states, fp32 (tokens, width)."""
        states = self._norm(self.decoder.norm, self._states(batch)).float()
        if self.team is None or self.team.shape.stages == 1:
            return states
        self.team.end(states)
        if self.team.first:
            self.team.finish()
            states = self.team.states(len(states)).clone()
        return states

    def _states(self, batch: Batch) -> Tensor:
        d = self.decoder
        tokens = torch.tensor(batch.tokens, device=self.device)
        positions = torch.cat([torch.arange(s.start, s.start + s.count) for s in batch.spans]).to(self.device)
        self.who = torch.tensor(
            [int(self.adapter_of[s.slot]) for s in batch.spans for _ in range(s.count)], device=self.device
        )
        if self.team is not None:
            self.team.begin()
        if self.team is None or self.team.first:
            x = self._embedded(d, tokens, positions)
        else:
            x = self.team.states(len(tokens)).to(self.device, self.dtype)
        places = [self._place(self.tables, span.slot, span.start + span.count) for span in batch.spans]
        for index, layer in enumerate(d.layers):
            normed = self._norm(layer.norm1, x)
            attended = self._whole(self._attention(layer.attention, index, normed, positions, places, batch))
            before = x
            x = self._after(layer, x, attended)
            if layer.cross is not None:
                x = self._cross(layer.cross, layer.attention, index, x, batch)
            inner = self._whole(
                self._mlp(layer.mlp, self._norm(layer.norm2, before if layer.parallel else x))
            )
            x = x + (inner if layer.post2 is None else self._norm(layer.post2, inner))
            x = self._norm(layer.after2, x)
        return x

    def _whole(self, part: Tensor) -> Tensor:
        """Add up the ranks' parts, where there are several."""
        return part if self.team is None else self.team.sum(part)

    @torch.inference_mode()
    def encode(self, sources: Sequence[Source]) -> None:
        """Compute sources and store what the layers' cross attention reads."""
        d = self.decoder
        assert d.encoder is not None, "only a model with an encoder has sources"
        for source in sources:
            self.who = torch.full(
                (len(source.tokens),), int(self.adapter_of[source.slot]), device=self.device
            )
            states = self.encoded(d.encoder, source.tokens)
            place = self._place(self.sources, source.slot, len(source.tokens))
            for index, layer in enumerate(d.layers):
                if layer.cross is not None:
                    a = layer.attention
                    kv = self._linear(layer.cross.kv, states).view(len(states), 2, a.kv_heads, a.dim)
                    self._keys[index].put(place, kv[:, 0])
                    self._values[index].put(place, kv[:, 1])

    def _cross(self, cross: Cross, a: Attention, index: int, x: Tensor, batch: Batch) -> Tensor:
        q = self._linear(cross.q, self._norm(cross.norm, x)).view(len(x), a.heads, a.dim)
        plain = replace(a, scale=cross.scale, window=0, softcap=0.0, slopes=None, relative=None)
        out, at = torch.empty_like(q), 0
        for span in batch.spans:
            part = slice(at, at + span.count)
            at += span.count
            place = self._place(self.sources, span.slot, int(self.source_lengths[span.slot]))
            keys, values = self._keys[index].get(place), self._values[index].get(place)
            out[part] = self._attend(plain, q[part], keys, values, span.start, causal=False)
        return self._norm(cross.after, x + self._linear(cross.out, out.flatten(1)))

    def _place(self, tables: np.ndarray, slot: int, length: int) -> Tensor:
        """Return where a slot's first ``length`` positions lie in the pools."""
        size = self.block_size
        blocks = torch.from_numpy(tables[slot, : -(-length // size)].astype(np.int64))
        return (blocks[:, None] * size + torch.arange(size)).flatten()[:length].to(self.device)

    def _attention(
        self, a: Attention, index: int, x: Tensor, positions: Tensor, places: list[Tensor], batch: Batch
    ) -> Tensor:
        if a.heads == 0:  # a rank that has experts alone
            return torch.zeros_like(x)
        qkv = self._linear(a.qkv, x).view(len(x), a.heads + 2 * a.kv_heads, a.dim)
        q, k, v = qkv.split([a.heads, a.kv_heads, a.kv_heads], dim=1)
        if a.q_norm is not None and a.k_norm is not None:
            q, k = self._norm(a.q_norm, q), self._norm(a.k_norm, k)
        if a.rotary is not None:
            q, k = self._rotate(a.rotary, q, positions), self._rotate(a.rotary, k, positions)
        keys, values = self._keys[index], self._values[index]
        out, at = torch.empty_like(q), 0
        for span, place in zip(batch.spans, places, strict=True):
            part = slice(at, at + span.count)
            at += span.count
            keys.put(place[span.start :], k[part])
            values.put(place[span.start :], v[part])
            out[part] = self._attend(a, q[part], keys.get(place), values.get(place), span.start)
        return self._linear(a.out, out.flatten(1))

    def best(self) -> None:
        """Nothing is at hand: the sampler looks for it."""

    def release(self, slot: int) -> None:
        """Nothing is kept outside of the blocks."""

    def close(self) -> None:
        """Drop the weights and the cache."""
        self.drop()
        self._keys, self._values = [], []
