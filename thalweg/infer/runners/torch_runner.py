"""A runner out of plain torch operators: the reference, mixtures of experts, and devices other than CPUs.

Keys and values of a layer lie in a tensor (position in the cache, kv head, dim); position p of a sequence is
at ``16 * table[p // 16] + p % 16``.  Each span gathers its context and attends by SDPA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from thalweg.infer.config import EngineConfig
from thalweg.infer.lora import LoraManager
from thalweg.infer.models.spec import (
    AttentionSpec,
    CrossAttentionSpec,
    DecoderSpec,
    EncoderSpec,
    length_unsupported_reason,
)
from thalweg.infer.parallel.shm_comm import ShmCommunicator
from thalweg.infer.precision import get_compute_dtype
from thalweg.infer.quantization.pack import linear_packer, quantize_experts
from thalweg.infer.runners.base import UNDESCRIBED, EncoderInput, ModelInput, RunnerRequest
from thalweg.infer.runners.kv_cache import KVCacheTensor
from thalweg.infer.runners.torch_layers import LinearFactory, TorchLayers


class TorchRunner(TorchLayers):
    """Runs a :class:`DecoderSpec` in ``dtype`` on ``device``; ``make_linear`` may pack the linear layers.

    Without ``cache_weights`` nothing of a linear layer outlives its product: the weights stay where the model has
    them (a mapped file, the host's memory) and are read again each time.  ``kv_cache_dtype``: see
    :class:`.kv_cache.KVCacheTensor`.  ``comm``: the ranks with which this one, which has a shard of the decoder, sums
    its partial results.
    """

    name: ClassVar[str] = "torch"

    @staticmethod
    def supports(spec: DecoderSpec | None, config: EngineConfig) -> str | None:
        """Return why torch operators cannot run a model, or None."""
        if spec is None:
            return UNDESCRIBED
        if config.weight_offload and config.quantization:
            return f"{config.quantization} weights cannot be streamed through torch's operators"
        return length_unsupported_reason(spec, config)

    @classmethod
    def build(cls, request: RunnerRequest) -> TorchRunner:
        """Return the runner of a described model."""
        spec, config, weight_format = request.spec, request.config, request.weight_format
        assert isinstance(spec, DecoderSpec), "supports() asks for a description"
        in_memory = config.weight_offload is None
        pack = request.on_cpu and in_memory
        return cls(
            quantize_experts(spec, weight_format) if pack else spec,
            dtype=get_compute_dtype(weight_format, request.on_cpu),
            num_blocks=request.num_blocks,
            num_slots=request.num_slots,
            max_length=request.max_model_len,
            device=config.device,
            make_linear=linear_packer(weight_format) if pack else None,
            cache_weights=in_memory,
            kv_cache_dtype=request.kv_cache_dtype,
            lora=request.lora,
        )

    def __init__(
        self,
        decoder: DecoderSpec,
        *,
        dtype: torch.dtype,
        num_blocks: int,
        num_slots: int,
        max_length: int,
        block_size: int = 16,
        device: torch.device | str = "cpu",
        make_linear: LinearFactory | None = None,
        cache_weights: bool = True,
        kv_cache_dtype: str = "auto",
        lora: LoraManager | None = None,
        comm: ShmCommunicator | None = None,
    ) -> None:
        self.comm = comm
        super().__init__(
            dtype,
            device,
            max_length=max_length,
            make_linear=make_linear,
            cache_weights=cache_weights,
            lora=lora,
        )
        self.decoder = decoder
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_slots = num_slots
        num_positions = num_blocks * block_size
        self._keys, self._values = (
            [
                KVCacheTensor(
                    num_positions,
                    a.num_kv_heads,
                    a.head_dim,
                    dtype=dtype,
                    kv_cache_dtype=kv_cache_dtype,
                    device=self.device,
                )
                for a in (x.attention for x in decoder.layers)
            ]
            for _ in range(2)
        )

    @torch.inference_mode()
    def run(self, batch: ModelInput) -> Tensor:
        """Return fp32 logits (len(batch.logit_indices), vocab)."""
        d, comm, x = self.decoder, self.comm, self._forward(batch)
        if comm is not None and not comm.is_last_stage:
            comm.publish(x)
            logits = self._recv_logits(batch)
        else:
            logits = self._logits(x, batch)
            if comm is not None:
                comm.publish()
        if d.logit_softcap:
            logits = d.logit_softcap * torch.tanh(logits / d.logit_softcap)
        return logits

    def _logits(self, x: Tensor, batch: ModelInput) -> Tensor:
        if len(batch.logit_indices) == 0:
            return torch.empty(0, self.decoder.vocab_size)
        indices = torch.tensor(list(batch.logit_indices), device=self.device)
        self.row_lora_ids = self.row_lora_ids[indices]
        logits = self._linear(self.decoder.lm_head, self._norm(self.decoder.final_norm, x[indices])).float()
        return logits if self.comm is None else self.comm.gather_logits(logits)

    def _recv_logits(self, batch: ModelInput) -> Tensor:
        """Return the last stage's logits; only rank 0 needs them."""
        assert self.comm is not None, "without ranks there are no stages"
        if not self.comm.is_first_stage:
            return torch.empty(0, self.decoder.vocab_size)
        self.comm.wait_last_stage()
        return self.comm.logits[: len(batch.logit_indices), : self.decoder.vocab_size]

    @torch.inference_mode()
    def hidden_states(self, batch: ModelInput) -> Tensor:
        """Return the final hidden states, fp32 (tokens, width)."""
        states = self._norm(self.decoder.final_norm, self._forward(batch)).float()
        if self.comm is None or self.comm.shape.num_stages == 1:
            return states
        self.comm.publish(states)
        if self.comm.is_first_stage:
            self.comm.wait_last_stage()
            states = self.comm.activations(len(states)).clone()
        return states

    def _forward(self, batch: ModelInput) -> Tensor:
        d = self.decoder
        tokens = torch.tensor(batch.tokens, device=self.device)
        positions = torch.cat([torch.arange(s.start, s.start + s.num_tokens) for s in batch.spans]).to(self.device)
        if batch.lora_ids:
            lora_ids = [x for x, s in zip(batch.lora_ids, batch.spans, strict=True) for _ in range(s.num_tokens)]
            self.row_lora_ids = torch.tensor(lora_ids, device=self.device)
        else:
            self.row_lora_ids = torch.full((len(tokens),), -1, device=self.device)
        if self.comm is not None:
            self.comm.wait_prev_stage()
        if self.comm is None or self.comm.is_first_stage:
            x = self._embed(d, tokens, positions)
        else:
            x = self.comm.activations(len(tokens)).to(self.device, self.dtype)
        # Ranks share their tables in memory; alone, each span brings its own.
        block_tables = (
            batch.block_tables if self.comm is None else [self.comm.block_tables[s.slot] for s in batch.spans]
        )
        cache_indices = [
            self._cache_indices(blocks, span.start + span.num_tokens)
            for span, blocks in zip(batch.spans, block_tables, strict=True)
        ]
        for index, layer in enumerate(d.layers):
            normed = self._norm(layer.attn_norm, x)
            attended = self._all_reduce(
                self._attention(layer.attention, index, normed, positions, cache_indices, batch)
            )
            residual = x
            x = self._add_attention(layer, x, attended)
            if layer.cross_attention is not None:
                x = self._cross_attention(layer.cross_attention, layer.attention, index, x, batch)
            inner = self._all_reduce(
                self._mlp(layer.mlp, self._norm(layer.mlp_norm, residual if layer.parallel_residual else x))
            )
            x = x + (inner if layer.post_mlp_norm is None else self._norm(layer.post_mlp_norm, inner))
            x = self._norm(layer.mlp_residual_norm, x)
        return x

    def _all_reduce(self, partial: Tensor) -> Tensor:
        """Sum the ranks' partial results, where there are several."""
        return partial if self.comm is None else self.comm.all_reduce(partial)

    @torch.inference_mode()
    def run_encoder(self, inputs: Sequence[EncoderInput]) -> None:
        """Compute encoder prompts and store the keys and values of cross attention."""
        d = self.decoder
        assert d.encoder is not None, "only a model with an encoder has encoder prompts"
        for encoder_input in inputs:
            self.row_lora_ids = torch.full((len(encoder_input.tokens),), encoder_input.lora_id, device=self.device)
            states = self.encode_sequence(d.encoder, encoder_input.tokens)
            cache_indices = self._cache_indices(encoder_input.blocks, len(encoder_input.tokens))
            for index, layer in enumerate(d.layers):
                if layer.cross_attention is not None:
                    a = layer.attention
                    kv = self._linear(layer.cross_attention.kv, states).view(len(states), 2, a.num_kv_heads, a.head_dim)
                    self._keys[index].write(cache_indices, kv[:, 0])
                    self._values[index].write(cache_indices, kv[:, 1])

    def _cross_attention(
        self, cross: CrossAttentionSpec, a: AttentionSpec, index: int, x: Tensor, batch: ModelInput
    ) -> Tensor:
        q = self._linear(cross.q, self._norm(cross.norm, x)).view(len(x), a.num_heads, a.head_dim)
        cross_spec = replace(a, scale=cross.scale, sliding_window=0, softcap=0.0, alibi_slopes=None, relative_bias=None)
        out, offset = torch.empty_like(q), 0
        encoder_prompts = zip(batch.encoder_block_tables, batch.encoder_seq_lens, strict=True)
        for span, (blocks, length) in zip(batch.spans, encoder_prompts, strict=True):
            rows = slice(offset, offset + span.num_tokens)
            offset += span.num_tokens
            cache_indices = self._cache_indices(blocks, length)
            keys, values = self._keys[index].gather(cache_indices), self._values[index].gather(cache_indices)
            out[rows] = self._attend(cross_spec, q[rows], keys, values, span.start, causal=False)
        return self._norm(cross.residual_norm, x + self._linear(cross.out, out.flatten(1)))

    def _cache_indices(self, blocks: Sequence[int], length: int) -> Tensor:
        """Return where the first ``length`` positions of a sequence lie in the cache."""
        block_size = self.block_size
        starts = torch.tensor(blocks[: -(-length // block_size)], dtype=torch.int64) * block_size
        return (starts[:, None] + torch.arange(block_size)).flatten()[:length].to(self.device)

    def _attention(
        self,
        a: AttentionSpec,
        index: int,
        x: Tensor,
        positions: Tensor,
        cache_indices: list[Tensor],
        batch: ModelInput,
    ) -> Tensor:
        if a.num_heads == 0:  # a rank that has experts alone
            return torch.zeros_like(x)
        qkv = self._linear(a.qkv, x).view(len(x), a.num_heads + 2 * a.num_kv_heads, a.head_dim)
        q, k, v = qkv.split([a.num_heads, a.num_kv_heads, a.num_kv_heads], dim=1)
        if a.q_norm is not None and a.k_norm is not None:
            q, k = self._norm(a.q_norm, q), self._norm(a.k_norm, k)
        if a.rope is not None:
            q, k = self._apply_rope(a.rope, q, positions), self._apply_rope(a.rope, k, positions)
        keys, values = self._keys[index], self._values[index]
        out, offset = torch.empty_like(q), 0
        for span, indices in zip(batch.spans, cache_indices, strict=True):
            rows = slice(offset, offset + span.num_tokens)
            offset += span.num_tokens
            keys.write(indices[span.start :], k[rows])
            values.write(indices[span.start :], v[rows])
            out[rows] = self._attend(a, q[rows], keys.gather(indices), values.gather(indices), span.start)
        return self._linear(a.out, out.flatten(1))

    def argmax(self) -> None:
        """It is not computed here: the sampler does it."""

    def free_slot(self, slot: int) -> None:
        """Nothing is kept outside of the blocks."""

    def close(self) -> None:
        """Drop the weights and the cache."""
        self.free()
        self._keys, self._values = [], []


class TorchEncoder(TorchLayers):
    """Runs an :class:`EncoderSpec` in plain operators."""

    name: ClassVar[str] = "torch"

    @staticmethod
    def supports(spec: EncoderSpec | None, config: EngineConfig) -> str | None:
        """Return why torch operators cannot run an encoder, or None."""
        return UNDESCRIBED if spec is None else None

    @classmethod
    def build(cls, request: RunnerRequest) -> TorchEncoder:
        """Return the runner of a described encoder."""
        assert isinstance(request.spec, EncoderSpec), "supports() asks for a description"
        return cls(
            request.spec,
            dtype=get_compute_dtype(request.weight_format, request.on_cpu),
            device=request.config.device,
            max_length=request.max_model_len,
            max_num_batched_tokens=max(request.config.max_num_batched_tokens, request.max_model_len),
            make_linear=linear_packer(request.weight_format) if request.on_cpu else None,
        )

    def __init__(
        self,
        encoder: EncoderSpec,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        max_length: int,
        max_num_batched_tokens: int,
        make_linear: LinearFactory | None = None,
    ) -> None:
        super().__init__(dtype, device, max_length=max_length, make_linear=make_linear)
        self._encoder, self.max_num_batched_tokens = encoder, max_num_batched_tokens

    @torch.inference_mode()
    def run(self, inputs: Sequence[EncoderInput]) -> Tensor:
        """Return the last states."""
        return torch.cat([self.encode_sequence(self._encoder, x.tokens).float() for x in inputs])

    def close(self) -> None:
        """Drop the weights."""
        self.free()
