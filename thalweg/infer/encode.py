"""A stack in which every token sees its whole sequence, on a tape of native kernels.

Several sequences are computed together, one after the other in the rows, none of them padded.  A layer's keys
and values matter only until its attention is done, so all layers keep theirs in the same blocks; only what a
listening decoder is told goes into the blocks of its own pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.infer.adapters import Adapters
from thalweg.infer.batch import Source
from thalweg.infer.describe import Attention, Cross, Encoder
from thalweg.infer.laid import Layout, plain_heads
from thalweg.infer.weights import Resident, Weights
from thalweg.ops import native

Told = Sequence[tuple[Cross | None, Attention, tuple[Tensor, Tensor, int]]]
"""For each layer of a decoder: its cross attention, the self-attention that has the same shape, and the pool
of keys and values with its stripe."""


class NativeEncoder:
    """Runs an :class:`Encoder` with weights in ``form``: up to ``most`` sequences, ``max_tokens`` tokens.

    ``told``: cross attentions to compute keys and values for; ``tables`` (slots, blocks) names their blocks.
    ``adapter_of``: which of the ``adapters`` each slot has.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        form: str,
        cache: str,
        max_length: int,
        max_tokens: int,
        most: int,
        weights: Weights | None = None,
        told: Told = (),
        tables: np.ndarray | None = None,
        adapters: Adapters | None = None,
        adapter_of: np.ndarray | None = None,
    ) -> None:
        self.width, self.max_length, self.max_tokens = encoder.width, max_length, max_tokens
        self._own = weights is None
        self._weights = weights or Resident(encoder, form)
        self._blocks = np.zeros((most, -(-max_length // native.BLOCK_SIZE)), dtype=np.int32)
        self._tables = tables
        laid = _Layout(
            self._weights, encoder, form, cache=cache, tokens=max_tokens, reach=max_length,
            num_blocks=max_tokens // native.BLOCK_SIZE + most, tables=self._blocks, told=told, to=tables,
            adapters=adapters,
        )  # fmt: skip
        self._x, self._final, self.weight_bytes = laid.embedded, laid.final, laid.weight_bytes
        self._tokens, self._positions, _, _ = laid.inputs
        self._adapter_of, self._adapters = adapter_of, laid.adapter_of.numpy()
        self._np = [t.numpy() for t in (*laid.inputs[:3], laid.lasts, laid.slots, laid.counts)]
        (self._tapes,) = laid.lay(laid.segments)
        self._encoder = encoder
        dtype = torch.float32 if form == "fp32" else torch.bfloat16
        self._embed = encoder.embed.to(dtype)
        self._learned = None if encoder.positions is None else encoder.positions.float()

    @torch.inference_mode()
    def run(self, sources: Sequence[Source]) -> Tensor:
        """Return the last states, fp32 (tokens, width), sequence by sequence; valid until the next run.

        What a decoder is told goes into the blocks of each source's slot.
        """
        tokens, positions, table_of, lasts, slots, counts = self._np
        at = block = 0
        for number, source in enumerate(sources):
            length = len(source.tokens)
            part = slice(at, at + length)
            assert length <= self.max_length and at + length <= self.max_tokens, (
                "the caller keeps to the room"
            )
            blocks = -(-length // native.BLOCK_SIZE)
            self._blocks[number, :blocks] = np.arange(block, block + blocks)
            tokens[part], positions[part], lasts[part] = source.tokens, np.arange(length), length - 1
            table_of[part] = number * self._blocks.strides[0]
            if self._tables is not None:
                slots[part] = source.slot * self._tables.strides[0]
            if self._adapter_of is not None:
                self._adapters[part] = self._adapter_of[source.slot]
            at, block = at + length, block + blocks
        counts[:] = at
        e = self._encoder
        x = F.embedding(self._tokens[:at], self._embed)
        if e.embed_scale != 1.0:
            x = x.float() * e.embed_scale
        if self._learned is not None:
            rows = self._positions[:at]
            if e.pad >= 0:
                rows = torch.cat([e.places(torch.tensor(list(source.tokens))) for source in sources])
            x = x.float() + self._learned[rows]
        self._x[:at] = x
        for tape in self._tapes:
            tape.run()
        return self._final[:at, : self.width]

    def close(self) -> None:
        """Drop the weights, where they are its own."""
        if self._own and "_weights" in self.__dict__:
            self._weights.close()
        self.__dict__.clear()


class _Layout(Layout):
    """Lays an encoder down, and what follows it for a decoder."""

    def __init__(
        self,
        weights: Weights,
        e: Encoder,
        form: str,
        *,
        cache: str,
        tokens: int,
        reach: int,
        num_blocks: int,
        tables: np.ndarray,
        told: Told,
        to: np.ndarray | None,
        adapters: Adapters | None,
    ) -> None:
        super().__init__(
            weights, form, width=e.width, tokens=tokens, reach=reach, cache=cache, tables=tables.ctypes.data,
            adapters=adapters,
        )  # fmt: skip
        self.keep += [tables, to]
        self.ends, self.slots = (self.hold(torch.zeros(tokens, dtype=torch.int64)) for _ in range(2))
        room: dict[tuple[int, int], tuple[Tensor, Tensor, int]] = {}
        if e.embed_norm is not None:
            self.norm_into(e.embed_norm, self.x, self.x)
        for layer in e.layers:
            a = layer.attention
            if (a.kv_heads, a.dim) not in room:
                room[a.kv_heads, a.dim] = self.pool(num_blocks, [a])[1][0]
            self.layer(layer, *room[a.kv_heads, a.dim])
        self.final = self.x
        if e.norm is not None:
            self.final = self.hold(native.allocate_rows(tokens, e.width))
            self.norm_into(e.norm, self.x, self.final)
        if to is not None:
            rows = self.prepare(None, self.final, form, "told")
            for cross, attention, pool in told:
                if cross is not None:
                    self._tell(cross, rows, attention, pool, to.ctypes.data)

    @property
    def lasts(self) -> Tensor:
        """A token sees its sequence to the end."""
        return self.ends

    def _tell(
        self, cross: Cross, rows: native.ActivationBuffer, a: Attention, pool: tuple[Tensor, Tensor, int], to: int
    ) -> None:
        """Compute keys and values of the source for a layer of a decoder, and store them."""
        kv = self.buffer("kv", cross.kv.outputs)
        self.product(rows, cross.kv, kv, self.form)
        plain = replace(a, rotary=None, q_norm=None, k_norm=None)
        shape = replace(plain_heads(self.heads(plain), 1.0), heads=0)
        self.rotate(shape, plain, kv, *pool, to, self.slots)
