"""The jobs of the pipeline's and the experts' folders; ``library`` is deepspeed or thalweg, whose classes agree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.data.deepspeed.job import WORDS, make_batch

MICRO_BATCHES, EXPERTS, EXPERT_RANKS = 2, 4, 2


def _use_as_head(module: nn.Embedding, hidden: Tensor) -> Tensor:
    return hidden @ module.weight.T


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float(), labels)


def pipeline_model(library: Any, stages: int) -> nn.Module:
    """Layers of odd sizes; the embedding is the head, on the last stage, too."""
    layers = [
        library.pipe.TiedLayerSpec("embed", nn.Embedding, WORDS, 6),
        library.pipe.LayerSpec(nn.Linear, 6, 7),
        torch.tanh,
        library.pipe.LayerSpec(nn.LayerNorm, 7),
        library.pipe.LayerSpec(nn.Linear, 7, 6),
        library.pipe.TiedLayerSpec("embed", nn.Embedding, WORDS, 6, forward_fn=_use_as_head),
    ]
    torch.manual_seed(0)
    return library.pipe.PipelineModule(layers=layers, num_stages=stages, loss_fn=_loss, partition_method="uniform")


def micro_batches(step: int, rank: int, world: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This data rank's micro-batches of a step."""
    tokens, labels = make_batch(step, rank, world)
    return iter(list(zip(tokens.chunk(MICRO_BATCHES), labels.chunk(MICRO_BATCHES), strict=True)))


class ExpertModel(nn.Module):
    """A layer of experts beside a dense one; each token has one expert, and none is dropped."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, 6)
        expert = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))
        options = {"use_residual": True, "drop_tokens": False, "use_rts": False, "min_capacity": 0}
        self.mixture = layer(6, expert, num_experts=EXPERTS, ep_size=EXPERT_RANKS, k=1, **options)
        self.head = nn.Linear(6, WORDS)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        return _loss(self.head(hidden + self.mixture(hidden)[0]), labels)
