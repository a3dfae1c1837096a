"""A runner out of plain torch operators: the reference, mixtures of experts, and devices other than CPUs.

Keys and values of a layer lie in a tensor (position in the cache, kv head, dim); position p of a sequence is
at ``16 * table[p // 16] + p % 16``.  Each span gathers its context and attends by SDPA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.infer.config import EngineConfig
from thalweg.infer.models import spec as specs
from thalweg.infer.models.spec import AttentionSpec, DecoderSpec, EncoderSpec, LinearSpec, MoESpec, NormSpec
from thalweg.infer.precision import get_compute_dtype
from thalweg.infer.quantization.modules import linear_packer, quantize_experts
from thalweg.infer.runners import base
from thalweg.infer.runners.base import EncoderInput, EncoderRunner, ModelInput, ModelRunner, RunnerRequest

_STORAGE_DTYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}  # fmt: skip
_FP8_MAX = 448.0  # of torch.float8_e4m3fn
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class TorchLayers:
    """Computes parts of layers as a request asks; on a processor the linear layers are packed.

    With a ``dtype`` it is the reference: weights and cache stay as they are, and all is computed in that.  Without
    ``cache_weights``, and with ``weight_offload``, nothing of a linear layer outlives its product: the weights stay
    where the model has them (a mapped file, the host's memory) and are read again each time.  ``row_lora_ids``: which
    adapter each row of the current step has, -1 for none.
    """

    name: ClassVar[str] = "torch"

    def __init__(self, request: RunnerRequest, dtype: torch.dtype | None = None, cache_weights: bool = True) -> None:
        self._lora, self.row_lora_ids = request.lora, torch.empty(0, dtype=torch.int64)
        self.dtype = dtype or get_compute_dtype(request.weight_format, request.on_cpu)
        self.device, self.max_length = torch.device(request.config.device), request.max_model_len
        self._cache_weights = cache_weights and request.config.weight_offload is None
        self._packs = dtype is None and request.on_cpu and request.config.weight_offload is None
        self._make_linear = linear_packer(request.weight_format) if self._packs else self._plain_linear
        self._linears: dict[int, Callable[[Tensor], Tensor]] = {}
        self._device_tensors: dict[int, Tensor] = {}
        self._relative_biases: dict[int, Tensor] = {}

    def _plain_linear(self, layer: LinearSpec) -> Callable[[Tensor], Tensor]:
        weight = layer.weight.to(self.device, self.dtype)
        bias = None if layer.bias is None else layer.bias.to(self.device, self.dtype)
        return lambda x: F.linear(x, weight, bias)

    def _linear(self, layer: LinearSpec, x: Tensor) -> Tensor:
        y = self._base_linear(layer, x)
        lora_weights = None if self._lora is None else self._lora.weights_for(layer)
        for number, pair in enumerate(lora_weights or ()):
            rows = torch.where(self.row_lora_ids == number)[0]
            if pair is not None and len(rows):
                down, up = (self._on_device(half) for half in pair)
                y[rows] += (x[rows] @ down.t() @ up).to(y.dtype)
        return y

    def _base_linear(self, layer: LinearSpec, x: Tensor) -> Tensor:
        if not self._cache_weights:
            return self._make_linear(layer)(x)
        if id(layer) not in self._linears:
            self._linears[id(layer)] = self._make_linear(layer)
        return self._linears[id(layer)](x)

    def _on_device(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return one of the model's tensors on our device, made once; the description keeps the key alive."""
        moved = self._device_tensors.get(id(tensor))
        if moved is None:
            moved = self._device_tensors[id(tensor)] = tensor.to(self.device, dtype or self.dtype)
        return moved

    def _apply_rope(self, r: specs.RopeTable, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = (self._on_device(t, torch.float32)[positions][:, None].to(x.dtype) for t in (r.cos, r.sin))
        pairs = cos.shape[-1]
        rotated, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
        if r.interleaved:
            a, b = rotated[..., ::2], rotated[..., 1::2]
            rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        else:
            a, b = rotated[..., :pairs], rotated[..., pairs:]
            rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        return torch.cat([rotated, rest], -1) if rest.shape[-1] else rotated

    def _attend(self, a: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, start: int, causal: bool = True) -> Tensor:
        """Attend q (T, heads, dim) at positions start.. to k, v (S, kv heads, dim); ``causal``: up to each
        one's own."""
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        count, length = q.shape[1], k.shape[1]
        query_pos = torch.arange(start, start + count, device=self.device)[:, None]
        key_pos = torch.arange(length, device=self.device)[None]
        mask = key_pos <= query_pos if causal else torch.ones(count, length, dtype=torch.bool, device=self.device)
        if a.sliding_window:
            mask &= key_pos > query_pos - a.sliding_window
        bias = self._position_bias(a, query_pos, key_pos)
        if not a.softcap and bias is None:
            needs_no_mask = not causal or (count == 1 and (not a.sliding_window or length <= a.sliding_window))
            attn_mask, enable_gqa = None if needs_no_mask else mask, a.num_heads != a.num_kv_heads
            y = F.scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=attn_mask, scale=a.scale, enable_gqa=enable_gqa
            )
            return y[0].transpose(0, 1)
        k, v = (t.repeat_interleave(a.num_heads // a.num_kv_heads, 0) for t in (k, v))
        scores = (q @ k.transpose(1, 2)) * a.scale
        if a.softcap:
            scores = a.softcap * torch.tanh(scores / a.softcap)
        if bias is not None:
            scores = scores + bias
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.float32).to(v.dtype)
        return (weights @ v).transpose(0, 1)

    def _position_bias(self, a: AttentionSpec, query_pos: Tensor, key_pos: Tensor) -> Tensor | None:
        """Return what is added to the scores (heads, T, S)."""
        if a.alibi_slopes is not None:
            return self._on_device(a.alibi_slopes)[:, None, None] * (key_pos - query_pos)
        if a.relative_bias is None:
            return None
        table = self._relative_biases.get(id(a.relative_bias))
        if table is None:
            table = a.relative_bias.build_table(self.max_length).to(self.device, self.dtype)
            self._relative_biases[id(a.relative_bias)] = table
        return table[:, self.max_length + key_pos - query_pos]

    def _mlp(self, m: specs.MLPSpec | MoESpec, x: Tensor) -> Tensor:
        if isinstance(m, MoESpec):
            return self._moe(m, x)
        y = self._linear(m.up, x)
        if m.gated:
            gate, value = y.chunk(2, dim=-1)
            return self._linear(m.down, _ACTIVATIONS[m.activation](gate) * value)
        return self._linear(m.down, _ACTIVATIONS[m.activation](y))

    def _moe(self, m: MoESpec, x: Tensor) -> Tensor:
        probs = F.linear(x, self._on_device(m.router)).softmax(-1, dtype=torch.float32)
        weight, chosen = probs.topk(m.top_k, dim=-1)
        if m.norm_topk_prob:
            weight = weight / weight.sum(-1, keepdim=True)
        weight = weight.to(x.dtype)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            number = expert - m.first_expert
            if not 0 <= number < m.num_experts:
                continue  # another rank's
            token, choice = torch.where(chosen == expert)
            up, down = self._expert_linears(m, number)
            gate, value = up(x[token]).chunk(2, dim=-1)
            y = down(_ACTIVATIONS[m.activation](gate) * value)
            out.index_add_(0, token, y * weight[token, choice, None])
        if m.shared_expert is not None:
            y = self._mlp(m.shared_expert, x)
            if m.shared_expert_gate is not None:
                y = y * F.linear(x, self._on_device(m.shared_expert_gate)).sigmoid()
            out = out + y
        return out

    def _expert_linears(self, m: MoESpec, number: int) -> Sequence[Callable[[Tensor], Tensor]]:
        """Return an expert's two products."""
        if m.packed_experts is not None:
            return m.packed_experts[number]
        if not self._cache_weights:
            return [partial(F.linear, weight=t[number].to(self.device, self.dtype)) for t in (m.up, m.down)]
        return [partial(F.linear, weight=self._on_device(t)[number]) for t in (m.up, m.down)]

    def _norm(self, n: NormSpec | None, x: Tensor) -> Tensor:
        if n is None:
            return x
        weight = self._on_device(n.weight, torch.float32)
        y = x.float()
        if n.norm_type == "rms":
            y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + n.eps) * weight
        else:
            assert n.bias is not None
            y = F.layer_norm(y, weight.shape, weight, self._on_device(n.bias, torch.float32), n.eps)
        return y.to(x.dtype)

    def _add_branch(self, x: Tensor, branch: Tensor, post_norm: NormSpec | None, norm: NormSpec | None) -> Tensor:
        """Add what attention or MLP gave, behind its own norm, to x; then normalise x where the layer does."""
        return self._norm(norm, x + self._norm(post_norm, branch))

    def _project_qkv(self, a: AttentionSpec, x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values (T, heads, dim), normalised and rotated."""
        qkv = self._linear(a.qkv, x).view(len(x), a.num_heads + 2 * a.num_kv_heads, a.head_dim)
        q, k, v = qkv.split([a.num_heads, a.num_kv_heads, a.num_kv_heads], dim=1)
        q, k = self._norm(a.q_norm, q), self._norm(a.k_norm, k)
        if a.rope is not None:
            q, k = self._apply_rope(a.rope, q, positions), self._apply_rope(a.rope, k, positions)
        return q, k, v

    def _embed(self, d: DecoderSpec | EncoderSpec, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the stack's input."""
        x = F.embedding(tokens, self._on_device(d.embed))
        if d.embed_scale != 1.0:
            x = x * torch.tensor(d.embed_scale, dtype=x.dtype, device=x.device)
        if d.position_embeddings is not None:
            x = x + self._on_device(d.position_embeddings)[positions]
        return self._norm(d.embed_norm, x)

    def encode_sequence(self, e: EncoderSpec, tokens: Sequence[int]) -> Tensor:
        """Return an encoder's last states (tokens, width) of one sequence."""
        positions = torch.arange(len(tokens), device=self.device)
        ids = torch.tensor(list(tokens), device=self.device)
        x = self._embed(e, ids, e.position_ids(ids))
        for layer in e.layers:
            q, k, v = self._project_qkv(layer.attention, self._norm(layer.attn_norm, x), positions)
            attended = self._attend(layer.attention, q, k, v, 0, causal=False).flatten(1)
            attended = self._linear(layer.attention.out, attended)
            x = self._add_branch(x, attended, layer.post_attn_norm, layer.attn_residual_norm)
            inner = self._mlp(layer.mlp, self._norm(layer.mlp_norm, x))
            x = self._add_branch(x, inner, layer.post_mlp_norm, layer.mlp_residual_norm)
        return self._norm(e.final_norm, x)

    def close(self) -> None:
        """Drop the weights."""
        self._linears.clear()
        self._device_tensors.clear()
        self._relative_biases.clear()


class KVCacheTensor:
    """Rows (heads, dim) by position, written and gathered in ``dtype``, stored as ``kv_cache_dtype``.

    ``int8`` has a scale for each row and head, ``fp8`` (e4m3) none; ``auto`` keeps rows as they are.
    """

    def __init__(self, *shape: int, dtype: torch.dtype, kv_cache_dtype: str, device: torch.device) -> None:
        """``shape``: positions, heads, dim."""
        self._dtype, self._kv_cache_dtype = dtype, kv_cache_dtype
        self._rows = torch.zeros(*shape, dtype=_STORAGE_DTYPES.get(kv_cache_dtype, dtype), device=device)
        self._scales = torch.zeros(shape[0] if kv_cache_dtype == "int8" else 0, shape[1], 1, device=device)

    def write(self, indices: Tensor, rows: Tensor) -> None:
        """Store rows (T, heads, dim) at positions (T,)."""
        if self._kv_cache_dtype == "int8":
            scale = rows.float().abs().amax(-1, keepdim=True).div_(127).clamp_(min=1e-30)
            self._scales[indices] = scale
            self._rows[indices] = (rows.float() / scale).round_().to(torch.int8)
        elif self._kv_cache_dtype == "fp8":
            # Not every device indexes 8-bit floats: the bytes are moved.
            as_fp8 = rows.float().clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
            self._rows.view(torch.uint8)[indices] = as_fp8.view(torch.uint8)
        else:
            self._rows[indices] = rows.to(self._rows.dtype)

    def gather(self, indices: Tensor) -> Tensor:
        """Return the rows (T, heads, dim) at positions (T,)."""
        if self._kv_cache_dtype == "int8":
            return (self._rows[indices].float() * self._scales[indices]).to(self._dtype)
        if self._kv_cache_dtype == "fp8":
            return self._rows.view(torch.uint8)[indices].view(torch.float8_e4m3fn).to(self._dtype)
        return self._rows[indices].to(self._dtype)


class TorchRunner(TorchLayers, ModelRunner):
    """Runs a :class:`DecoderSpec`, or with a ``comm`` a shard of one."""

    block_size = 16

    @staticmethod
    def supports(spec: DecoderSpec | None, config: EngineConfig) -> str | None:
        """Return why torch operators cannot run a model, or None."""
        if spec is None:
            return base.UNDESCRIBED
        if config.weight_offload and config.quantization:
            return f"{config.quantization} weights cannot be streamed through torch's operators"
        return specs.length_unsupported_reason(spec, config)

    def __init__(self, request: RunnerRequest, dtype: torch.dtype | None = None, cache_weights: bool = True) -> None:
        super().__init__(request, dtype, cache_weights)
        assert isinstance(request.spec, DecoderSpec), "supports() asks for a description"
        self.decoder = quantize_experts(request.spec, request.weight_format) if self._packs else request.spec
        self.comm, self.num_blocks, self.num_slots = request.comm, request.num_blocks, request.num_slots
        kv_cache_dtype = request.kv_cache_dtype if dtype is None else "auto"
        store: dict[str, Any] = {"dtype": self.dtype, "kv_cache_dtype": kv_cache_dtype, "device": self.device}
        num_positions = self.num_blocks * self.block_size
        shapes = [(num_positions, x.attention.num_kv_heads, x.attention.head_dim) for x in self.decoder.layers]
        self._keys, self._values = ([KVCacheTensor(*shape, **store) for shape in shapes] for _ in range(2))

    @torch.inference_mode()
    def run(self, batch: ModelInput) -> Tensor:
        """Return fp32 logits (len(batch.logit_indices), vocab)."""
        d, comm, x = self.decoder, self.comm, self._forward(batch)
        if comm is None or comm.is_last_stage:
            logits = self._logits(x, batch)
        else:
            comm.send_activations(x)
            logits = torch.empty(len(batch.logit_indices), d.vocab_size)
        if comm is not None:
            logits = comm.return_result(logits)
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

    @torch.inference_mode()
    def hidden_states(self, batch: ModelInput) -> Tensor:
        """Return the final hidden states, fp32 (tokens, width)."""
        states = self._norm(self.decoder.final_norm, self._forward(batch)).float()
        if self.comm is None:
            return states
        if not self.comm.is_last_stage:
            self.comm.send_activations(states)
        return self.comm.return_result(states)

    def _forward(self, batch: ModelInput) -> Tensor:
        d = self.decoder
        tokens = torch.tensor(batch.tokens, device=self.device)
        positions = torch.cat([torch.arange(s.start, s.start + s.num_tokens) for s in batch.spans]).to(self.device)
        if batch.lora_ids:
            lora_ids = [x for x, s in zip(batch.lora_ids, batch.spans, strict=True) for _ in range(s.num_tokens)]
            self.row_lora_ids = torch.tensor(lora_ids, device=self.device)
        else:
            self.row_lora_ids = torch.full((len(tokens),), -1, device=self.device)
        if self.comm is None or self.comm.is_first_stage:
            x = self._embed(d, tokens, positions)
        else:
            x = self.comm.receive_activations(len(tokens)).to(self.device, self.dtype)
        cache_indices = [
            self._cache_indices(blocks, span.start + span.num_tokens)
            for span, blocks in zip(batch.spans, batch.block_tables, strict=True)
        ]
        for index, layer in enumerate(d.layers):
            normed, residual = self._norm(layer.attn_norm, x), x
            attended = self._attention(layer.attention, index, normed, positions, cache_indices, batch)
            x = self._add_branch(x, self._all_reduce(attended), layer.post_attn_norm, layer.attn_residual_norm)
            if layer.cross_attention is not None:
                x = self._cross_attention(layer.cross_attention, layer.attention, index, x, batch)
            inner = self._mlp(layer.mlp, self._norm(layer.mlp_norm, residual if layer.parallel_residual else x))
            x = self._add_branch(x, self._all_reduce(inner), layer.post_mlp_norm, layer.mlp_residual_norm)
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
        self, cross: specs.CrossAttentionSpec, a: AttentionSpec, index: int, x: Tensor, batch: ModelInput
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
        self, a: AttentionSpec, index: int, x: Tensor, positions: Tensor, cache_indices: list[Tensor], batch: ModelInput
    ) -> Tensor:
        if a.num_heads == 0:  # a rank that has experts alone
            return torch.zeros_like(x)
        q, k, v = self._project_qkv(a, x, positions)
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
        """None: the sampler looks for the most likely token."""

    def free_slot(self, slot: int) -> None:
        """Nothing is kept outside of the blocks."""

    def close(self) -> None:
        """Drop the weights and the cache."""
        super().close()
        self._keys, self._values = [], []


class TorchEncoder(TorchLayers, EncoderRunner):
    """Runs an :class:`EncoderSpec` in plain operators."""

    @staticmethod
    def supports(spec: EncoderSpec | None, config: EngineConfig) -> str | None:
        """Return why torch operators cannot run an encoder, or None."""
        return base.UNDESCRIBED if spec is None else None

    def __init__(self, request: RunnerRequest, dtype: torch.dtype | None = None) -> None:
        super().__init__(request, dtype)
        assert isinstance(request.spec, EncoderSpec), "supports() asks for a description"
        self._encoder, self.max_num_batched_tokens = request.spec, request.max_encoder_tokens

    @torch.inference_mode()
    def run(self, inputs: Sequence[EncoderInput]) -> Tensor:
        """Return the last states."""
        return torch.cat([self.encode_sequence(self._encoder, x.tokens).float() for x in inputs])
