"""The arithmetic of a described model in plain torch operators, shared by the runners made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.infer.lora import LoraManager
from thalweg.infer.models.spec import (
    AttentionSpec,
    DecoderLayerSpec,
    DecoderSpec,
    EncoderSpec,
    LinearSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
    RopeTable,
)

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
LinearFactory = Callable[[LinearSpec], Callable[[Tensor], Tensor]]


class TorchLayers:
    """Computes parts of layers in ``dtype`` on ``device``; ``make_linear`` may pack the linear layers.

    Without ``cache_weights`` nothing of a linear layer outlives its product.  ``max_length``: the longest sequence.
    ``row_lora_ids``: which adapter of ``lora`` each row of the current step has, -1 for none.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        max_length: int,
        make_linear: LinearFactory | None = None,
        cache_weights: bool = True,
        lora: LoraManager | None = None,
    ) -> None:
        self._lora, self.row_lora_ids = lora, torch.empty(0, dtype=torch.int64)
        self.dtype, self.device, self.max_length = dtype, torch.device(device), max_length
        self._make_linear, self._cache_weights = make_linear or self._plain_linear, cache_weights
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
        made = self._linears.get(id(layer))
        if not self._cache_weights:
            return self._make_linear(layer)(x)
        if made is None:
            made = self._linears[id(layer)] = self._make_linear(layer)
        return made(x)

    def _on_device(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return one of the model's tensors on our device, made once; the description keeps the key alive."""
        moved = self._device_tensors.get(id(tensor))
        if moved is None:
            moved = self._device_tensors[id(tensor)] = tensor.to(self.device, dtype or self.dtype)
        return moved

    def _apply_rope(self, r: RopeTable, x: Tensor, positions: Tensor) -> Tensor:
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
            enable_gqa = a.num_heads != a.num_kv_heads
            y = F.scaled_dot_product_attention(
                q[None],
                k[None],
                v[None],
                attn_mask=None if needs_no_mask else mask,
                scale=a.scale,
                enable_gqa=enable_gqa,
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
        if id(a.relative_bias) not in self._relative_biases:
            self._relative_biases[id(a.relative_bias)] = a.relative_bias.build_table(self.max_length).to(
                self.device, self.dtype
            )
        return self._relative_biases[id(a.relative_bias)][:, self.max_length + key_pos - query_pos]

    def _mlp(self, m: MLPSpec | MoESpec, x: Tensor) -> Tensor:
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

    def _add_attention(self, layer: DecoderLayerSpec, x: Tensor, attended: Tensor) -> Tensor:
        """Add what attention gave to x."""
        x = x + (attended if layer.post_attn_norm is None else self._norm(layer.post_attn_norm, attended))
        return x if layer.attn_residual_norm is None else self._norm(layer.attn_residual_norm, x)

    def _embed(self, d: DecoderSpec | EncoderSpec, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the stack's input."""
        x = F.embedding(tokens, self._on_device(d.embed))
        if d.embed_scale != 1.0:
            x = x * torch.tensor(d.embed_scale, dtype=x.dtype, device=x.device)
        if d.position_embeddings is not None:
            x = x + self._on_device(d.position_embeddings)[positions]
        return x if d.embed_norm is None else self._norm(d.embed_norm, x)

    def encode_sequence(self, e: EncoderSpec, tokens: Sequence[int]) -> Tensor:
        """Return an encoder's last states (tokens, width) of one sequence."""
        positions = torch.arange(len(tokens), device=self.device)
        ids = torch.tensor(list(tokens), device=self.device)
        x = self._embed(e, ids, e.position_ids(ids))
        for layer in e.layers:
            a = layer.attention
            qkv = self._linear(a.qkv, self._norm(layer.attn_norm, x)).view(
                len(x), a.num_heads + 2 * a.num_kv_heads, a.head_dim
            )
            q, k, v = qkv.split([a.num_heads, a.num_kv_heads, a.num_kv_heads], dim=1)
            if a.q_norm is not None:
                q, k = self._norm(a.q_norm, q), self._norm(a.k_norm, k)
            if a.rope is not None:
                q, k = self._apply_rope(a.rope, q, positions), self._apply_rope(a.rope, k, positions)
            x = self._add_attention(layer, x, self._linear(a.out, self._attend(a, q, k, v, 0, causal=False).flatten(1)))
            inner = self._mlp(layer.mlp, self._norm(layer.mlp_norm, x))
            x = self._norm(
                layer.mlp_residual_norm,
                x + (inner if layer.post_mlp_norm is None else self._norm(layer.post_mlp_norm, inner)),
            )
        return self._norm(e.final_norm, x)

    def free(self) -> None:
        """Drop the weights."""
        self._linears.clear()
        self._device_tensors.clear()
        self._relative_biases.clear()
