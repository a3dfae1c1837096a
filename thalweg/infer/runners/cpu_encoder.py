"""An encoder, whose tokens attend to their whole sequence, as a program of CPU kernels.

Several sequences are computed together, one after the other in the rows, none of them padded.  A layer's keys
and values matter only until its attention is done, so all layers share the same blocks; only the keys and
values of a decoder's cross attention go into the blocks of its own cache.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from thalweg.infer.config import EngineConfig
from thalweg.infer.models.spec import AttentionSpec, CrossAttentionSpec, EncoderSpec
from thalweg.infer.precision import get_weight_format
from thalweg.infer.runners.base import EncoderInput, EncoderRequest, EncoderRunner
from thalweg.infer.runners.cpu_program import KVRegion, ProgramBuilder, cpu_unsupported_reason, without_positions
from thalweg.infer.runners.packed_weights import InMemoryWeights, WeightStore, embedding_writer
from thalweg.ops import cpu_kernels

# For each layer of a decoder: its cross attention, the self-attention of the same shape, and the cache
# region of keys and values with its stripe.
CrossTargets = Sequence[tuple[CrossAttentionSpec | None, AttentionSpec, KVRegion]]


class CpuEncoder(EncoderRunner):
    """Runs an :class:`EncoderSpec`: up to ``num_slots`` sequences.

    ``cross_targets``: cross attentions to compute keys and values for; ``block_tables`` (slots, blocks) names
    their blocks, by slot, and is written with each input's.
    """

    name: ClassVar[str] = "cpu"

    @staticmethod
    def supports(spec: EncoderSpec | None, config: EngineConfig) -> str | None:
        """Return why the CPU kernels cannot run an encoder, or None."""
        return cpu_unsupported_reason(spec, config, _kv_dtype(get_weight_format(config)))

    def __init__(
        self, request: EncoderRequest, cross_targets: CrossTargets = (), block_tables: np.ndarray | None = None
    ) -> None:
        encoder, weight_format, lora = request.spec, request.weight_format, request.lora
        self._encoder, self.hidden_size, self.max_length = encoder, encoder.hidden_size, request.max_model_len
        self.max_num_batched_tokens = request.max_encoder_tokens
        self._owns_weights = request.weights is None
        self._weights = request.weights or InMemoryWeights(encoder, weight_format)
        max_blocks = -(-self.max_length // cpu_kernels.BLOCK_SIZE)
        self._scratch_block_tables = np.zeros((request.num_slots, max_blocks), dtype=np.int32)
        self._block_tables = block_tables
        program = _EncoderProgram(request, self._weights, self._scratch_block_tables, cross_targets, block_tables)
        self._embedded, self._final, self.weight_bytes = program.embedded, program.final, program.weight_bytes
        self._tokens, self._positions, _, _ = program.inputs
        self._has_lora, self._row_lora_ids = lora is not None, program.row_lora_ids.numpy()
        inputs = (*program.inputs[:3], program.last_visible, program.cross_table_offsets, program.counts)
        self._np_inputs = [t.numpy() for t in inputs]
        (self._programs,) = program.build(program.segments)
        self._write_embeddings = embedding_writer(encoder, weight_format)

    @torch.inference_mode()
    def run(self, inputs: Sequence[EncoderInput]) -> Tensor:
        """Return the last states, fp32 (tokens, width), sequence by sequence; valid until the next run.

        The keys and values of cross attention go into the blocks of each input's slot.
        """
        tokens, positions, table_offsets, last_visible, cross_table_offsets, counts = self._np_inputs
        offset = block = 0
        for number, encoder_input in enumerate(inputs):
            length = len(encoder_input.tokens)
            span = slice(offset, offset + length)
            assert length <= self.max_length and offset + length <= self.max_num_batched_tokens, (
                "the caller keeps to the limits"
            )
            blocks = -(-length // cpu_kernels.BLOCK_SIZE)
            self._scratch_block_tables[number, :blocks] = np.arange(block, block + blocks)
            tokens[span], positions[span], last_visible[span] = (encoder_input.tokens, np.arange(length), length - 1)
            table_offsets[span] = number * self._scratch_block_tables.strides[0]
            if self._block_tables is not None:
                cross_table_offsets[span] = encoder_input.slot * self._block_tables.strides[0]
                self._block_tables[encoder_input.slot, : len(encoder_input.blocks)] = encoder_input.blocks
            if self._has_lora:
                self._row_lora_ids[span] = encoder_input.lora_id
            offset, block = offset + length, block + blocks
        counts[:] = offset
        e, rows = self._encoder, self._positions[:offset]
        if e.pad_token_id >= 0:
            rows = torch.cat([e.position_ids(torch.tensor(list(x.tokens))) for x in inputs])
        self._write_embeddings(self._embedded, self._tokens[:offset], rows)
        for program in self._programs:
            program.run()
        return self._final[:offset, : self.hidden_size]

    def close(self) -> None:
        """Drop the weights, where they are its own."""
        if self._owns_weights and "_weights" in self.__dict__:
            self._weights.close()
        self.__dict__.clear()


def _kv_dtype(weight_format: str) -> str:
    """Return what an encoder's keys and values are stored as: they live for one layer, so never in fewer bits."""
    return "fp32" if weight_format == "fp32" else "bf16"


