"""A runner out of plain torch operators: the reference, mixtures of experts, and devices other than CPUs.

Keys and values of a layer lie in a pool (slot of the cache, kv head, dim); position p of a sequence is at
``16 * table[p // 16] + p % 16``.  Each span gathers its context and attends by SDPA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.infer.batch import Batch
from thalweg.infer.describe import MLP, Attention, Decoder, Experts, Linear, Norm, Rotary
from thalweg.infer.pool import Pool
from thalweg.infer.team import Team

_ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
MakeLinear = Callable[[Linear], Callable[[Tensor], Tensor]]


class EagerRunner:
    """Runs a :class:`Decoder` in ``dtype`` on ``device``; ``make_linear`` may pack the linear layers.

    Without ``keep`` nothing of a linear layer outlives its product: the weights stay where the model has them
    (a mapped file, the host's memory) and come anew each time.  ``cache``: see :class:`Pool`.
    ``team``: the ranks with which this one, which has a shard of the decoder, adds up its parts.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        dtype: torch.dtype,
        num_blocks: int,
        num_slots: int,
        max_length: int,
        block_size: int = 16,
        device: torch.device | str = "cpu",
        make_linear: MakeLinear | None = None,
        keep: bool = True,
        cache: str = "auto",
        team: Team | None = None,
    ) -> None:
        self.team = team
        self.decoder, self.dtype, self.device = decoder, dtype, torch.device(device)
        self.num_blocks, self.block_size = num_blocks, block_size
        empty = np.zeros((num_slots, -(-max_length // block_size)), dtype=np.int32)
        self.tables = empty if team is None else team.tables
        self._make, self._keep = make_linear or self._plain, keep
        self._linears: dict[int, Callable[[Tensor], Tensor]] = {}
        self._cast: dict[int, Tensor] = {}
        slots = num_blocks * block_size
        self._keys, self._values = (
            [
                Pool(slots, a.kv_heads, a.dim, dtype=dtype, cache=cache, device=self.device)
                for a in (x.attention for x in decoder.layers)
            ]
            for _ in range(2)
        )

    def _plain(self, layer: Linear) -> Callable[[Tensor], Tensor]:
        weight = layer.weight.to(self.device, self.dtype)
        bias = None if layer.bias is None else layer.bias.to(self.device, self.dtype)
        return lambda x: F.linear(x, weight, bias)

    def _linear(self, layer: Linear, x: Tensor) -> Tensor:
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

    @torch.inference_mode()
    def run(self, batch: Batch) -> Tensor:
        """Return fp32 logits (len(batch.rows), vocab)."""
        if len(batch.rows) == 0:
            self._states(batch)
            return torch.empty(0, self.decoder.vocab)
        x = self._states(batch)[torch.tensor(list(batch.rows), device=self.device)]
        d = self.decoder
        if d.norm is not None:
            x = self._norm(d.norm, x)
        logits = self._linear(d.head, x).float()
        if self.team is not None:
            logits = self.team.gather(logits)
        if d.logit_softcap:
            logits = d.logit_softcap * torch.tanh(logits / d.logit_softcap)
        return logits

    @torch.inference_mode()
    def hidden(self, batch: Batch) -> Tensor:
        """Return the final hidden states, fp32 (tokens, width)."""
        x = self._states(batch)
        return (x if self.decoder.norm is None else self._norm(self.decoder.norm, x)).float()

    def _states(self, batch: Batch) -> Tensor:
        d = self.decoder
        tokens = torch.tensor(batch.tokens, device=self.device)
        positions = torch.cat([torch.arange(s.start, s.start + s.count) for s in batch.spans]).to(self.device)
        x = F.embedding(tokens, self._at(d.embed))
        if d.embed_scale != 1.0:
            x = x * torch.tensor(d.embed_scale, dtype=x.dtype, device=x.device)
        if d.positions is not None:
            x = x + self._at(d.positions)[positions]
        if d.embed_norm is not None:
            x = self._norm(d.embed_norm, x)
        places = [self._place(span) for span in batch.spans]
        for index, layer in enumerate(d.layers):
            normed = self._norm(layer.norm1, x)
            attended = self._whole(self._attention(layer.attention, index, normed, positions, places, batch))
            before = x
            x = x + (attended if layer.post1 is None else self._norm(layer.post1, attended))
            inner = self._whole(
                self._mlp(layer.mlp, self._norm(layer.norm2, before if layer.parallel else x))
            )
            x = x + (inner if layer.post2 is None else self._norm(layer.post2, inner))
        return x

    def _whole(self, part: Tensor) -> Tensor:
        """Add up the ranks' parts, where there are several."""
        return part if self.team is None else self.team.sum(part)

    def _place(self, span: Any) -> Tensor:
        """Return where positions 0 to the span's last lie in the pools."""
        length = span.start + span.count
        size = self.block_size
        blocks = torch.from_numpy(self.tables[span.slot, : -(-length // size)].astype(np.int64))
        return (blocks[:, None] * size + torch.arange(size)).flatten()[:length].to(self.device)

    def _attention(
        self, a: Attention, index: int, x: Tensor, positions: Tensor, places: list[Tensor], batch: Batch
    ) -> Tensor:
        qkv = self._linear(a.qkv, x).view(len(x), a.heads + 2 * a.kv_heads, a.dim)
        q, k, v = qkv.split([a.heads, a.kv_heads, a.kv_heads], dim=1)
        if a.q_norm is not None and a.k_norm is not None:
            q, k = self._norm(a.q_norm, q), self._norm(a.k_norm, k)
        if a.rotary is not None:
            q, k = self._rotate(a.rotary, q, positions), self._rotate(a.rotary, k, positions)
        keys, values = self._keys[index], self._values[index]
        out, at = torch.empty_like(q), 0
        for span, place in zip(batch.spans, places, strict=True):
            part = slice(at, at + span.count)
            at += span.count
            keys.put(place[span.start :], k[part])
            values.put(place[span.start :], v[part])
            out[part] = self._attend(a, q[part], keys.get(place), values.get(place), span.start)
        return self._linear(a.out, out.flatten(1))

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

    def _attend(self, a: Attention, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        """Attend q (T, heads, dim) at positions start.. to k, v (start + T, kv heads, dim)."""
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        count, length = q.shape[1], k.shape[1]
        here = torch.arange(start, length, device=self.device)[:, None]
        there = torch.arange(length, device=self.device)[None]
        mask = there <= here
        if a.window:
            mask &= there > here - a.window
        if not a.softcap and a.slopes is None:
            plain = count == 1 and (not a.window or length <= a.window)
            group = a.heads != a.kv_heads
            y = F.scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=None if plain else mask, scale=a.scale, enable_gqa=group
            )
            return y[0].transpose(0, 1)
        k, v = (t.repeat_interleave(a.heads // a.kv_heads, 0) for t in (k, v))
        scores = (q @ k.transpose(1, 2)) * a.scale
        if a.softcap:
            scores = a.softcap * torch.tanh(scores / a.softcap)
        if a.slopes is not None:
            scores = scores + self._at(a.slopes)[:, None, None] * (there - here)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.float32).to(v.dtype)
        return (weights @ v).transpose(0, 1)

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
        up, down = self._at(m.up), self._at(m.down)
        for expert in chosen.unique().tolist():
            token, place = torch.where(chosen == expert)
            gate, value = F.linear(x[token], up[expert]).chunk(2, dim=-1)
            y = F.linear(_ACTS[m.activation](gate) * value, down[expert])
            out.index_add_(0, token, y * weight[token, place, None])
        if m.shared is not None:
            y = self._mlp(m.shared, x)
            if m.shared_gate is not None:
                y = y * F.linear(x, self._at(m.shared_gate)).sigmoid()
            out = out + y
        return out

    def _norm(self, n: Norm, x: Tensor) -> Tensor:
        weight = self._at(n.weight, torch.float32)
        wide = x.float()
        if n.style == "rms":
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + n.eps) * weight
        else:
            assert n.bias is not None
            wide = F.layer_norm(wide, weight.shape, weight, self._at(n.bias, torch.float32), n.eps)
        return wide.to(x.dtype)

    def best(self) -> None:
        """Nothing is at hand: the sampler looks for it."""

    def release(self, slot: int) -> None:
        """Nothing is kept outside of the blocks."""

    def close(self) -> None:
        """Drop the weights and the cache."""
        self._linears.clear()
        self._cast.clear()
        self._keys, self._values = [], []
