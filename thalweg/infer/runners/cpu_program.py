"""Builds programs of CPU kernels: the parts that decoders and encoders share.

A builder packs weights, allocates buffers and emits kernel calls one after the other; :meth:`ProgramBuilder.build`
compiles them into programs.  Buffers have ``max_tokens`` rows; ``counts`` holds how many a step uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thalweg.device import resolve_device
from thalweg.infer.config import EngineConfig
from thalweg.infer.lora import LoraWeights
from thalweg.infer.models import spec as specs
from thalweg.infer.models.spec import AttentionSpec, DecoderSpec, EncoderSpec, LinearSpec, NormSpec
from thalweg.infer.parallel.shm_comm import ShmCommunicator
from thalweg.infer.precision import get_weight_format
from thalweg.infer.runners.base import UNDESCRIBED, RunnerRequest
from thalweg.infer.runners.packed_weights import WeightStore
from thalweg.ops import cpu_kernels
from thalweg.storage_io.evictable_memory import EvictableMemory

# A layer's keys and values, and the bytes from one stripe of blocks to the next.
KVRegion = tuple[Tensor, Tensor, int]


def cpu_unsupported_reason(
    spec: DecoderSpec | EncoderSpec | None, config: EngineConfig, kv_cache_dtype: str
) -> str | None:
    """Return why the CPU kernels cannot run a described model as the config asks, or None."""
    if resolve_device(config.device).type != "cpu":
        return f"the CPU kernels do not run on {config.device}"
    weight_format = get_weight_format(config)
    if weight_format == "fp16":
        return "the CPU kernels have no fp16"
    if spec is None:
        return UNDESCRIBED
    return kernels_unsupported_reason(spec, kv_cache_dtype)


def kernels_unsupported_reason(spec: DecoderSpec | EncoderSpec, kv_cache_dtype: str) -> str | None:
    """Return why this processor or this model does not suit the kernels, or None."""
    if reason := cpu_kernels.unsupported_reason():
        return reason
    if kv_cache_dtype not in cpu_kernels.KV_DTYPE_BYTES:
        return f"a cache in {kv_cache_dtype}"
    encoder = spec.encoder if isinstance(spec, DecoderSpec) else None
    sizes = [spec.hidden_size] if encoder is None else [spec.hidden_size, encoder.hidden_size]
    for layer in [*spec.layers, *(encoder.layers if encoder is not None else ())]:
        if isinstance(layer.mlp, specs.MoESpec):
            return "a mixture of experts"
        a = layer.attention
        sizes += [a.head_dim, layer.mlp.down.in_features]
        if (a.q_norm is not None) != (a.k_norm is not None):
            return "a norm on queries or keys alone"
        if a.q_norm is not None and a.q_norm.norm_type != "rms":
            return "layer norms on queries and keys"
        cross = layer.cross_attention
        if cross is not None and cross.kv.out_features != 2 * a.num_kv_heads * a.head_dim:
            return "cross attention with other heads than self-attention"
    return "a width that is no multiple of 16" if any(size % 16 for size in sizes) else None


class ProgramBuilder:
    """Turns a stack of layers into instructions.

    ``weights``: where the request's are packed; ``block_tables``: those of self-attention.
    """

    def __init__(
        self, request: RunnerRequest, weights: WeightStore, max_tokens: int, kv_cache_dtype: str, block_tables: Any
    ) -> None:
        comm = request.comm
        self.num_threads = 0 if comm is None else comm.group.num_threads  # 0: as many as torch has
        self.comm = comm if isinstance(comm, ShmCommunicator) else None  # several ranks: partial results are summed
        self.lora, self.row_lora_ids = request.lora, torch.full((max_tokens,), -1, dtype=torch.int64)
        self.weight_format, self.max_length = request.weight_format, request.max_model_len
        self.max_tokens, self.kv_cache_dtype = max_tokens, kv_cache_dtype
        self.kernels = cpu_kernels.KernelSet()
        self._made: dict[tuple[Any, ...], Any] = {}
        self.workspace: list[Tensor] = []  # what a step leaves behind in it nobody reads
        self.refs: list[Any] = [comm, block_tables, self._made, self.workspace]
        self.weights, self.weight_bytes = weights, 0
        self.inputs = [torch.zeros(max_tokens, dtype=torch.int64) for _ in range(4)]
        _, self.positions, self.table_offsets, self.logit_rows = self.inputs
        self.last_visible = self.positions  # the last position that each token sees; of a decoder's its own
        self.counts = torch.zeros(2, dtype=torch.int64)
        self.count_address = self.counts.data_ptr()  # the address of how many rows there are
        self.tables_address = block_tables.ctypes.data
        self.vectors: list[tuple[Tensor, Tensor]] = []  # a description's vector, and where kernels read it
        self.x = self.embedded = self.allocate_workspace(max_tokens, request.spec.hidden_size)
        self.current_segment: list[cpu_kernels.Instruction] = []
        self.segments = [self.current_segment]
        self.num_matmuls = 0  # in the current segment
        self.scratch = torch.zeros(cpu_kernels.MAX_THREADS, cpu_kernels.round_up(self.max_length, 16))  # a row a thread

    def keep_alive(self, tensor: Tensor) -> Tensor:
        """Keep a tensor as long as the programs live."""
        self.refs.append(tensor)
        return tensor

    def allocate_workspace(self, *shape: int) -> Tensor:
        """Return zeros whose memory may be given back between steps: they are zeros again then."""
        self.workspace.append(torch.zeros(shape))
        return self.workspace[-1]

    def reload(self, old: DecoderSpec, new: DecoderSpec) -> None:
        """Put the weights of a description of the same structure where those of the program's own are."""
        for layer, replacement in zip(specs.list_linears(old), specs.list_linears(new), strict=True):
            self.weights.refill(layer, replacement)
        replacements = dict(zip(map(id, specs.list_tensors(old)), specs.list_tensors(new), strict=True))
        for number, (vector, copy) in enumerate(self.vectors):
            replacement = replacements[id(vector)]
            copy[: len(replacement)] = replacement
            self.vectors[number] = replacement, copy

    def _make_once(self, *key: Any, make: Callable[[], Any]) -> Any:
        """Return what layers share, which is made for the first of them and lives as long as the programs."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def emit_call(self, kernel: str, *arguments: Any) -> None:
        """Append a call."""
        self.current_segment.append(cpu_kernels.Instruction(kernel, arguments))

    def padded_vector(self, values: Tensor | None, size: int) -> Tensor:
        """Return an fp32 vector, padded with zeros to whole panels."""
        out = torch.zeros(cpu_kernels.round_up(size, 32))
        if values is not None:
            out[: len(values)] = values
            self.vectors.append((values, out))
        return self.keep_alive(out)

    def operand_buffer(self, width: int, weight_format: str, label: str) -> cpu_kernels.ActivationBuffer:
        """Return the buffer of that name for rows that meet weights of a format."""

        def make() -> cpu_kernels.ActivationBuffer:
            y = cpu_kernels.allocate_rows(self.max_tokens, width)
            rows = cpu_kernels.ActivationBuffer(self.max_tokens, width, kind, y)
            self.workspace += [rows.y, rows.operand]
            return rows

        kind = self.kernels.isa.operand_kind(weight_format)
        return self._make_once("operand", width, kind, label, make=make)

    def buffer(self, label: str, columns: int) -> Tensor:
        """Return the fp32 buffer of that name, its columns padded to whole panels."""
        shape = self.max_tokens, cpu_kernels.round_up(columns, 32)
        return self._make_once("buffer", columns, label, make=lambda: self.allocate_workspace(*shape))

    def norm_and_quantize(
        self, norm: NormSpec | None, x: Tensor, weight_format: str, label: str = ""
    ) -> cpu_kernels.ActivationBuffer:
        """Normalise rows of x (or pass them on) and quantize them for weights of a format."""
        rows = self.operand_buffer(x.shape[1], weight_format, label)
        self._emit_norm(norm, x, rows)
        return rows

    def _emit_norm(self, norm: NormSpec | None, x: Tensor, rows: cpu_kernels.ActivationBuffer) -> None:
        width = x.shape[1]
        weight = self.padded_vector(None if norm is None else norm.weight, width)
        bias = self.padded_vector(None if norm is None else norm.bias, width)
        eps = self.keep_alive(torch.tensor([0.0 if norm is None else norm.eps], dtype=torch.float32))
        style = "none" if norm is None else norm.norm_type
        self.emit_call(
            self.kernels.norm(style, rows.kind),
            x, x.stride(0) * 4, weight, bias, eps, self.count_address, width, *rows.output_args(),
        )  # fmt: skip

    def norm_into(self, norm: NormSpec, x: Tensor, out: Tensor) -> None:
        """Normalise rows of x; ``out`` may be x itself."""
        rows = cpu_kernels.ActivationBuffer(self.max_tokens, x.shape[1], "fp32", out)
        self.refs.append(rows)
        self._emit_norm(norm, x, rows)

    def linear(
        self,
        rows: cpu_kernels.ActivationBuffer,
        layer: LinearSpec,
        out: Tensor,
        weight_format: str,
        accumulate: bool = False,
    ) -> None:
        """Multiply with a layer's weights; ``accumulate``: add to what is in ``out``."""
        for packed in self.weights.pack(layer, weight_format):
            if packed.starts_segment and self.num_matmuls:
                self.current_segment, self.num_matmuls = [], 0
                self.segments.append(self.current_segment)
            self.num_matmuls += 1
            self.weight_bytes += packed.nbytes
            outputs = packed.stop - packed.start
            is_whole = outputs == layer.out_features
            bias = layer.bias if layer.bias is None or is_whole else layer.bias[packed.start : packed.stop]
            panels = cpu_kernels.round_up(outputs, 32) // cpu_kernels.WEIGHT_FORMATS[weight_format].panel_columns
            columns = out[:, packed.start :]
            self.emit_call(
                self.kernels.gemm(weight_format),
                rows.operand, packed.weight_address, columns, self.count_address, cpu_kernels.round_up(rows.width),
                panels,
                rows.operand_stride, out.stride(0) * 4, self.padded_vector(bias, outputs), columns if accumulate else 0,
                rows.scale, packed.scale_address, *rows.sum_args(weight_format),
            )  # fmt: skip
        lora_weights = None if self.lora is None else self.lora.weights_for(layer)
        if lora_weights is not None:
            self._add_lora(rows, lora_weights, out, layer.out_features)

    def _add_lora(
        self, rows: cpu_kernels.ActivationBuffer, lora_weights: Sequence[LoraWeights | None], out: Tensor, outputs: int
    ) -> None:
        """Add each row's LoRA product."""
        k, columns = cpu_kernels.round_up(rows.width, 16), cpu_kernels.round_up(outputs, 16)
        table = self.keep_alive(torch.zeros(len(lora_weights), 3, dtype=torch.int64))
        largest = max(len(pair[0]) for pair in lora_weights if pair is not None)
        for entry, pair in zip(table, lora_weights, strict=True):
            if pair is not None:
                down, up = torch.zeros(len(pair[0]), k), torch.zeros(len(pair[0]), columns)
                down[:, : rows.width], up[:, :outputs] = pair
                self.refs += [down, up]
                entry[:] = torch.tensor([down.data_ptr(), up.data_ptr(), len(down)])
        low = self.buffer("low", largest)
        self.emit_call(
            self.kernels.lora_shrink(),
            rows.y, rows.y.stride(0) * 4, self.count_address, k, self.row_lora_ids, table, low, low.stride(0) * 4,
            largest,
        )  # fmt: skip
        self.emit_call(
            self.kernels.lora_expand(),
            out, out.stride(0) * 4, self.count_address, columns, self.row_lora_ids, table, low, low.stride(0) * 4,
        )  # fmt: skip

    def linear_residual(
        self,
        rows: cpu_kernels.ActivationBuffer,
        layer: LinearSpec,
        post_norm: NormSpec | None,
        residual_norm: NormSpec | None,
    ) -> None:
        """x += post_norm(layer(rows)); then x = residual_norm(x)."""
        width = self.x.shape[1]
        if self.comm is None and post_norm is None and width % 32 == 0:  # whole panels fit into the rows of x
            self.linear(rows, layer, self.x, self.weight_format, accumulate=True)
        else:
            partial = self.buffer("part", layer.out_features)
            if self.comm is None:
                self.linear(rows, layer, partial, self.weight_format)
            else:
                self._linear_all_reduce(self.comm, rows, layer, partial)
            if post_norm is not None:
                self.norm_into(post_norm, partial[:, :width], partial)
            self.emit_call(self.kernels.add(), self.x, partial, self.count_address, width, partial.stride(0) * 4)
        if residual_norm is not None:
            self.norm_into(residual_norm, self.x, self.x)

    def _linear_all_reduce(
        self, comm: ShmCommunicator, rows: cpu_kernels.ActivationBuffer, layer: LinearSpec, out: Tensor
    ) -> None:
        """Out = the sum over the ranks of what the layer gives."""
        partials = comm.next_reduce_buffers()
        self.linear(rows, layer, partials[comm.rank], self.weight_format)
        self.emit_call(self.kernels.barrier(), *comm.barrier_args)
        self.emit_call(
            self.kernels.reduce_sum(),
            out, out.stride(0) * 4, partials, partials.stride(1) * 4, partials.stride(0) * 4, comm.world_size,
            self.count_address, cpu_kernels.round_up(layer.out_features, 16),
        )  # fmt: skip

    def emit_layer(self, layer: specs.DecoderLayerSpec, region: KVRegion, is_last: bool = False) -> None:
        """Emit a layer whose blocks lie in ``region``.

        ``is_last``: from its attention on, compute only the rows whose logits are wanted.
        """
        a, m, weight_format = layer.attention, layer.mlp, self.weight_format
        assert isinstance(m, specs.MLPSpec), "mixtures have runners of their own"
        qkv = self.buffer("qkv", a.qkv.out_features)
        self.linear(self.norm_and_quantize(layer.attn_norm, self.x, weight_format), a.qkv, qkv, weight_format)
        shape = self.attention_shape(a)
        self.rope_and_store_kv(shape, a, qkv, region, self.tables_address, self.table_offsets)
        queries = self.gather_output_rows(qkv, a.num_heads * a.head_dim) if is_last else qkv
        tables = self.tables_address, self.table_offsets, self.last_visible
        attended = self.paged_attention(shape, queries, region, self._position_bias(a), *tables)
        up = self.buffer("up", m.up.out_features)
        rows = self.norm_and_quantize(None, attended, weight_format, "attended")
        if layer.parallel_residual:
            self.linear(self.norm_and_quantize(layer.mlp_norm, self.x, weight_format), m.up, up, weight_format)
        self.linear_residual(rows, a.out, layer.post_attn_norm, layer.attn_residual_norm)
        if layer.cross_attention is not None:
            self.cross_attention(layer.cross_attention, a, region)
        if not layer.parallel_residual:
            self.linear(self.norm_and_quantize(layer.mlp_norm, self.x, weight_format), m.up, up, weight_format)
        rows = self.operand_buffer(m.down.in_features, weight_format, "inner")
        self.emit_call(
            self.kernels.activate(m.activation, m.gated, rows.kind),
            up, up.stride(0) * 4, self.count_address, m.down.in_features, *rows.output_args(),
        )  # fmt: skip
        self.linear_residual(rows, m.down, layer.post_mlp_norm, layer.mlp_residual_norm)

    def cross_attention(self, cross: specs.CrossAttentionSpec, a: AttentionSpec, region: KVRegion) -> None:
        """Attend to the encoder states; decoders do."""
        raise NotImplementedError

    def gather_output_rows(self, qkv: Tensor, width: int) -> Tensor:
        """Keep only the rows whose logits are wanted; decoders do."""
        raise NotImplementedError

    def rope_and_store_kv(
        self, shape: cpu_kernels.AttentionShape, a: AttentionSpec, qkv: Tensor, region: KVRegion,
        tables_address: int, table_offsets: Tensor,
    ) -> None:  # fmt: skip
        """Rotate queries and keys; store keys and values in the blocks of the block tables."""
        cos, sin = self._rope_table(a)
        keys, values, stripe = region
        q_norm = self.padded_vector(None if a.q_norm is None else a.q_norm.weight, a.head_dim)
        k_norm = self.padded_vector(None if a.k_norm is None else a.k_norm.weight, a.head_dim)
        eps = self.keep_alive(torch.tensor([0.0 if a.q_norm is None else a.q_norm.eps], dtype=torch.float32))
        self.emit_call(
            self.kernels.rope_and_store_kv(shape),
            qkv, qkv.stride(0) * 4, self.count_address, self.positions, tables_address, keys, values, cos, sin, q_norm,
            k_norm, eps, table_offsets, stripe,
        )  # fmt: skip

    def paged_attention(
        self, shape: cpu_kernels.AttentionShape, queries: Tensor, region: KVRegion, bias: Tensor,
        tables_address: int, table_offsets: Tensor, last_visible: Tensor,
    ) -> Tensor:  # fmt: skip
        """Let tokens attend to the blocks of any tables; returns rows (tokens, heads * dim)."""
        keys, values, stripe = region
        width = shape.num_heads * shape.head_dim
        # The kernel writes heads one after the other, rows unpadded.
        out = self._make_once("attended", width, make=lambda: self.allocate_workspace(self.max_tokens, width))
        self.emit_call(
            self.kernels.paged_attention(shape),
            queries, queries.stride(0) * 4, self.count_address, self.positions, tables_address, keys, values, out,
            self.scratch, self.scratch.stride(0) * 4, bias, table_offsets, stripe, last_visible,
        )  # fmt: skip
        return out

    def _position_bias(self, a: AttentionSpec) -> Tensor:
        if (bias := a.relative_bias) is None:
            return self.padded_vector(a.alibi_slopes, a.num_heads)
        return self._make_once("bias", id(bias), make=lambda: bias.build_table(self.max_length))

    def attention_shape(self, a: AttentionSpec) -> cpu_kernels.AttentionShape:
        """Return the shape of an attention."""
        num_pairs = 0 if a.rope is None else a.rope.cos.shape[1]
        return cpu_kernels.AttentionShape(
            num_heads=a.num_heads, num_kv_heads=a.num_kv_heads, head_dim=a.head_dim, scale=a.scale,
            kv_dtype=self.kv_cache_dtype,
            bf16_pairs=self.kernels.isa.bf16_dot,
            rotary_dim=2 * num_pairs, rotary_interleaved=a.rope is not None and a.rope.interleaved,
            qk_norm=a.q_norm is not None, sliding_window=a.sliding_window, softcap=a.softcap,
            alibi=a.alibi_slopes is not None,
            bias_span=0 if a.relative_bias is None else self.max_length,
        )  # fmt: skip

    def allocate_kv(
        self, num_blocks: int, attention_specs: Sequence[AttentionSpec]
    ) -> tuple[EvictableMemory, list[KVRegion]]:
        """Return memory, and in it each layer's region.

        One piece, on huge pages: blocks lie anywhere, and with small pages each would miss the TLB.
        """
        per_stripe = cpu_kernels.BLOCKS_PER_STRIPE
        sizes = [a.num_kv_heads * per_stripe * self.attention_shape(a).head_bytes for a in attention_specs]
        stripe = 2 * sum(sizes)
        total = -(-num_blocks // per_stripe) * stripe
        memory, at, regions = EvictableMemory(total), 0, []
        self.refs.append(memory)
        for nbytes in sizes:
            keys, values = (memory.tensor(start, (total - start,), torch.uint8) for start in (at, at + nbytes))
            regions.append((keys, values, stripe))
            at += 2 * nbytes
        return memory, regions

    def _rope_table(self, a: AttentionSpec) -> tuple[Tensor, Tensor]:
        if (rope := a.rope) is None:
            return self.padded_vector(None, 1), self.padded_vector(None, 1)
        return self._make_once(
            "rope", id(rope), make=lambda: (rope.cos.float().contiguous(), rope.sin.float().contiguous())
        )

    def build(self, *programs: list[list[cpu_kernels.Instruction]]) -> list[list[cpu_kernels.Program]]:
        """Compile the kernels and return the programs of each part's segments."""
        library = self.kernels.compile()
        refs = [*self.refs, self.inputs, self.counts, self.x, self.embedded, self.scratch, library]
        return [
            [cpu_kernels.build_program(calls, library, refs, self.num_threads) for calls in part] for part in programs
        ]


def without_positions(shape: cpu_kernels.AttentionShape, scale: float) -> cpu_kernels.AttentionShape:
    """Return the same shape and cache dtype without anything that depends on positions."""
    return replace(
        shape, scale=scale, rotary_dim=0, rotary_interleaved=False, qk_norm=False, sliding_window=0, softcap=0.0,
        alibi=False, bias_span=0,
    )  # fmt: skip
