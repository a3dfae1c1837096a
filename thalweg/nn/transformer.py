"""The reference GPT: a plain single-device model that every feature is tested on.

GPT-2's layout (pre-norm, learned positions, GELU MLP of four times the width) in
standard modules, so that whatever shards, compiles or checkpoints it must do the
same for anybody's model.  Shape legend: B batch, T sequence, D width, V vocabulary,
H heads.
"""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a :class:`GPT`; the defaults make the 4 x 256 model of the benchmarks."""

    vocab_size: int = 8192
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 256
    block_size: int = 256
    dropout: float = 0.0
    tied: bool = True

    def to_dict(self) -> dict[str, int | float | bool]:
        """Return the shape as JSON-ready scalars."""
        return asdict(self)


class Attention(nn.Module):
    """Causal self-attention through SDPA; x_BTD -> x_BTD."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, _ = x_BTD.shape
        q, k, v = (part.reshape(B, T, self.n_head, -1).transpose(1, 2) for part in self.qkv(x_BTD).chunk(3, dim=2))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.proj(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """Two linear layers around a GELU; x_BTD -> x_BTD."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTD), approximate="tanh"))


class Block(nn.Module):
    """One pre-norm transformer layer; x_BTD -> x_BTD."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.n_embd)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.drop(self.attention(self.norm1(x_BTD)))
        return x_BTD + self.drop(self.mlp(self.norm2(x_BTD)))


class GPT(nn.Module):
    """Decoder-only language model (Radford et al. 2019).

    ``forward(tokens_BT, labels_BT=None, position_ids=None)`` returns the logits (B, T, V), or the mean
    cross-entropy in nats (a 0-dim fp32 tensor) when labels are given; label -100 is
    ignored.  Labels are the *next* tokens already: nothing is shifted here.
    ``position_ids`` (T,) or (B, T) count from 0 unless given.
    """

    _no_split_modules = ("Block",)

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.n_embd % config.n_head:
            raise ValueError(f"n_embd = {config.n_embd} is not a multiple of n_head = {config.n_head}")
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.wte.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """GPT-2's initialisation: normal(0, 0.02), residual outputs scaled by 1/sqrt(2L)."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                residual = name.endswith((".proj", ".down"))
                std = 0.02 / (2 * self.config.n_layer) ** 0.5 if residual else 0.02
                nn.init.normal_(module.weight, std=std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, tokens_BT: Tensor, labels_BT: Tensor | None = None, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.drop(self.wte(tokens_BT) + self.wpe(position_ids))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.head(self.norm(x_BTD))
        if labels_BT is None:
            return logits_BTV
        return F.cross_entropy(logits_BTV.float().flatten(0, 1), labels_BT.flatten(), ignore_index=-100)
