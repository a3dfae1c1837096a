"""Architectures that nobody described: the derived tensor-parallel plan must find its way or leave them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB_SIZE, WIDTH, SEQ_LEN = 53, 24, 10


class LanguageModel(nn.Module):
    """Embedding, blocks, norm, head; ``forward(tokens, labels=None)``."""

    def __init__(self, block: Callable[[], nn.Module], layers: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB_SIZE, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _grouped_attention(q: Tensor, k: Tensor, v: Tensor, heads: int, groups: int) -> Tensor:
    """(B, T, heads * D) and (B, T, groups * D) -> (B, T, heads * D)."""
    B, T, _ = q.shape
    q, k, v = (x.view(B, T, n, -1).transpose(1, 2) for x, n in ((q, heads), (k, groups), (v, groups)))
    k, v = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, -1)


class ParallelBlock(nn.Module):
    """Attention and MLP side by side on one norm, with rotated queries and keys, in its own forward."""

    def __init__(self, heads: int = 4, groups: int = 4) -> None:
        super().__init__()
        self.n, self.groups, self.inner = heads, groups, 40
        width = WIDTH // heads
        self.ln = nn.LayerNorm(WIDTH)
        self.to_q, self.to_out = nn.Linear(WIDTH, heads * width), nn.Linear(heads * width, WIDTH)
        self.to_k, self.to_v = (nn.Linear(WIDTH, groups * width, bias=False) for _ in range(2))
        self.scale_q = nn.Parameter(torch.full((width,), 1.3))
        self.fc_in, self.fc_out = nn.Linear(WIDTH, self.inner), nn.Linear(self.inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln(x)
        q = (self.to_q(y).unflatten(-1, (self.n, -1)) * self.scale_q).flatten(-2)
        a = self.to_out(_grouped_attention(q, self.to_k(y), self.to_v(y), self.n, self.groups))
        return x + a + self.fc_out(F.gelu(self.fc_in(y)))


class InterleavedQkvBlock(nn.Module):
    """q, k, v fused by head, with a norm of each head; a gated MLP whose gate and value are fused."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.dim = 4, WIDTH
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.wqkv, self.wo = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm = nn.LayerNorm(WIDTH // 4)
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * 32, bias=False), nn.Linear(32, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = self.wqkv(self.ln1(x)).view(B, T, self.num_heads, 3, -1).unbind(3)
        q, k, v = (part.transpose(1, 2) for part in (self.q_norm(q), k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.wo(y.reshape(B, T, self.dim))
        gate, up = self.gate_up(self.ln2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class FusedProjectionBlock(nn.Module):
    """q, k, v and the MLP from one matrix, and one matrix back (as PaLM's)."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.sizes = 4, [WIDTH, WIDTH, WIDTH, 48]
        self.ln = nn.LayerNorm(WIDTH)
        self.into, self.back = nn.Linear(WIDTH, sum(self.sizes)), nn.Linear(WIDTH + 48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, h = self.into(self.ln(x)).split(self.sizes, -1)
        return x + self.back(torch.cat([_grouped_attention(q, k, v, self.heads, self.heads), F.gelu(h)], -1))


class Conv1D(nn.Module):
    """A layer that keeps its matrix as (in, out), as GPT-2's Conv1D does."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(ins, outs) * ins**-0.5),
            nn.Parameter(torch.zeros(outs)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Conv1DBlock(nn.Module):
    """Conv1D-like layers, q, k and v in sections, an in-place activation."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head = 4
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = Conv1D(WIDTH, 3 * WIDTH), Conv1D(WIDTH, WIDTH)
        self.up, self.act, self.down = Conv1D(WIDTH, 44), nn.ReLU(inplace=True), Conv1D(44, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(self.ln1(x)).chunk(3, -1)
        x = x + self.c_proj(_grouped_attention(q, k, v, self.n_head, self.n_head))
        return x + self.down(self.act(self.up(self.ln2(x))))


class GatedRecurrenceBlock(nn.Module):
    """No attention: a decaying sum over time of each feature, gated (a linear recurrence)."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.decay, self.gate = (nn.Linear(WIDTH, 56) for _ in range(3))
        self.out = nn.Linear(56, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        value, decay = self.value(x), torch.sigmoid(self.decay(x))
        state, states = torch.zeros_like(value[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + (1 - decay[:, t]) * value[:, t]
            states.append(state)
        return x + self.out(torch.stack(states, 1) * torch.tanh(self.gate(x)))


class MlpClassifier(nn.Module):
    """No language model at all: features in, four classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 36), nn.Tanh(), nn.Linear(36, 40), nn.SiLU(),
            nn.Linear(40, 4),
        )  # fmt: skip

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.net(x.float())
        return logits if labels is None else F.cross_entropy(logits, labels)


class FeatureMixingBlock(nn.Module):
    """Every feature meets every other between the two layers: nothing here may be cut."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.variant = variant
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.middle = nn.LayerNorm(48) if variant == "norm" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.variant == "norm":
            y = self.middle(y)
        elif self.variant == "softmax":
            y = y.softmax(-1)
        elif self.variant == "chosen":  # the largest feature decides, which autograd does not see
            y = F.gelu(y) * (1 + y.argmax(-1, keepdim=True) % 2)
        elif self.variant == "weight":  # the second layer's matrix is used once more
            return x + self.down(F.gelu(y)) + F.linear(F.linear(x, self.up.weight), self.up.weight.t())
        elif self.variant == "bypass":
            return x + self.down(F.gelu(y)) + y.mean(-1, keepdim=True)
        return x + self.down(y)


SHARDABLE_MODELS: dict[str, Callable[[], nn.Module]] = {
    "parallel": lambda: LanguageModel(ParallelBlock),
    "parallel, 4 heads on 2": lambda: LanguageModel(lambda: ParallelBlock(4, 2), tied=True),
    "interleaved": lambda: LanguageModel(InterleavedQkvBlock),
    "one matrix": lambda: LanguageModel(FusedProjectionBlock),
    "convolved": lambda: LanguageModel(Conv1DBlock),
    "gated": lambda: LanguageModel(GatedRecurrenceBlock),
    "tower": MlpClassifier,
}
UNSHARDABLE_VARIANTS = ("norm", "softmax", "chosen", "weight", "bypass")


def build_model(name: str, seed: int = 0) -> nn.Module:
    """A model by name, with weights in which a mistake shows."""
    torch.manual_seed(seed)
    model = SHARDABLE_MODELS[name]() if name in SHARDABLE_MODELS else LanguageModel(lambda: FeatureMixingBlock(name))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def make_batch(name: str, step: int, rows: int) -> tuple[Any, Any]:
    """Inputs and targets of a step."""
    g = torch.Generator().manual_seed(300 + step)
    if name == "tower":
        return torch.randn(rows, WIDTH, generator=g), torch.randint(0, 4, (rows,), generator=g)
    tokens = torch.randint(0, VOCAB_SIZE, (rows, SEQ_LEN + 1), generator=g)
    return tokens[:, :-1], tokens[:, 1:]
