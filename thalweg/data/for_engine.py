"""The engine's loader, from what the user gave as ``training_data``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from thalweg.config import Config
from thalweg.data.adopt import adopt_loader
from thalweg.data.loader import build_loader


def make_loader(
    data: Any, config: Config, rank: int, world_size: int, collate_fn: Callable[..., Any] | None = None
) -> Any:
    """A stateful loader of this rank's micro-batches; a DataLoader is adopted, None stays None.

    Raises:
        ValueError: the data cannot give every rank a batch.
    """
    if data is None:
        return None
    if isinstance(data, DataLoader):
        return adopt_loader(data, rank=rank, world_size=world_size, seed=config.seed or 0)
    return build_loader(
        data,
        batch_size=int(config.train_micro_batch_size_per_gpu),
        rank=rank,
        world_size=world_size,
        seed=config.seed or 0,
        drop_last=config.dataloader_drop_last,
        collate_fn=collate_fn,
    )
