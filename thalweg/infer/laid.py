"""What is laid down on a tape, and the parts that decoders and encoders share.

A layout packs weights, allocates buffers and names kernels, one call after the other; :meth:`Layout.lay`
makes tapes of them.  Buffers have room for ``tokens`` rows; how many a step has stands in ``counts``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thalweg.infer.adapters import Adapters, Pair
from thalweg.infer.describe import MLP, Attention, Cross, Layer, Linear, Norm
from thalweg.infer.team import Team
from thalweg.infer.weights import Weights
from thalweg.ops import native
from thalweg.store.paged import EvictableMemory

KINDS = {"fp32": "fp32", "bf16": "bf16", "int8": "int8", "int4": "int8"}  # what the rows become


class Layout:
    """Lays a stack of layers down as instructions.

    ``reach``: the longest sequence; ``tables``: address of the block tables of self-attention.
    """

    def __init__(
        self,
        weights: Weights,
        form: str,
        *,
        width: int,
        tokens: int,
        reach: int,
        cache: str,
        tables: int,
        adapters: Adapters | None = None,
        team: Team | None = None,
        threads: int = 0,
    ) -> None:
        self.threads = threads
        self.team = None if team is None or team.size == 1 else team  # whose parts are to be added up
        self.adapters, self.adapter_of = adapters, torch.full((tokens,), -1, dtype=torch.int64)
        self.form, self.tokens, self.cache, self.reach = form, tokens, cache, reach
        self.kernels = native.KernelSet()
        self.keep: list[Any] = [team]
        self.weights, self.weight_bytes = weights, 0
        self.inputs = [torch.zeros(tokens, dtype=torch.int64) for _ in range(4)]
        _, self.positions, self.table_of, self.wanted = self.inputs
        self.counts = torch.zeros(2, dtype=torch.int64)
        self.count = self.counts.data_ptr()  # the address of how many rows there are
        self.tables = tables
        self.x = self.embedded = torch.zeros(tokens, width)
        self._ready: dict[tuple[int, str, str], native.ActivationBuffer] = {}
        self._buffers: dict[tuple[int, str], Tensor] = {}
        self._attended: dict[int, Tensor] = {}
        self._tables_of_rotary: dict[int, tuple[Tensor, Tensor]] = {}
        self._biases: dict[int, Tensor] = {}
        self.tape: list[native.Instruction] = []
        self.segments = [self.tape]
        self.products = 0  # on the present tape
        self.scratch = torch.zeros(256, native.round_up(reach, 16))

    def hold(self, tensor: Tensor) -> Tensor:
        """Keep a tensor as long as the tapes live."""
        self.keep.append(tensor)
        return tensor

    def call(self, kernel: str, *arguments: Any) -> None:
        """Lay a call down."""
        self.tape.append(native.Instruction(kernel, arguments))

    def vector(self, values: Tensor | None, size: int) -> Tensor:
        """Return an fp32 vector, padded with zeros to whole panels."""
        out = torch.zeros(native.round_up(size, 32))
        if values is not None:
            out[: len(values)] = values
        return self.hold(out)

    def rows_buffer(self, width: int, form: str, label: str) -> native.ActivationBuffer:
        """Return the buffer of that name for rows that meet weights of a form."""
        key = (width, KINDS[form], label)
        if key not in self._ready:
            y = self.hold(native.allocate_rows(self.tokens, width))
            self._ready[key] = native.ActivationBuffer(self.tokens, width, KINDS[form], y)
            self.keep.append(self._ready[key])
        return self._ready[key]

    def buffer(self, label: str, columns: int) -> Tensor:
        """Return the fp32 buffer of that name, its columns padded to whole panels."""
        key = (columns, label)
        if key not in self._buffers:
            self._buffers[key] = self.hold(torch.zeros(self.tokens, native.round_up(columns, 32)))
        return self._buffers[key]

    def prepare(self, norm: Norm | None, x: Tensor, form: str, label: str = "") -> native.ActivationBuffer:
        """Normalise rows of x (or pass them on) and make them ready for weights of a form."""
        rows = self.rows_buffer(x.shape[1], form, label)
        self._norm(norm, x, rows)
        return rows

    def _norm(self, norm: Norm | None, x: Tensor, rows: native.ActivationBuffer) -> None:
        width = x.shape[1]
        weight = self.vector(None if norm is None else norm.weight, width)
        bias = self.vector(None if norm is None else norm.bias, width)
        eps = self.hold(torch.tensor([0.0 if norm is None else norm.eps], dtype=torch.float32))
        style = "none" if norm is None else norm.style
        self.call(
            self.kernels.norm(style, rows.kind),
            x, x.stride(0) * 4, weight, bias, eps, self.count, width, *rows.output_args(),
        )  # fmt: skip

    def norm_into(self, norm: Norm, x: Tensor, out: Tensor) -> None:
        """Normalise rows of x; ``out`` may be x itself."""
        rows = native.ActivationBuffer(self.tokens, x.shape[1], "fp32", out)
        self.keep.append(rows)
        self._norm(norm, x, rows)

    def product(self, rows: native.ActivationBuffer, layer: Linear, out: Tensor, form: str, add: bool = False) -> None:
        """Multiply with a layer's weights; ``add``: to what is in ``out``."""
        for packed in self.weights.put(layer, form):
            if packed.fresh and self.products:
                self.tape, self.products = [], 0
                self.segments.append(self.tape)
            self.products += 1
            self.weight_bytes += packed.nbytes
            outputs = packed.stop - packed.start
            bias = None if layer.bias is None else layer.bias[packed.start : packed.stop]
            panels = native.round_up(outputs, 32) // native.WEIGHT_FORMATS[form].panel_columns
            columns = out[:, packed.start :]
            self.call(
                self.kernels.gemm(form),
                rows.operand, packed.weight, columns, self.count, native.round_up(rows.width), panels,
                rows.operand_stride, out.stride(0) * 4, self.vector(bias, outputs), columns if add else 0,
                rows.scale, packed.scale, *rows.sum_args(form),
            )  # fmt: skip
        pairs = None if self.adapters is None else self.adapters.of(layer)
        if pairs is not None:
            self._adapt(rows, pairs, out, layer.outputs)

    def _adapt(self, rows: native.ActivationBuffer, pairs: Sequence[Pair | None], out: Tensor, outputs: int) -> None:
        """Add to the product what each row's adapter says."""
        k, columns = native.round_up(rows.width, 16), native.round_up(outputs, 16)
        table = self.hold(torch.zeros(len(pairs), 3, dtype=torch.int64))
        largest = max(len(pair[0]) for pair in pairs if pair is not None)
        for entry, pair in zip(table, pairs, strict=True):
            if pair is not None:
                down, up = torch.zeros(len(pair[0]), k), torch.zeros(len(pair[0]), columns)
                down[:, : rows.width], up[:, :outputs] = pair
                self.keep += [down, up]
                entry[:] = torch.tensor([down.data_ptr(), up.data_ptr(), len(down)])
        low = self.buffer("low", largest)
        self.call(
            self.kernels.lora_shrink(),
            rows.y, rows.y.stride(0) * 4, self.count, k, self.adapter_of, table, low, low.stride(0) * 4,
            largest,
        )  # fmt: skip
        self.call(
            self.kernels.lora_expand(),
            out, out.stride(0) * 4, self.count, columns, self.adapter_of, table, low, low.stride(0) * 4,
        )  # fmt: skip

    def add(self, rows: native.ActivationBuffer, layer: Linear, post: Norm | None, after: Norm | None) -> None:
        """x += layer(rows), through a norm ``post`` where there is one; then x through ``after``."""
        width = self.x.shape[1]
        if self.team is None and post is None and width % 32 == 0:  # whole panels fit into the rows of x
            self.product(rows, layer, self.x, self.form, add=True)
        else:
            part = self.buffer("part", layer.outputs)
            if self.team is None:
                self.product(rows, layer, part, self.form)
            else:
                self._joined(self.team, rows, layer, part)
            if post is not None:
                self.norm_into(post, part[:, :width], part)
            self.call(self.kernels.add(), self.x, part, self.count, width, part.stride(0) * 4)
        if after is not None:
            self.norm_into(after, self.x, self.x)

    def _joined(self, team: Team, rows: native.ActivationBuffer, layer: Linear, out: Tensor) -> None:
        """Out = the sum over the ranks of what the layer gives."""
        every = team.parts()
        self.product(rows, layer, every[team.rank], self.form)
        self.call(self.kernels.barrier(), *team.meeting())
        self.call(
            self.kernels.reduce_sum(),
            out, out.stride(0) * 4, every, every.stride(1) * 4, every.stride(0) * 4, team.size, self.count,
            native.round_up(layer.outputs, 16),
        )  # fmt: skip

    def layer(self, layer: Layer, keys: Tensor, values: Tensor, stripe: int, last: bool = False) -> None:
        """Lay a layer down whose blocks lie in ``keys`` and ``values``, in stripes of ``stripe`` bytes.

        ``last``: from its attention on, go on with the rows that are wanted.
        """
        a, m, form = layer.attention, layer.mlp, self.form
        assert isinstance(m, MLP), "mixtures have runners of their own"
        qkv = self.buffer("qkv", a.qkv.outputs)
        self.product(self.prepare(layer.norm1, self.x, form), a.qkv, qkv, form)
        heads = self.heads(a)
        self.rotate(heads, a, qkv, keys, values, stripe, self.tables, self.table_of)
        queries = self.pick(qkv, a.heads * a.dim) if last else qkv
        attended = self.attend(heads, a, queries, keys, values, stripe)
        up = self.buffer("up", m.up.outputs)
        rows = self.prepare(None, attended, form, "attended")
        if layer.parallel:
            self.product(self.prepare(layer.norm2, self.x, form), m.up, up, form)
        self.add(rows, a.out, layer.post1, layer.after1)
        if layer.cross is not None:
            self.cross(layer.cross, a, keys, values, stripe)
        if not layer.parallel:
            self.product(self.prepare(layer.norm2, self.x, form), m.up, up, form)
        rows = self.rows_buffer(m.down.inputs, form, "inner")
        self.call(
            self.kernels.activate(m.activation, m.gated, rows.kind),
            up, up.stride(0) * 4, self.count, m.down.inputs, *rows.output_args(),
        )  # fmt: skip
        self.add(rows, m.down, layer.post2, layer.after2)

    def cross(self, cross: Cross, a: Attention, keys: Tensor, values: Tensor, stripe: int) -> None:
        """Attend to a source; decoders do."""
        raise NotImplementedError

    def pick(self, qkv: Tensor, width: int) -> Tensor:
        """Go on with the rows that are wanted, of queries and of everything else; decoders do."""
        raise NotImplementedError

    @property
    def lasts(self) -> Tensor:
        """The last position that each token sees."""
        raise NotImplementedError

    def rotate(
        self, heads: native.AttentionShape, a: Attention, qkv: Tensor, keys: Tensor, values: Tensor, stripe: int,
        tables: int, table_of: Tensor,
    ) -> None:  # fmt: skip
        """Rotate queries and keys; store keys and values in the blocks of ``tables``."""
        cos, sin = self._rotary_tables(a)
        q_norm = self.vector(None if a.q_norm is None else a.q_norm.weight, a.dim)
        k_norm = self.vector(None if a.k_norm is None else a.k_norm.weight, a.dim)
        eps = self.hold(torch.tensor([0.0 if a.q_norm is None else a.q_norm.eps], dtype=torch.float32))
        self.call(
            self.kernels.rope_and_store_kv(heads),
            qkv, qkv.stride(0) * 4, self.count, self.positions, tables, keys, values, cos, sin, q_norm,
            k_norm, eps, table_of, stripe,
        )  # fmt: skip

    def attend(
        self, heads: native.AttentionShape, a: Attention, queries: Tensor, keys: Tensor, values: Tensor, stripe: int
    ) -> Tensor:
        """Let tokens attend to their own sequence; returns rows (tokens, heads * dim)."""
        return self.attend_to(
            heads, queries, keys, values, stripe, self._bias(a), self.tables, self.table_of, self.lasts
        )

    def attend_to(
        self, heads: native.AttentionShape, queries: Tensor, keys: Tensor, values: Tensor, stripe: int, bias: Tensor,
        tables: int, table_of: Tensor, lasts: Tensor,
    ) -> Tensor:  # fmt: skip
        """Let tokens attend to the blocks of any tables."""
        width = heads.num_heads * heads.head_dim
        if width not in self._attended:  # the kernel writes heads one after the other, rows unpadded
            self._attended[width] = self.hold(torch.zeros(self.tokens, width))
        out = self._attended[width]
        self.call(
            self.kernels.paged_attention(heads),
            queries, queries.stride(0) * 4, self.count, self.positions, tables, keys, values, out,
            self.scratch, self.scratch.stride(0) * 4, bias, table_of, stripe, lasts,
        )  # fmt: skip
        return out

    def _bias(self, a: Attention) -> Tensor:
        if a.relative is None:
            return self.vector(a.slopes, a.heads)
        if id(a.relative) not in self._biases:
            self._biases[id(a.relative)] = self.hold(a.relative.table(self.reach))
        return self._biases[id(a.relative)]

    def heads(self, a: Attention) -> native.AttentionShape:
        """Return the shape of an attention."""
        pairs = 0 if a.rotary is None else a.rotary.cos.shape[1]
        return native.AttentionShape(
            num_heads=a.heads, num_kv_heads=a.kv_heads, head_dim=a.dim, scale=a.scale, kv_dtype=self.cache,
            bf16_pairs=not native.unsupported_reason("bf16"),
            rotary_dim=2 * pairs, rotary_interleaved=a.rotary is not None and a.rotary.interleaved,
            qk_norm=a.q_norm is not None, sliding_window=a.window, softcap=a.softcap, alibi=a.slopes is not None,
            bias_span=0 if a.relative is None else self.reach,
        )  # fmt: skip

    def pool(
        self, num_blocks: int, attentions: Sequence[Attention]
    ) -> tuple[EvictableMemory, list[tuple[Tensor, Tensor, int]]]:
        """Return memory, and in it each layer's room for keys and values with the bytes from one stripe of
        blocks to the next.

        One piece, on huge pages: blocks lie anywhere, and with small pages each would miss the TLB.
        """
        sizes = [a.kv_heads * native.BLOCKS_PER_STRIPE * self.heads(a).head_bytes for a in attentions]
        stripe = 2 * sum(sizes)
        total = -(-num_blocks // native.BLOCKS_PER_STRIPE) * stripe
        memory, at, found = EvictableMemory(total), 0, []
        self.keep.append(memory)
        for nbytes in sizes:
            keys, values = (
                memory.tensor(start, (total - start,), torch.uint8) for start in (at, at + nbytes)
            )
            found.append((keys, values, stripe))
            at += 2 * nbytes
        return memory, found

    def _rotary_tables(self, a: Attention) -> tuple[Tensor, Tensor]:
        if a.rotary is None:
            return self.vector(None, 1), self.vector(None, 1)
        key = id(a.rotary)
        if key not in self._tables_of_rotary:
            made = a.rotary.cos.float().contiguous(), a.rotary.sin.float().contiguous()
            self._tables_of_rotary[key] = (self.hold(made[0]), self.hold(made[1]))
        return self._tables_of_rotary[key]

    def lay(self, *parts: list[list[native.Instruction]]) -> list[list[native.Program]]:
        """Compile the kernels and return the tapes of each part's segments."""
        library = self.kernels.compile()
        keep = [*self.keep, self.inputs, self.counts, self.x, self.embedded, self.scratch, library]
        return [[native.build_program(calls, library, keep, self.threads) for calls in part] for part in parts]


def plain_heads(heads: native.AttentionShape, scale: float) -> native.AttentionShape:
    """Return heads of the same shape and cache without anything that depends on positions."""
    return replace(
        heads, scale=scale, rotary=0, interleaved=False, qk_norm=False, window=0, softcap=0.0, alibi=False,
        reach=0,
    )  # fmt: skip
