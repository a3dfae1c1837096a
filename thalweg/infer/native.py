"""The fast runner on CPUs: a whole step of the model is one call of a tape of native kernels.

At load the weights are packed (``ops/native/panels.py``) and the model is laid down once as a list of kernel
calls on preallocated buffers (``laid.py``); a step fills in tokens, positions and block tables and runs the
list.  Nothing in it depends on how many tokens there are or whose they are, so that prompts, pieces of
prompts and decoding tokens mix freely, and a token's result is the same, bit for bit, in any company.

Activations between layers are fp32.  What meets a packed weight is fp32, bf16 or int8 with a scale per row.

A model that listens has a second tape (``encode.py``): it computes a source once and stores, layer by layer,
the keys and values that cross attention reads, in blocks of the same pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.infer.adapters import Adapters
from thalweg.infer.batch import Batch, Source
from thalweg.infer.describe import Attention, Cross, Decoder, Encoder, Experts, Unsupported
from thalweg.infer.encode import NativeEncoder
from thalweg.infer.laid import Layout, plain_heads
from thalweg.infer.team import Team
from thalweg.infer.weights import Resident, Weights, head_form
from thalweg.ops import native
from thalweg.store.paged import PagePrefaulter


def check(decoder: Decoder | Encoder, form: str, cache: str = "fp32") -> None:
    """Raise Unsupported unless this processor and this model suit the kernels."""
    for name in {form, "int8"} if cache == "int8" else {form}:
        if why := native.unsupported_reason(name):
            raise Unsupported(why)
    if cache not in native.KV_DTYPE_BYTES:
        raise Unsupported(f"a cache in {cache}")
    encoder = decoder.encoder if isinstance(decoder, Decoder) else None
    sizes = [decoder.width] if encoder is None else [decoder.width, encoder.width]
    for layer in [*decoder.layers, *(encoder.layers if encoder is not None else ())]:
        if isinstance(layer.mlp, Experts):
            raise Unsupported("a mixture of experts")
        a = layer.attention
        sizes += [a.dim, layer.mlp.down.inputs]
        if (a.q_norm is not None) != (a.k_norm is not None):
            raise Unsupported("a norm on queries or keys alone")
        if a.q_norm is not None and a.q_norm.style != "rms":
            raise Unsupported("layer norms on queries and keys")
        if layer.cross is not None and layer.cross.kv.outputs != 2 * a.kv_heads * a.dim:
            raise Unsupported("cross attention with other heads than self-attention")
    if any(size % 16 for size in sizes):
        raise Unsupported("a width that is no multiple of 16")


class NativeRunner:
    """Runs a :class:`Decoder` with weights in ``form``: fp32, bf16, int8 or int4 (the head then in int8).

    ``cache``: what keys and values are kept as, a name of ``native.CACHES``.
    ``weights`` keeps them (by default in memory).  ``adapters``: what slots may name in
    ``adapter_of``.  The decoder's embedding is read row by row where it lies.
    ``team``: the ranks with which this one, which has a shard of the decoder, adds up its parts.
    ``threads``: 0 for as many as torch has.
    """

    block_size = native.BLOCK_SIZE

    def __init__(
        self,
        decoder: Decoder,
        *,
        form: str,
        num_blocks: int,
        num_slots: int,
        max_length: int,
        max_tokens: int,
        cache: str,
        weights: Weights | None = None,
        adapters: Adapters | None = None,
        team: Team | None = None,
        threads: int = 0,
    ) -> None:
        check(decoder, form, cache)
        self._weights = weights or Resident(decoder, form)
        self.vocab, self.width, self.num_blocks = decoder.vocab, decoder.width, num_blocks
        self._softcap, self._embed_scale = decoder.logit_softcap, decoder.embed_scale
        shape = (num_slots, -(-max_length // self.block_size))
        self.team, self.threads = team, threads
        self.tables = np.zeros(shape, dtype=np.int32) if team is None else team.tables
        self.sources = np.zeros(shape if decoder.encoder is not None else (0, 0), dtype=np.int32)
        self.source_lengths = np.zeros(num_slots, dtype=np.int64)
        self.adapter_of = np.full(num_slots, -1, dtype=np.int64)
        self._adapted = adapters is not None
        self._max_tokens = max_tokens
        self._embed_dtype = torch.float32 if form == "fp32" else torch.bfloat16
        self._embed = decoder.embed if weights is not None else decoder.embed.to(self._embed_dtype)
        self._positions_table = None if decoder.positions is None else decoder.positions.float()
        laid = _Decoder(self, decoder, form, max_tokens, max_length, cache, adapters)
        self._x, self._logits = laid.embedded, laid.logits
        self._tokens, self._positions, self._table_of, self._rows = laid.inputs
        self._counts = laid.counts
        # numpy views of the same memory: cheaper to fill, item by item
        self._np = [t.numpy() for t in (*laid.inputs, laid.counts)]
        self._adapters = laid.adapters_of.numpy()
        self._np_sources = [t.numpy() for t in laid.source_inputs]
        self._body, self._head = laid.lay(laid.body, laid.head)
        self._out, self._final, self._best = laid.out, laid.final, laid.best
        self._ahead = laid.ahead
        self._last = 0
        self.weight_bytes = laid.weight_bytes
        self._encoder: NativeEncoder | None = None
        if decoder.encoder is not None:
            told = [(x.cross, x.attention, pool) for x, pool in zip(decoder.layers, laid.pools, strict=True)]
            self._encoder = NativeEncoder(
                decoder.encoder, form=form, cache=cache, max_length=max_length, most=num_slots,
                max_tokens=max(max_tokens, max_length), weights=self._weights, told=told, tables=self.sources,
                adapters=adapters, adapter_of=self.adapter_of,
            )  # fmt: skip

    @torch.inference_mode()
    def encode(self, sources: Sequence[Source]) -> None:
        """Compute sources and store what the layers' cross attention reads."""
        assert self._encoder is not None, "only a model with an encoder has sources"
        self._encoder.run(sources)

    @torch.inference_mode()
    def run(self, batch: Batch) -> Tensor:
        """Return fp32 logits (len(batch.rows), vocab), overwritten by the next run."""
        team = self.team
        self._fill(batch)
        self._weights.run(self._body, 0)
        self._last = count = len(batch.rows)
        if team is not None and not team.last:
            team.end(self._out[: len(batch.tokens), : self.width])
            if team.first:
                team.finish()
        elif count == 0:
            self._weights.skip(len(self._body))
        else:
            self._weights.run(self._head, len(self._body))
        if team is not None and team.last:
            team.end()
        logits = self._logits[:count, : self.vocab]
        if self._softcap:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        return logits

    def best(self) -> tuple[list[int], list[float]] | None:
        """Return the most likely token of each row of the last run, and its logit; None where another stage
        has the head."""
        if self.team is not None and not self.team.last:
            return None
        places, values = self._best
        return places[: self._last].tolist(), values[: self._last].tolist()

    @torch.inference_mode()
    def hidden(self, batch: Batch) -> Tensor:
        """Return the final hidden states, fp32 (tokens, width)."""
        whole = Batch(batch.tokens, batch.spans, range(len(batch.tokens)))
        self._fill(whole)
        self._weights.run([*self._body, *self._head], 0)
        count, team = len(batch.tokens), self.team
        if team is None or team.shape.stages == 1:
            return self._final[:count].clone()
        team.end((self._final if team.last else self._out)[:count, : self.width])
        if team.first:
            team.finish()
        return team.states(count).clone()

    def _fill(self, batch: Batch) -> None:
        tokens, positions, table_of, rows, counts = self._np
        count = len(batch.tokens)
        assert 0 < count <= self._max_tokens, "the scheduler keeps steps within the buffers"
        tokens[:count] = batch.tokens
        stride = self.tables.strides[0]
        at = 0
        for slot, start, length in batch.spans:
            if length == 1:
                positions[at] = start
                table_of[at] = slot * stride
            else:
                positions[at : at + length] = np.arange(start, start + length)
                table_of[at : at + length] = slot * stride
            at += length
            if length > 1 or start % native.BLOCK_SIZE == 0:
                block = int(self.tables[slot, (start + length - 1) // native.BLOCK_SIZE])
                self._ahead.prefault_to(block // native.BLOCKS_PER_STRIPE)
        if self._adapted:
            self._adapters[:count] = self.adapter_of[table_of[:count] // stride]
        if self._encoder is not None:
            slots = table_of[:count] // stride
            table_of_source, ends = self._np_sources
            table_of_source[:count] = slots * self.sources.strides[0]
            ends[:count] = self.source_lengths[slots] - 1
        num_rows = len(batch.rows)
        rows[:num_rows] = batch.rows
        counts[0], counts[1] = count, num_rows
        if self.team is not None:
            self.team.begin()
            if not self.team.first:
                self._x[:count] = self.team.states(count)
                return
        x = F.embedding(self._tokens[:count], self._embed).to(self._embed_dtype)
        if self._embed_scale != 1.0:
            x = x.float() * self._embed_scale
        if self._positions_table is not None:
            x = x.float() + self._positions_table[self._positions[:count]]
        self._x[:count] = x

    def release(self, slot: int) -> None:
        """Nothing is kept outside of the blocks."""

    def close(self) -> None:
        """Drop the weights and the cache."""
        if "_weights" in self.__dict__:
            self._weights.close()
        self.__dict__.clear()


class _Decoder(Layout):
    """Lays a decoder down: the tape of its body, and that of its head."""

    def __init__(
        self,
        owner: NativeRunner,
        d: Decoder,
        form: str,
        tokens: int,
        max_length: int,
        cache: str,
        adapters: Adapters | None,
    ) -> None:
        super().__init__(
            owner._weights, form, width=d.width, tokens=tokens, reach=max_length, cache=cache,
            tables=owner.tables.ctypes.data, adapters=adapters, team=owner.team, threads=owner.threads,
        )  # fmt: skip
        self.adapters_of = self.hold(self.adapter_of)
        self.keep += [owner.tables, owner.sources]
        self._sources, self._listens = owner.sources.ctypes.data, d.encoder is not None
        self.source_inputs = [self.hold(torch.zeros(tokens, dtype=torch.int64)) for _ in range(2)]
        # Each token's source: its table as an offset in bytes, and its last position.
        self._source_of, self._source_ends = self.source_inputs
        memory, self.pools = self.pool(owner.num_blocks, [x.attention for x in d.layers])
        self.ahead = PagePrefaulter(memory, chunk_bytes=self.pools[0][2])
        if d.embed_norm is not None:
            self.norm_into(d.embed_norm, self.x, self.x)
        speaks = owner.team is None or owner.team.last
        for number, layer in enumerate(d.layers):
            self.layer(layer, *self.pools[number], last=speaks and number == len(d.layers) - 1)
        self.out, self.body, self.head = self.x, self.segments, [[]]
        self.segments, self.tape, self.products = self.head, self.head[0], 0
        if owner.team is None:
            self.logits = self.hold(torch.empty(tokens, native.round_up(d.vocab, 32)))
        else:
            self.logits = owner.team.logits
        if not speaks:
            self.head, self.final = [], self.x
            self.best = torch.zeros(0, dtype=torch.int32), torch.zeros(0)
            return
        rows = self.prepare(d.norm, self.x, head_form(form), "head")
        first = 0 if self.team is None else self.team.first_token
        self.product(rows, d.head, self.logits[:, first:], head_form(form))
        if self.team is not None:
            self.call(self.kernels.barrier(), *self.team.meeting())
        self.final, self.best = rows.y, self._find_best(d.vocab)

    @property
    def lasts(self) -> Tensor:
        """A token sees the positions up to its own."""
        return self.positions

    def cross(self, cross: Cross, a: Attention, keys: Tensor, values: Tensor, stripe: int) -> None:
        """Attend to the source, whose keys and values lie in the layer's own pool."""
        heads = plain_heads(self.heads(a), cross.scale)
        queries = self.buffer("cross", cross.q.outputs)
        self.product(self.prepare(cross.norm, self.x, self.form), cross.q, queries, self.form)
        attended = self.attend_to(
            heads, queries, keys, values, stripe, self.vector(None, 1), self._sources, self._source_of,
            self._source_ends,
        )  # fmt: skip
        self.add(self.prepare(None, attended, self.form, "attended"), cross.out, None, cross.after)

    def pick(self, qkv: Tensor, width: int) -> Tensor:
        """Go on with the rows whose logits are wanted: the last layer's keys and values are all there.

        Returns their queries; everything else of the layout is theirs from now on.
        """
        queries = self.hold(torch.zeros(self.tokens, native.round_up(width, 16)))
        x = self.hold(torch.zeros_like(self.x))
        self.count += 8
        self._copy(qkv, queries, 4 * width)
        self._copy(self.x, x, 4 * self.x.shape[1])
        self.x = x
        self.positions, self.table_of = self._picked(self.positions), self._picked(self.table_of)
        if self.adapters is not None:
            self.adapter_of = self._picked(self.adapter_of)
        if self._listens:
            self._source_of, self._source_ends = map(self._picked, self.source_inputs)
        return queries

    def _picked(self, numbers: Tensor) -> Tensor:
        to = self.hold(torch.zeros_like(numbers))
        self._copy(numbers, to, 8)
        return to

    def _copy(self, rows: Tensor, to: Tensor, nbytes: int) -> None:
        """Copy ``nbytes`` of each wanted row."""
        strides = [t.stride(0) * t.element_size() for t in (rows, to)]
        self.call(self.kernels.gather_rows(), rows, strides[0], to, strides[1], self.count, self.wanted, nbytes)

    def _find_best(self, vocab: int) -> tuple[Tensor, Tensor]:
        places, values = torch.zeros(self.tokens, dtype=torch.int32), torch.zeros(self.tokens)
        if self.team is None or self.team.rank == 0:
            self.call(
                self.kernels.argmax(), self.logits, self.logits.stride(0) * 4, self.count, vocab, values, places
            )
        return self.hold(places), self.hold(values)
