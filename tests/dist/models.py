"""Small models with the shapes that break sharding: ties, scalars, odd sizes, frozen parts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thalweg.nn.transformer import GPT, GPTConfig

VOCAB_SIZE = 61
SEQ_LEN = 12


def tiny_gpt(seed: int = 0, tied: bool = True, dropout: float = 0.0, width: int = 24) -> GPT:
    """A GPT of 3 layers x ``width`` with a vocabulary that divides by no world size."""
    torch.manual_seed(seed)
    shape = GPTConfig(
        vocab_size=VOCAB_SIZE,
        n_layer=3,
        n_head=2,
        n_embd=width,
        block_size=SEQ_LEN,
        tied=tied,
        dropout=dropout,
    )
    return GPT(shape)


class OddShapesModel(nn.Module):
    """Rows fewer than ranks, a 0-dim scale, a frozen layer, a buffer; returns a scalar loss."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCAB_SIZE, 5)
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(5, 1)])
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(5)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("offset", torch.linspace(-1, 1, 5))

    def forward(self, tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        x = self.embed(tokens_BT)
        x = x + self.offset.to(x.dtype)
        x = self.norm(x + self.layers[1](torch.tanh(self.layers[0](x))))
        y = self.layers[2](x + self.frozen(x)).squeeze(-1) * self.scale
        return F.mse_loss(y.float(), labels_BT.float() / VOCAB_SIZE)


def make_batch(step: int, size: int, length: int = SEQ_LEN) -> tuple[Tensor, Tensor]:
    """Tokens and next tokens (size, length) of a global step, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, VOCAB_SIZE, (size, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def token_rows(count: int, end: int, vocab_size: int) -> list[dict[str, torch.Tensor]]:
    """So many rows of token ids, of lengths 4 to ``end`` - 1, as a data set."""
    generator = torch.Generator().manual_seed(3)
    sizes = torch.randint(4, end, (count,), generator=generator).tolist()
    ids = [torch.randint(1, vocab_size, (size,), generator=generator) for size in sizes]
    return [{"tokens_BT": one, "labels_BT": one} for one in ids]


def write_length_index(rows: list[dict[str, torch.Tensor]], folder: str) -> str:
    """Write the data analyser's index of :func:`token_rows` by length, as "seqlen"; returns ``folder``."""
    from thalweg.data import DataAnalyzer

    names = {"metric_names": ["seqlen"], "metric_functions": [lambda batch: torch.tensor([len(batch[0]["tokens_BT"])])]}
    DataAnalyzer(rows, save_path=folder, collate_fn=list, **names).run_map_reduce()  # type: ignore[arg-type]
    return folder
