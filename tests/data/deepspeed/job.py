"""The job that the folders beside this file are checkpoints of: a model with odd shapes, two parameter groups."""

from __future__ import annotations

import torch
from torch import nn

ROWS, WORDS, SAVED_AFTER, STEPS = 12, 11, 3, 6
SCHEDULE = {"warmup_min_lr": 0.0, "warmup_max_lr": [0.02, 0.01], "warmup_num_steps": 8, "warmup_type": "linear"}


class OddModel(nn.Module):
    """Sizes that no number of ranks divides; a buffer, a frozen weight and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, 6)
        self.up = nn.Linear(6, 7)
        self.norm = nn.LayerNorm(7)
        self.fixed = nn.Linear(7, 5, bias=False)
        self.down = nn.Linear(5, 6)
        self.head = nn.Linear(6, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.fixed.weight.requires_grad_(False)
        self.register_buffer("scale", torch.tensor([0.5, 1.0, 1.5, 2.0, 2.5, 3.0]))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.up(self.embed(tokens))))
        hidden = torch.tanh(self.down(self.fixed(hidden))) * self.scale.to(hidden.dtype)
        return nn.functional.cross_entropy(self.head(hidden).float(), labels)


def param_groups(model: nn.Module) -> list[dict]:
    """Matrices with weight decay, all else without, each at a rate of its own."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1, "lr": 0.02},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.01},
    ]


def make_batch(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of a step's batch."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(WORDS, (ROWS,), generator=generator)
    return tokens[rank::world], ((tokens * 3 + 1) % WORDS)[rank::world]