class _EncoderProgram(ProgramBuilder):
    """Builds the program of an encoder, and of the cross attention's keys and values for a decoder."""

    def __init__(
        self, request: EncoderRequest, weights: WeightStore, block_tables: np.ndarray, cross_targets: CrossTargets,
        cross_block_tables: np.ndarray | None,
    ) -> None:  # fmt: skip
        e, max_tokens, weight_format = request.spec, request.max_encoder_tokens, request.weight_format
        kv_cache_dtype = _kv_dtype(weight_format) if cross_block_tables is None else request.kv_cache_dtype
        super().__init__(request, weights, max_tokens, kv_cache_dtype, block_tables)
        num_blocks = max_tokens // cpu_kernels.BLOCK_SIZE + request.num_slots
        self.refs.append(cross_block_tables)
        self.last_visible, self.cross_table_offsets = (  # a token sees its sequence to the end
            self.keep_alive(torch.zeros(max_tokens, dtype=torch.int64)) for _ in range(2)
        )
        kv_regions: dict[tuple[int, int], KVRegion] = {}
        if e.embed_norm is not None:
            self.norm_into(e.embed_norm, self.x, self.x)
        for layer in e.layers:
            a = layer.attention
            if (a.num_kv_heads, a.head_dim) not in kv_regions:
                kv_regions[a.num_kv_heads, a.head_dim] = self.allocate_kv(num_blocks, [a])[1][0]
            self.emit_layer(layer, kv_regions[a.num_kv_heads, a.head_dim])
        self.final = self.x
        if e.final_norm is not None:
            self.final = self.keep_alive(cpu_kernels.allocate_rows(max_tokens, e.hidden_size))
            self.norm_into(e.final_norm, self.x, self.final)
        if cross_block_tables is not None:
            rows = self.norm_and_quantize(None, self.final, weight_format, "cross")
            tables = cross_block_tables.ctypes.data, self.cross_table_offsets
            for cross, attention, kv_region in cross_targets:
                if cross is not None:  # a layer of the decoder reads keys and values of these states
                    kv = self.buffer("kv", cross.kv.out_features)
                    self.linear(rows, cross.kv, kv, weight_format)
                    kv_spec = replace(attention, rope=None, q_norm=None, k_norm=None)
                    shape = replace(without_positions(self.attention_shape(kv_spec), 1.0), num_heads=0)
                    self.rope_and_store_kv(shape, kv_spec, kv, kv_region, *tables)
