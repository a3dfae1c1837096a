"""The arithmetic of a described model in plain torch operators, shared by the runners made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.infer.adapters import Adapters
from thalweg.infer.describe import (
    MLP,
    Attention,
    Decoder,
    Encoder,
    Experts,
    Layer,
    Linear,
    Norm,
    Rotary,
)

_ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
MakeLinear = Callable[[Linear], Callable[[Tensor], Tensor]]


class Operators:
    """Computes parts of layers in ``dtype`` on ``device``; ``make_linear`` may pack the linear layers.

    Without ``keep`` nothing of a linear layer outlives its product.  ``reach``: the longest sequence.
    ``who``: which of the ``adapters`` each row has that is now computed, -1 for none.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        reach: int,
        make_linear: MakeLinear | None = None,
        keep: bool = True,
        adapters: Adapters | None = None,
    ) -> None:
        self._adapters, self.who = adapters, torch.empty(0, dtype=torch.int64)
        self.dtype, self.device, self.reach = dtype, torch.device(device), reach
        self._make, self._keep = make_linear or self._plain, keep
        self._linears: dict[int, Callable[[Tensor], Tensor]] = {}
        self._cast: dict[int, Tensor] = {}
        self._biases: dict[int, Tensor] = {}

    def _plain(self, layer: Linear) -> Callable[[Tensor], Tensor]:
        weight = layer.weight.to(self.device, self.dtype)
        bias = None if layer.bias is None else layer.bias.to(self.device, self.dtype)
        return lambda x: F.linear(x, weight, bias)

    def _linear(self, layer: Linear, x: Tensor) -> Tensor:
        y = self._product(layer, x)
        pairs = None if self._adapters is None else self._adapters.of(layer)
        for number, pair in enumerate(pairs or ()):
            rows = torch.where(self.who == number)[0]
            if pair is not None and len(rows):
                down, up = (self._at(half) for half in pair)
                y[rows] += (x[rows] @ down.t() @ up).to(y.dtype)
        return y

    def _product(self, layer: Linear, x: Tensor) -> Tensor:
        made = self._linears.get(id(layer))
        if not self._keep:
            return self._make(layer)(x)
        if made is None:
            made = self._linears[id(layer)] = self._make(layer)
        return made(x)

    def _at(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return one of the model's tensors on our device, made once; the description keeps the key alive."""
        found = self._cast.get(id(tensor))
        if found is None:
            found = self._cast[id(tensor)] = tensor.to(self.device, dtype or self.dtype)
        return found

    def _rotate(self, r: Rotary, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = (self._at(t, torch.float32)[positions][:, None].to(x.dtype) for t in (r.cos, r.sin))
        pairs = cos.shape[-1]
        turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
        if r.interleaved:
            a, b = turned[..., ::2], turned[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        else:
            a, b = turned[..., :pairs], turned[..., pairs:]
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        return torch.cat([turned, rest], -1) if rest.shape[-1] else turned

    def _attend(
        self, a: Attention, q: Tensor, k: Tensor, v: Tensor, start: int, causal: bool = True
    ) -> Tensor:
        """Attend q (T, heads, dim) at positions start.. to k, v (S, kv heads, dim); ``causal``: up to each
        one's own."""
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        count, length = q.shape[1], k.shape[1]
        here = torch.arange(start, start + count, device=self.device)[:, None]
        there = torch.arange(length, device=self.device)[None]
        mask = there <= here if causal else torch.ones(count, length, dtype=torch.bool, device=self.device)
        if a.window:
            mask &= there > here - a.window
        bias = self._bias(a, here, there)
        if not a.softcap and bias is None:
            plain = not causal or (count == 1 and (not a.window or length <= a.window))
            group = a.heads != a.kv_heads
            y = F.scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=None if plain else mask, scale=a.scale, enable_gqa=group
            )
            return y[0].transpose(0, 1)
        k, v = (t.repeat_interleave(a.heads // a.kv_heads, 0) for t in (k, v))
        scores = (q @ k.transpose(1, 2)) * a.scale
        if a.softcap:
            scores = a.softcap * torch.tanh(scores / a.softcap)
        if bias is not None:
            scores = scores + bias
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.float32).to(v.dtype)
        return (weights @ v).transpose(0, 1)

    def _bias(self, a: Attention, here: Tensor, there: Tensor) -> Tensor | None:
        """Return what is added to the scores (heads, T, S)."""
        if a.slopes is not None:
            return self._at(a.slopes)[:, None, None] * (there - here)
        if a.relative is None:
            return None
        if id(a.relative) not in self._biases:
            self._biases[id(a.relative)] = a.relative.table(self.reach).to(self.device, self.dtype)
        return self._biases[id(a.relative)][:, self.reach + there - here]

    def _mlp(self, m: MLP | Experts, x: Tensor) -> Tensor:
        if isinstance(m, Experts):
            return self._experts(m, x)
        y = self._linear(m.up, x)
        if m.gated:
            gate, value = y.chunk(2, dim=-1)
            return self._linear(m.down, _ACTS[m.activation](gate) * value)
        return self._linear(m.down, _ACTS[m.activation](y))

    def _experts(self, m: Experts, x: Tensor) -> Tensor:
        chances = F.linear(x, self._at(m.router)).softmax(-1, dtype=torch.float32)
        weight, chosen = chances.topk(m.top_k, dim=-1)
        if m.normalise:
            weight = weight / weight.sum(-1, keepdim=True)
        weight = weight.to(x.dtype)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            number = expert - m.first
            if not 0 <= number < m.count:
                continue  # another rank's
            token, place = torch.where(chosen == expert)
            up, down = self._halves(m, number)
            gate, value = up(x[token]).chunk(2, dim=-1)
            y = down(_ACTS[m.activation](gate) * value)
            out.index_add_(0, token, y * weight[token, place, None])
        if m.shared is not None:
            y = self._mlp(m.shared, x)
            if m.shared_gate is not None:
                y = y * F.linear(x, self._at(m.shared_gate)).sigmoid()
            out = out + y
        return out

    def _halves(self, m: Experts, number: int) -> Sequence[Callable[[Tensor], Tensor]]:
        """Return an expert's two products."""
        if m.packed is not None:
            return m.packed[number]
        if not self._keep:
            return [partial(F.linear, weight=t[number].to(self.device, self.dtype)) for t in (m.up, m.down)]
        return [partial(F.linear, weight=self._at(t)[number]) for t in (m.up, m.down)]

    def _norm(self, n: Norm | None, x: Tensor) -> Tensor:
        if n is None:
            return x
        weight = self._at(n.weight, torch.float32)
        wide = x.float()
        if n.style == "rms":
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + n.eps) * weight
        else:
            assert n.bias is not None
            wide = F.layer_norm(wide, weight.shape, weight, self._at(n.bias, torch.float32), n.eps)
        return wide.to(x.dtype)

    def _after(self, layer: Layer, x: Tensor, attended: Tensor) -> Tensor:
        """Add what attention gave to x."""
        x = x + (attended if layer.post1 is None else self._norm(layer.post1, attended))
        return x if layer.after1 is None else self._norm(layer.after1, x)

    def _embedded(self, d: Decoder | Encoder, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the stack's input."""
        x = F.embedding(tokens, self._at(d.embed))
        if d.embed_scale != 1.0:
            x = x * torch.tensor(d.embed_scale, dtype=x.dtype, device=x.device)
        if d.positions is not None:
            x = x + self._at(d.positions)[positions]
        return x if d.embed_norm is None else self._norm(d.embed_norm, x)

    def encoded(self, e: Encoder, tokens: Sequence[int]) -> Tensor:
        """Return an encoder's last states (tokens, width) of one sequence."""
        positions = torch.arange(len(tokens), device=self.device)
        ids = torch.tensor(list(tokens), device=self.device)
        x = self._embedded(e, ids, e.places(ids))
        for layer in e.layers:
            a = layer.attention
            qkv = self._linear(a.qkv, self._norm(layer.norm1, x)).view(
                len(x), a.heads + 2 * a.kv_heads, a.dim
            )
            q, k, v = qkv.split([a.heads, a.kv_heads, a.kv_heads], dim=1)
            if a.q_norm is not None:
                q, k = self._norm(a.q_norm, q), self._norm(a.k_norm, k)
            if a.rotary is not None:
                q, k = self._rotate(a.rotary, q, positions), self._rotate(a.rotary, k, positions)
            x = self._after(
                layer, x, self._linear(a.out, self._attend(a, q, k, v, 0, causal=False).flatten(1))
            )
            inner = self._mlp(layer.mlp, self._norm(layer.norm2, x))
            x = self._norm(
                layer.after2, x + (inner if layer.post2 is None else self._norm(layer.post2, inner))
            )
        return self._norm(e.norm, x)

    def drop(self) -> None:
        """Drop the weights."""
        self._linears.clear()
        self._cast.clear()
        self._biases.clear()
