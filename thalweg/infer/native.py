"""The fast runner on CPUs: a whole step of the model is one call of a tape of native kernels.

At load the weights are packed (``ops/native/panels.py``) and the model is laid down once as a list of kernel
calls on preallocated buffers; a step fills in tokens, positions and block tables and runs the list.  Nothing
in it depends on how many tokens there are or whose they are, so that prompts, pieces of prompts and decoding
tokens mix freely, and a token's result is the same, bit for bit, in any company.

Activations between layers are fp32.  What meets a packed weight is fp32, bf16 or int8 with a scale per row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.infer.batch import Batch
from thalweg.infer.describe import Attention, Decoder, Experts, Layer, Linear, Norm, Unsupported
from thalweg.infer.team import Team
from thalweg.infer.weights import Resident, Weights, head_form
from thalweg.ops import native
from thalweg.store.paged import PagedMemory

_KINDS = {"fp32": "fp32", "bf16": "bf16", "int8": "int8", "int4": "int8"}  # what the rows become


def check(decoder: Decoder, form: str, cache: str = "fp32") -> None:
    """Raise Unsupported unless this processor and this model suit the kernels."""
    for name in {form, "int8"} if cache == "int8" else {form}:
        if why := native.missing(name):
            raise Unsupported(why)
    if cache not in native.CACHES:
        raise Unsupported(f"a cache in {cache}")
    sizes = [decoder.width]
    for layer in decoder.layers:
        if isinstance(layer.mlp, Experts):
            raise Unsupported("a mixture of experts")
        a = layer.attention
        sizes += [a.dim, layer.mlp.down.inputs]
        if (a.q_norm is not None) != (a.k_norm is not None):
            raise Unsupported("a norm on queries or keys alone")
        if a.q_norm is not None and a.q_norm.style != "rms":
            raise Unsupported("layer norms on queries and keys")
    if any(size % 16 for size in sizes):
        raise Unsupported("a width that is no multiple of 16")


class NativeRunner:
    """Runs a :class:`Decoder` with weights in ``form``: fp32, bf16, int8 or int4 (the head then in int8).

    ``cache``: what keys and values are kept as, a name of ``native.CACHES``.
    ``weights`` keeps them (by default in memory).  The decoder's embedding is read row by row where it lies.
    ``team``: the ranks with which this one, which has a shard of the decoder, adds up its parts.
    ``threads``: 0 for as many as torch has.
    """

    block_size = native.BLOCK

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
        team: Team | None = None,
        threads: int = 0,
    ) -> None:
        check(decoder, form, cache)
        self._weights = weights or Resident(decoder, form)
        self.vocab, self.width, self.num_blocks = decoder.vocab, decoder.width, num_blocks
        self._softcap, self._embed_scale = decoder.logit_softcap, decoder.embed_scale
        self.team, self.threads = team, threads
        empty = np.zeros((num_slots, -(-max_length // self.block_size)), dtype=np.int32)
        self.tables = empty if team is None else team.tables
        self._max_tokens = max_tokens
        self._embed_dtype = torch.float32 if form == "fp32" else torch.bfloat16
        self._embed = decoder.embed if weights is not None else decoder.embed.to(self._embed_dtype)
        self._positions_table = None if decoder.positions is None else decoder.positions.float()
        laid = _Layout(self, decoder, form, max_tokens, max_length, cache)
        self._x, self._logits = laid.embedded, laid.logits
        self._tokens, self._positions, self._table_of, self._rows = laid.inputs
        self._counts = laid.counts
        # numpy views of the same memory: cheaper to fill, item by item
        self._np = [t.numpy() for t in (*laid.inputs, laid.counts)]
        self._body, self._head = laid.finish()
        self._final, self._best = laid.final, laid.best
        self._last = 0
        self.weight_bytes = laid.weight_bytes

    @torch.inference_mode()
    def run(self, batch: Batch) -> Tensor:
        """Return fp32 logits (len(batch.rows), vocab), overwritten by the next run."""
        self._fill(batch)
        self._weights.run(self._body, 0)
        self._last = count = len(batch.rows)
        if count == 0:
            self._weights.skip(len(self._body))
            return self._logits[:0, : self.vocab]
        self._weights.run(self._head, len(self._body))
        logits = self._logits[:count, : self.vocab]
        if self._softcap:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        return logits

    def best(self) -> tuple[list[int], list[float]]:
        """Return the most likely token of each row of the last run, and its logit."""
        places, values = self._best
        return places[: self._last].tolist(), values[: self._last].tolist()

    @torch.inference_mode()
    def hidden(self, batch: Batch) -> Tensor:
        """Return the final hidden states, fp32 (tokens, width)."""
        whole = Batch(batch.tokens, batch.spans, range(len(batch.tokens)))
        self._fill(whole)
        self._weights.run([*self._body, *self._head], 0)
        return self._final[: len(batch.tokens)].clone()

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
        num_rows = len(batch.rows)
        rows[:num_rows] = batch.rows
        counts[0], counts[1] = count, num_rows
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


class _Layout:
    """Lays a decoder down as instructions: packs weights, allocates buffers, names kernels."""

    def __init__(
        self, owner: NativeRunner, d: Decoder, form: str, tokens: int, max_length: int, cache: str
    ) -> None:
        self.form, self.kind, self.tokens, self.cache = form, _KINDS[form], tokens, cache
        self.kernels = native.Kernels()
        self.team, self.threads = owner.team, owner.threads
        self.keep: list[Any] = [owner.tables, owner.team]
        self.weights, self.weight_bytes = owner._weights, 0
        self.inputs = [torch.zeros(tokens, dtype=torch.int64) for _ in range(4)]
        self.counts = torch.zeros(2, dtype=torch.int64)
        self.count = self.counts.data_ptr()  # the address of how many rows there are
        self._tables = owner.tables.ctypes.data
        self.x = self.embedded = torch.zeros(tokens, d.width)
        self._ready: dict[tuple[int, str, str], native.Rows] = {}
        self._tables_of_rotary: dict[int, tuple[Tensor, Tensor]] = {}
        self.tape: list[native.Call] = []
        self.body, self.head = [self.tape], [[]]
        self.products = 0  # on the present tape
        # One piece, on huge pages: blocks lie anywhere, and with small pages each would miss the TLB.
        room = sum(x.attention.kv_heads * self._heads(x.attention).head_bytes for x in d.layers)
        self.cache_memory, self.cache_used = PagedMemory(2 * owner.num_blocks * room), 0
        self.scratch = torch.zeros(256, native.padded(max_length, 16))
        if d.embed_norm is not None:
            self._norm_into(d.embed_norm, self.x, self.x)
        for number, layer in enumerate(d.layers):
            self._layer(layer, owner.num_blocks, last=number == len(d.layers) - 1)
        self.tape, self.products = self.head[0], 0
        self.logits = (
            torch.empty(tokens, native.padded(d.vocab, 32)) if self.team is None else self.team.logits
        )
        self.final = self._finish(d, head_form(form))
        self.best = self._find_best(d.vocab)

    def _hold(self, tensor: Tensor) -> Tensor:
        self.keep.append(tensor)
        return tensor

    def _vector(self, values: Tensor | None, size: int) -> Tensor:
        """An fp32 vector, padded with zeros to whole panels."""
        out = torch.zeros(native.padded(size, 32))
        if values is not None:
            out[: len(values)] = values
        return self._hold(out)

    def _rows_buffer(self, width: int, form: str, label: str) -> native.Rows:
        key = (width, _KINDS[form], label)
        if key not in self._ready:
            y = self._hold(native.row_buffer(self.tokens, width))
            self._ready[key] = native.Rows(self.tokens, width, _KINDS[form], y)
            self.keep.append(self._ready[key])
        return self._ready[key]

    def _prepare(self, norm: Norm | None, x: Tensor, form: str, label: str = "") -> native.Rows:
        """Normalise rows of x (or pass them on) and make them ready for weights of a form."""
        width = x.shape[1]
        rows = self._rows_buffer(width, form, label)
        self.tape.append(self._norm_call(norm, x, rows))
        return rows

    def _norm_call(self, norm: Norm | None, x: Tensor, rows: native.Rows) -> native.Call:
        width = x.shape[1]
        weight = self._vector(None if norm is None else norm.weight, width)
        bias = self._vector(None if norm is None else norm.bias, width)
        eps = self._hold(torch.tensor([0.0 if norm is None else norm.eps], dtype=torch.float32))
        style = "none" if norm is None else norm.style
        return native.Call(self.kernels.norm(style, rows.kind), [
            x, x.stride(0) * 4, weight, bias, eps, self.count, width, *rows.arguments(),
        ])  # fmt: skip

    def _norm_into(self, norm: Norm, x: Tensor, out: Tensor) -> None:
        rows = native.Rows(self.tokens, x.shape[1], "fp32", out)
        self.keep.append(rows)
        self.tape.append(self._norm_call(norm, x, rows))

    def _product(
        self, rows: native.Rows, layer: Linear, out: Tensor, form: str, add: bool = False, head: bool = False
    ) -> None:
        for packed in self.weights.put(layer, form):
            if packed.fresh and self.products:
                self.tape, self.products = [], 0
                (self.head if head else self.body).append(self.tape)
            self.products += 1
            self.weight_bytes += packed.nbytes
            outputs = packed.stop - packed.start
            bias = None if layer.bias is None else layer.bias[packed.start : packed.stop]
            panels = native.padded(outputs, 32) // native.FORMATS[form].columns
            columns = out[:, packed.start :]
            self.tape.append(native.Call(self.kernels.product(form), [
                rows.ready, packed.weight, columns, self.count, native.padded(rows.width), panels,
                rows.stride, out.stride(0) * 4, self._vector(bias, outputs), columns if add else 0,
                rows.scale, packed.scale, *rows.sums_for(form),
            ]))  # fmt: skip

    def _dense(self, label: str, columns: int) -> Tensor:
        """Rows one right after the other, as attention writes them."""
        key = (columns, label, "dense")
        if key not in self._ready:
            self._ready[key] = self._hold(torch.zeros(self.tokens, columns))  # type: ignore[assignment]
        return self._ready[key]  # type: ignore[return-value]

    def _buffer(self, label: str, columns: int) -> Tensor:
        key = (columns, label, "fp32")
        if key not in self._ready:
            tensor = self._hold(torch.zeros(self.tokens, native.padded(columns, 32)))
            self._ready[key] = tensor  # type: ignore[assignment]
        return self._ready[key]  # type: ignore[return-value]

    def _layer(self, layer: Layer, num_blocks: int, last: bool) -> None:
        a, m = layer.attention, layer.mlp
        assert not isinstance(m, Experts)
        form = self.form
        qkv = self._buffer("qkv", a.qkv.outputs)
        self._product(self._prepare(layer.norm1, self.x, form), a.qkv, qkv, form)
        attended = self._dense("attended", a.heads * a.dim)
        self._attention(a, qkv, attended, num_blocks, last)
        inner = m.down.inputs
        up = self._buffer("up", m.up.outputs)
        rows = self._prepare(None, attended, form, "attended")
        if layer.parallel:
            self._product(self._prepare(layer.norm2, self.x, form), m.up, up, form)
        self._add(rows, a.out, layer.post1)
        if not layer.parallel:
            self._product(self._prepare(layer.norm2, self.x, form), m.up, up, form)
        rows = self._rows_buffer(inner, form, "inner")
        self.tape.append(native.Call(self.kernels.activate(m.activation, m.gated, rows.kind), [
            up, up.stride(0) * 4, self.count, inner, *rows.arguments(),
        ]))  # fmt: skip
        self._add(rows, m.down, layer.post2)

    def _add(self, rows: native.Rows, layer: Linear, post: Norm | None) -> None:
        """x += layer(rows), through a norm where there is one."""
        if self.team is None and post is None and self.width_fits():
            self._product(rows, layer, self.x, self.form, add=True)
            return
        part = self._buffer("part", layer.outputs)
        if self.team is None:
            self._product(rows, layer, part, self.form)
        else:
            self._joined(self.team, rows, layer, part)
        if post is not None:
            self._norm_into(post, part[:, : self.x.shape[1]], part)
        self.tape.append(native.Call(self.kernels.add(), [self.x, part, self.count, self.x.shape[1],
                                                          part.stride(0) * 4]))  # fmt: skip

    def _joined(self, team: Team, rows: native.Rows, layer: Linear, out: Tensor) -> None:
        """Out = the sum over the ranks of what the layer gives."""
        every = team.parts()
        self._product(rows, layer, every[team.rank], self.form)
        self.tape.append(native.Call(self.kernels.meet(), team.meeting()))
        self.tape.append(native.Call(self.kernels.join(), [
            out, out.stride(0) * 4, every, every.stride(1) * 4, every.stride(0) * 4, team.size, self.count,
            native.padded(layer.outputs, 16),
        ]))  # fmt: skip

    def width_fits(self) -> bool:
        """Whether whole panels fit into the rows of x."""
        return self.x.shape[1] % 32 == 0

    def _attention(self, a: Attention, qkv: Tensor, out: Tensor, num_blocks: int, last: bool) -> None:
        heads = self._heads(a)
        cos, sin = self._rotary_tables(a)
        each = num_blocks * heads.head_bytes
        keys, values = (self._room(a.kv_heads * each) for _ in range(2))
        q_norm = self._vector(None if a.q_norm is None else a.q_norm.weight, a.dim)
        k_norm = self._vector(None if a.k_norm is None else a.k_norm.weight, a.dim)
        eps = self._hold(torch.tensor([0.0 if a.q_norm is None else a.q_norm.eps], dtype=torch.float32))
        _, positions, table_of, _ = self.inputs
        self.tape.append(native.Call(self.kernels.rotate(heads), [
            qkv, qkv.stride(0) * 4, self.count, positions, self._tables, keys, values, cos, sin, q_norm,
            k_norm, eps, table_of, each,
        ]))  # fmt: skip
        queries = qkv
        if last:
            queries, positions, table_of = self._pick(qkv, a.heads * a.dim)
        slopes = self._vector(a.slopes, a.heads)
        self.tape.append(native.Call(self.kernels.attend(heads), [
            queries, queries.stride(0) * 4, self.count, positions, self._tables, keys, values, out,
            self.scratch, self.scratch.stride(0) * 4, slopes, table_of, each,
        ]))  # fmt: skip

    def _pick(self, qkv: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Go on with the rows whose logits are wanted: the last layer's keys and values are all there.

        Returns their queries, positions and tables; ``x`` and ``count`` are theirs from now on.
        """
        queries = self._hold(torch.zeros(self.tokens, native.padded(width, 16)))
        x, positions, table_of = (
            self._hold(torch.zeros_like(t)) for t in (self.x, self.inputs[1], self.inputs[2])
        )
        self.count += 8
        for rows, to, columns in ((qkv, queries, width), (self.x, x, self.x.shape[1])):
            self.tape.append(native.Call(self.kernels.pick(), [
                rows, rows.stride(0) * 4, to, to.stride(0) * 4, self.count, self.inputs[3], 4 * columns,
            ]))  # fmt: skip
        for numbers, to in ((self.inputs[1], positions), (self.inputs[2], table_of)):
            self.tape.append(native.Call(self.kernels.pick(), [
                numbers, 8, to, 8, self.count, self.inputs[3], 8,
            ]))  # fmt: skip
        self.x = x
        return queries, positions, table_of

    def _heads(self, a: Attention) -> native.Heads:
        pairs = 0 if a.rotary is None else a.rotary.cos.shape[1]
        return native.Heads(
            heads=a.heads, kv_heads=a.kv_heads, dim=a.dim, scale=a.scale, cache=self.cache,
            paired=not native.missing("bf16"),
            rotary=2 * pairs, interleaved=a.rotary is not None and a.rotary.interleaved,
            qk_norm=a.q_norm is not None, window=a.window, softcap=a.softcap, alibi=a.slopes is not None,
        )  # fmt: skip

    def _room(self, nbytes: int) -> Tensor:
        """Take bytes of the cache's memory."""
        start = self.cache_used
        self.cache_used += nbytes
        return self._hold(self.cache_memory.tensor(start, (nbytes,), torch.uint8))

    def _rotary_tables(self, a: Attention) -> tuple[Tensor, Tensor]:
        if a.rotary is None:
            return self._vector(None, 1), self._vector(None, 1)
        key = id(a.rotary)
        if key not in self._tables_of_rotary:
            made = a.rotary.cos.float().contiguous(), a.rotary.sin.float().contiguous()
            self._tables_of_rotary[key] = (self._hold(made[0]), self._hold(made[1]))
        return self._tables_of_rotary[key]

    def _finish(self, d: Decoder, form: str) -> Tensor:
        rows = self._prepare(d.norm, self.x, form, "head")
        if self.team is None:
            self._product(rows, d.head, self.logits, form, head=True)
            return rows.y
        self._product(rows, d.head, self.logits[:, self.team.first_token :], form, head=True)
        self.tape.append(native.Call(self.kernels.meet(), self.team.meeting()))
        return rows.y

    def _find_best(self, vocab: int) -> tuple[Tensor, Tensor]:
        places, values = torch.zeros(self.tokens, dtype=torch.int32), torch.zeros(self.tokens)
        if self.team is None or self.team.rank == 0:
            self.tape.append(native.Call(self.kernels.best(), [
                self.logits, self.logits.stride(0) * 4, self.count, vocab, values, places,
            ]))  # fmt: skip
        return self._hold(places), self._hold(values)

    def finish(self) -> tuple[list[native.Tape], list[native.Tape]]:
        """Compile the kernels and return the tapes of the body and of the head, a list of segments each."""
        library = self.kernels.compile()
        keep = [
            *self.keep,
            self.inputs,
            self.counts,
            self.x,
            self.embedded,
            self.logits,
            self.scratch,
            library,
        ]
        body, head = (
            [native.lay(calls, library, keep, self.threads) for calls in part]
            for part in (self.body, self.head)
        )
        return body, head
