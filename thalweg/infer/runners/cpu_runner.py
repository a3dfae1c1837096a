"""The fast runner on CPUs: a whole step of the model is one call of a program of CPU kernels.

At load the weights are packed (``ops/cpu_kernels/packing.py``) and the model becomes a list of kernel calls
on preallocated buffers (``cpu_program.py``); a step fills in tokens, positions and block tables and runs the
list.  Nothing in it depends on how many tokens there are or whose they are, so that prompts, chunks of prompts
and decoding tokens mix freely, and a token's result is the same, bit for bit, in any batch.

Activations between layers are fp32.  What meets a packed weight is fp32, bf16 or int8 with a scale per row.

An encoder-decoder model has a second program (``cpu_encoder.py``): it computes an encoder prompt once and
stores, layer by layer, the keys and values that cross attention reads, in blocks of the same cache.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from thalweg.infer.config import EngineConfig
from thalweg.infer.models import spec as specs
from thalweg.infer.models.spec import DecoderSpec, UnsupportedModelError, length_unsupported_reason
from thalweg.infer.precision import get_kv_cache_dtype
from thalweg.infer.runners import cpu_program
from thalweg.infer.runners.base import DecoderRequest, EncoderInput, ModelInput, ModelRunner
from thalweg.infer.runners.cpu_encoder import CpuEncoder
from thalweg.infer.runners.packed_weights import InMemoryWeights, embedding_writer, lm_head_format
from thalweg.ops import cpu_kernels
from thalweg.storage_io.evictable_memory import PagePrefaulter, release_pages


class CpuRunner(ModelRunner):
    """Runs a described model with weights in fp32, bf16, int8 or int4 (the head then in int8).

    Packed weights are in memory unless the request says where.  The decoder's embedding is read row by row where it
    lies.
    """

    name: ClassVar[str] = "cpu"
    block_size = cpu_kernels.BLOCK_SIZE

    @staticmethod
    def supports(spec: Any, config: EngineConfig) -> str | None:
        """Return why the CPU kernels cannot run a model, or None."""
        reason = cpu_program.cpu_unsupported_reason(spec, config, get_kv_cache_dtype(config))
        return reason or length_unsupported_reason(spec, config)

    def __init__(self, request: DecoderRequest) -> None:
        decoder, weight_format = request.spec, request.weight_format
        if reason := cpu_program.kernels_unsupported_reason(decoder, request.kv_cache_dtype):
            raise UnsupportedModelError(reason)
        weights = request.weights
        self._weights = weights or InMemoryWeights(decoder, weight_format)
        assert isinstance(request.num_blocks, int), "on a processor they are counted first"
        self.num_blocks, self.num_slots, self.comm = request.num_blocks, request.num_slots, request.comm
        shape = (self.num_slots, -(-request.max_model_len // self.block_size))
        # What the kernels read, by slot: rows of a step's ``block_tables`` are copied here.
        self.block_tables = np.zeros(shape, dtype=np.int32)
        self.encoder_block_tables = np.zeros(shape if decoder.encoder is not None else (0, 0), dtype=np.int32)
        self._has_lora, self._max_num_batched_tokens = request.lora is not None, request.config.max_num_batched_tokens
        self._write_embeddings: Any = embedding_writer(decoder, weight_format, in_place=weights is not None)
        self._spec, self._program = decoder, _DecoderProgram(request, self)
        program = self._program
        self._tokens, self._positions = program.inputs[:2]
        # numpy views of the same memory: cheaper to fill, item by item
        self._np_inputs = [t.numpy() for t in (*program.inputs, program.counts)]
        self._row_lora_ids = program.input_lora_ids.numpy()
        self._np_encoder_inputs = [t.numpy() for t in program.encoder_inputs]
        self._body, self._head = program.build(program.body, program.head)
        self._thread_tuner = cpu_kernels.ThreadTuner() if self.comm is None else None  # ranks have threads dealt out
        self._num_last_rows = 0
        self.weight_bytes = program.weight_bytes
        self._encoder: CpuEncoder | None = None
        if decoder.encoder is not None:
            cross_targets = [
                (x.cross_attention, x.attention, pool)
                for x, pool in zip(decoder.layers, program.kv_regions, strict=True)
            ]
            encoder_request: Any = replace(request, spec=decoder.encoder, weights=self._weights, comm=None)
            self._encoder = CpuEncoder(encoder_request, cross_targets, self.encoder_block_tables)

    @torch.inference_mode()
    def run_encoder(self, inputs: Sequence[EncoderInput]) -> None:
        """Compute encoder prompts and store the keys and values of cross attention."""
        assert self._encoder is not None, "only a model with an encoder has encoder prompts"
        self._encoder.run(inputs)

    @torch.inference_mode()
    def run(self, batch: ModelInput) -> Tensor:
        """Return fp32 logits (len(batch.logit_indices), vocab), or the last hidden states (tokens, width), overwritten
        by the next run."""
        comm = self.comm
        self._prepare_inputs(batch)
        self._num_last_rows = count = len(batch.logit_indices)
        if self._thread_tuner is None:
            self._run_programs(batch)
        else:
            is_decode = count == len(batch.tokens) == len(batch.spans)
            self._thread_tuner.run(count if is_decode else None, lambda threads: self._run_programs(batch, threads))
        result = self._program.logits[:count, : self._spec.vocab_size]
        if batch.wants_hidden_states:
            states = self._program.final if comm is None or comm.is_last_stage else self._program.out
            result = states[:count, : self._spec.hidden_size] / self._spec.final_norm_scale
        if comm is not None:
            result = comm.return_result(result)
        if self._spec.logit_softcap and not batch.wants_hidden_states:
            result = self._spec.logit_softcap * torch.tanh(result / self._spec.logit_softcap)
        return result

    def _run_programs(self, batch: ModelInput, num_threads: int | None = None) -> None:
        if num_threads is not None:
            for program in (*self._body, *self._head):
                program.num_threads = num_threads
        comm = self.comm
        self._weights.run(self._body, 0)
        if comm is not None and not comm.is_last_stage:
            comm.send_activations(self._program.out[: len(batch.tokens), : self._spec.hidden_size])
        elif not batch.logit_indices:
            self._weights.skip(len(self._body))
        else:
            self._weights.run(self._head, len(self._body))

    def argmax(self) -> tuple[list[int], list[float]] | None:
        """Return the most likely token of each row of the last run, and its logit; None where another stage
        has the head."""
        if self.comm is not None and not self.comm.is_last_stage:
            return None
        tokens, values = self._program.argmax_buffers
        return tokens[: self._num_last_rows].tolist(), values[: self._num_last_rows].tolist()

    def _prepare_inputs(self, batch: ModelInput) -> None:
        tokens, positions, table_offsets, logit_indices, counts = self._np_inputs
        count = len(batch.tokens)
        assert 0 < count <= self._max_num_batched_tokens, "the scheduler's steps fit into the buffers"
        tokens[:count] = batch.tokens
        stride = self.block_tables.strides[0]
        offset = 0
        for number, (slot, start, length) in enumerate(batch.spans):
            if length == 1:
                positions[offset] = start
                table_offsets[offset] = slot * stride
            else:
                positions[offset : offset + length] = np.arange(start, start + length)
                table_offsets[offset : offset + length] = slot * stride
            if self._has_lora:
                self._row_lora_ids[offset : offset + length] = batch.lora_ids[number] if batch.lora_ids else -1
            if self._encoder is not None:
                encoder_table_offsets, encoder_last_positions = self._np_encoder_inputs
                encoder_table_offsets[offset : offset + length] = slot * self.encoder_block_tables.strides[0]
                encoder_last_positions[offset : offset + length] = batch.encoder_seq_lens[number] - 1
            offset += length
            # A token in the middle of a block goes on in the block of the token before it: its row is known.
            if length > 1 or start % cpu_kernels.BLOCK_SIZE == 0:
                last = (start + length - 1) // cpu_kernels.BLOCK_SIZE
                self.block_tables[slot, : last + 1] = batch.block_tables[number][: last + 1]
                if self._encoder is not None:
                    blocks = batch.encoder_block_tables[number]
                    self.encoder_block_tables[slot, : len(blocks)] = blocks
                block = int(self.block_tables[slot, last])
                self._program.page_warmer.prefault_to(block // cpu_kernels.BLOCKS_PER_STRIPE)
        num_rows = len(batch.logit_indices)
        logit_indices[:num_rows] = batch.logit_indices
        counts[0], counts[1] = count, num_rows
        if self.comm is not None and not self.comm.is_first_stage:
            self._program.embedded[:count] = self.comm.receive_activations(count)
            return
        self._write_embeddings(self._program.embedded, self._tokens[:count], self._positions[:count])

    def sleep(self) -> None:
        """Give back the pages of weights, cache and activations; the program and its addresses stay."""
        self._weights.sleep()
        self._program.kv_memory.release()
        for tensor in self._program.workspace:
            release_pages(tensor)
        self._write_embeddings = None

    @torch.inference_mode()
    def wake_up(self, spec: DecoderSpec | None) -> None:
        """Pack new weights where the old ones were."""
        assert spec is not None and self._encoder is None, "a causal model's description"
        self._write_embeddings = embedding_writer(spec, self._program.weight_format)
        self._program.reload(self._spec, spec)
        self._spec = spec

    def close(self) -> None:
        """Drop the weights and the cache."""
        if "_weights" in self.__dict__:
            self._weights.close()
        self.__dict__.clear()


class _DecoderProgram(cpu_program.ProgramBuilder):
    """Builds a decoder's two programs: its layers, and its head."""

    def __init__(self, request: DecoderRequest, runner: CpuRunner) -> None:
        d, max_tokens, weight_format = request.spec, request.config.max_num_batched_tokens, request.weight_format
        super().__init__(request, runner._weights, max_tokens, request.kv_cache_dtype, runner.block_tables)
        self.input_lora_ids = self.keep_alive(self.row_lora_ids)
        self.refs.append(runner.encoder_block_tables)
        self._encoder_tables_address, self._has_encoder = runner.encoder_block_tables.ctypes.data, d.encoder is not None
        self.encoder_inputs = [self.keep_alive(torch.zeros(max_tokens, dtype=torch.int64)) for _ in range(2)]
        # Each token's encoder prompt: its table as an offset in bytes, and its last position.
        self._encoder_table_offsets, self._encoder_last_positions = self.encoder_inputs
        self.kv_memory, self.kv_regions = self.allocate_kv(runner.num_blocks, [x.attention for x in d.layers])
        self.page_warmer = PagePrefaulter(self.kv_memory, chunk_bytes=self.kv_regions[0][2])
        if d.embed_norm is not None:
            self.norm_into(d.embed_norm, self.x, self.x)
        has_head = runner.comm is None or runner.comm.is_last_stage
        for number, layer in enumerate(d.layers):
            self.emit_layer(layer, self.kv_regions[number], is_last=has_head and number == len(d.layers) - 1)
        self.out, self.body, self.head = self.x, self.segments, [[]]
        self.segments, self.current_segment, self.num_matmuls = self.head, self.head[0], 0
        if self.comm is None:
            self.logits = self.allocate_workspace(max_tokens, cpu_kernels.round_up(d.vocab_size, 32))
        else:
            self.logits = self.comm.logits
        if not has_head:
            self.head, self.final = [], self.x
            self.argmax_buffers = torch.zeros(0, dtype=torch.int32), torch.zeros(0)
            return
        rows = self.norm_and_quantize(d.final_norm, self.x, lm_head_format(weight_format), "head")
        vocab_start = 0 if self.comm is None else self.comm.vocab_start
        self.linear(rows, d.lm_head, self.logits[:, vocab_start:], lm_head_format(weight_format))
        if self.comm is not None:
            self.emit_call(self.kernels.barrier(), *self.comm.barrier_args)
        self.final, self.argmax_buffers = rows.y, self._argmax(d.vocab_size)

    def cross_attention(
        self, cross: specs.CrossAttentionSpec, a: specs.AttentionSpec, region: cpu_program.KVRegion
    ) -> None:
        """Attend to the encoder prompt, whose keys and values lie in the layer's own cache."""
        shape = cpu_program.without_positions(self.attention_shape(a), cross.scale)
        queries = self.buffer("cross", cross.q.out_features)
        rows = self.norm_and_quantize(cross.norm, self.x, self.weight_format)
        self.linear(rows, cross.q, queries, self.weight_format)
        attended = self.paged_attention(
            shape, queries, region, self.padded_vector(None, 1), self._encoder_tables_address,
            self._encoder_table_offsets,
            self._encoder_last_positions,
        )  # fmt: skip
        rows = self.norm_and_quantize(None, attended, self.weight_format, "attended")
        self.linear_residual(rows, cross.out, None, cross.residual_norm)

    def gather_output_rows(self, qkv: Tensor, width: int) -> Tensor:
        """Keep only the rows whose logits are wanted: the last layer's keys and values are all stored.

        Returns their queries; every later call works on these rows alone.
        """
        queries = self.allocate_workspace(self.max_tokens, cpu_kernels.round_up(width, 16))
        x = self.allocate_workspace(*self.x.shape)
        self.count_address += 8
        self._gather_rows(qkv, queries, 4 * width)
        self._gather_rows(self.x, x, 4 * self.x.shape[1])
        self.x = x
        self.positions, self.table_offsets = map(self._gather_input, (self.positions, self.table_offsets))
        self.last_visible = self.positions
        if self.lora is not None:
            self.row_lora_ids = self._gather_input(self.row_lora_ids)
        if self._has_encoder:
            self._encoder_table_offsets, self._encoder_last_positions = map(self._gather_input, self.encoder_inputs)
        return queries

    def _gather_input(self, values: Tensor) -> Tensor:
        gathered = self.keep_alive(torch.zeros_like(values))
        self._gather_rows(values, gathered, 8)
        return gathered

    def _gather_rows(self, rows: Tensor, out: Tensor, nbytes: int) -> None:
        """Copy ``nbytes`` of each wanted row."""
        strides = [t.stride(0) * t.element_size() for t in (rows, out)]
        self.emit_call(
            self.kernels.gather_rows(), rows, strides[0], out, strides[1], self.count_address, self.logit_rows, nbytes
        )

    def _argmax(self, vocab_size: int) -> tuple[Tensor, Tensor]:
        tokens, values = torch.zeros(self.max_tokens, dtype=torch.int32), torch.zeros(self.max_tokens)
        if self.comm is None or self.comm.rank == 0:
            logits = self.logits, self.logits.stride(0) * 4
            self.emit_call(self.kernels.argmax(), *logits, self.count_address, vocab_size, values, tokens)
        return self.keep_alive(tokens), self.keep_alive(values)
