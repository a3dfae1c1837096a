"""A Llama-shaped decoder in plain torch modules, and the arithmetic that one of its tokens costs.

RMSNorm, rotary positions, grouped-query attention through SDPA, SwiGLU (Touvron et al. 2023).  It is here,
and not Hugging Face's, so that a GPU machine needs nothing but torch.  Shape legend: B batch, T sequence,
D width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        q = self.q(x_BTD).view(B, T, self.heads, self.head_dim).transpose(1, 2)
        k, v = self.kv(x_BTD).view(B, T, 2 * self.kv_heads, self.head_dim).transpose(1, 2).chunk(2, dim=1)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads != self.heads)
        return self.out(y.transpose(1, 2).reshape(B, T, D))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.attention = _Attention(width, heads, kv_heads)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD), cos, sin)
        gate, up = self.gate_up(self.norm2(x_BTD)).chunk(2, dim=-1)
        return x_BTD + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """``forward(tokens_BT, labels_BT) -> loss``, the mean cross-entropy in nats (fp32, 0-dim)."""

    _no_split_modules = ("_Block",)

    def __init__(self, *, layers: int, heads: int, kv_heads: int, width: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(_Block(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT)
        half = torch.arange(self.head_dim // 2, device=tokens_BT.device, dtype=torch.float32)
        angle = torch.outer(
            torch.arange(tokens_BT.shape[1], device=tokens_BT.device, dtype=torch.float32),
            10000.0 ** (-2.0 * half / self.head_dim),
        )
        cos, sin = angle.cos().to(x_BTD.dtype), angle.sin().to(x_BTD.dtype)
        for block in self.blocks:
            x_BTD = block(x_BTD, cos, sin)
        logits_BTV = self.head(self.norm(x_BTD))
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), labels_BT.flatten())


def matmul_parameters(*, layers: int, heads: int, kv_heads: int, width: int, hidden: int, vocabulary: int) -> int:
    """Return the weights that take part in a matrix product: all but the norms and the input embedding."""
    attention = 2 * width**2 + 2 * width * kv_heads * (width // heads)
    return layers * (attention + 3 * width * hidden) + vocabulary * width


def flops_per_token(shape: dict[str, int], sequence: int, *, causal: bool = False) -> float:
    """Return the floating-point operations of one training token, forward and backward.

    Six for each weight in a matrix product, and ``12 L D T`` for the two products of attention (Chowdhery
    et al. 2022, "PaLM", appendix B), half of that when `causal` counts only what the mask leaves.
    """
    attention = 12.0 * shape["layers"] * shape["width"] * sequence
    return 6.0 * matmul_parameters(**shape) + attention / (2 if causal else 1)
