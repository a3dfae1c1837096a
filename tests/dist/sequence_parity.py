"""One process against an engine whose ranks share sequences, on batches of several kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.dist.tensor_models import build
from tests.dist.tensor_parity import Run, config_of, train_engine, train_plain

TOLERANCE = {"loss": 1e-5, "gradient": 1e-5, "parameter": 1e-5}
VOCABULARY = 67


def batch_of(kind: str, step: int, rows: int, length: int) -> dict[str, torch.Tensor]:
    """Inputs of a Hugging Face model; labels are shifted inside of it."""
    generator = torch.Generator().manual_seed(90 + step)
    tokens = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    labels = tokens.clone()
    batch = {"input_ids": tokens, "labels": labels}
    if kind == "masked":  # the later shards have no target at all, and one row fewer than the other
        labels[:, length // 3 :] = -100
        labels[0, : length // 4] = -100
    if kind == "ragged":  # rows with very different numbers of targets, the first of them with none
        for row in range(rows):
            labels[row, 1 + min(row, 1) + (row * (5 + step)) % length :] = -100
    if kind == "padded":
        mask = torch.ones_like(tokens)
        mask[0, length - 3 :] = 0
        labels[0, length - 3 :] = -100
        batch["attention_mask"] = mask
    if kind == "packed":
        cut = length // 2 + 1
        positions = torch.cat([torch.arange(cut), torch.arange(length - cut)])
        batch["position_ids"] = positions.expand(rows, -1).contiguous()
        labels[:, cut] = -100
    return batch


def loss_on(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    inner = getattr(model, "module", model)
    if hasattr(inner, "main_input_name"):
        # With a key-value cache, its default, Hugging Face does not look for packed documents.
        return model(**batch, use_cache=False).loss if "position_ids" in batch else model(**batch).loss
    labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    return model(batch["input_ids"], labels)


@dataclass(frozen=True)
class Case:
    """A model, a kind of batch, a length, and the ranks of each axis."""

    model: str
    kind: str
    length: int
    stage: int = 0
    sequence: int = 1
    tensor: int = 1
    context: int = 1
    extra: tuple[tuple[str, Any], ...] = ()

    def ranks(self, world: int) -> int:
        """Ranks with other rows."""
        return world // (self.sequence * self.tensor * self.context)


def plain(case: Case, steps: int, world: int) -> Run:
    """One process on whole batches."""
    rows = 2 * case.ranks(world)
    return train_plain(
        build(case.model),
        lambda model, step: loss_on(model, batch_of(case.kind, step, rows, case.length)),
        steps,
    )


def engine(case: Case, steps: int, rank: int, world: int) -> Run:
    """The engine; every rank of a sequence takes the same rows."""
    ranks = case.ranks(world)
    rows = 2 * ranks
    own = slice(rank * ranks // world, None, ranks)
    config = config_of(
        case.stage,
        case.tensor,
        rows,
        ranks,
        sequence_parallel_size=case.sequence,
        context_parallel_size=case.context,
        **dict(case.extra),
    )

    def loss_at(model: Any, step: int) -> torch.Tensor:
        batch = batch_of(case.kind, step, rows, case.length)
        return loss_on(model, {key: value[own] for key, value in batch.items()})

    return train_engine(build(case.model), config, loss_at, steps)


def failures(rank: int, world: int, cases: list[Case], steps: int) -> list[str]:
    """Cases whose losses, gradients or parameters differ."""
    torch.set_num_threads(1)
    found = []
    for case in cases:
        differences = engine(case, steps, rank, world).differences(plain(case, steps, world))
        if any(not value <= TOLERANCE[key] for key, value in differences.items()):
            found.append(f"{case}: {differences}")
    return found
