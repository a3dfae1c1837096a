"""The engine's loader, from what the user gave as ``training_data``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import DataLoader

from thalweg.config import Config
from thalweg.config.schema.base import AUTO, replace_by_path
from thalweg.data.loader import StatefulLoader, build_loader
from thalweg.data.wrap_loader import wrap_dataloader
from thalweg.parallel.sequence.batch_split import BatchSplitter


class SequenceSplitCollate:
    """Collates a batch and keeps this rank's part of each sequence in it, where the batch has names.

    Labels are shifted before the cut and positions are those of the whole; everything that is by
    token is then as long as the part, so that devices and memory see no more than that.
    """

    def __init__(self, collate_fn: Callable[..., Any], splitter: BatchSplitter) -> None:
        self.collate_fn, self.splitter = collate_fn, splitter

    def __call__(self, samples: Any) -> Any:
        batch = self.collate_fn(samples)
        return self.splitter.split_batch(batch) if isinstance(batch, Mapping) else batch


def take_batch_size(config: Config, data: Any) -> Config:
    """The config with a DataLoader's batch size as its micro-batch, where it names none and that leaves a choice."""
    if not isinstance(data, DataLoader) or data.batch_size is None:
        return config
    micro, whole, steps = (
        value in (None, AUTO)
        for value in (
            config.train_micro_batch_size_per_gpu,
            config.train_batch_size,
            config.gradient_accumulation_steps,
        )
    )
    if not (micro and (whole or steps)):
        return config
    return replace_by_path(config, {"train_micro_batch_size_per_gpu": data.batch_size})  # type: ignore[return-value]


def build_engine_loader(
    data: Any,
    config: Config,
    rank: int,
    world_size: int,
    collate_fn: Callable[..., Any] | None = None,
    splitter: BatchSplitter | None = None,
) -> Any:
    """A stateful loader of this rank's micro-batches; a DataLoader is adopted, None stays None.

    ``splitter``: cuts them into the parts of ranks that share sequences; a loader that is used as it is
    (one rank, or a sampler that deals out by itself) keeps whole batches, and the model cuts them.

    Raises:
        ValueError: the data cannot give every rank a batch, or a DataLoader's batches are not the config's.
    """
    if data is None:
        return None
    batch_size = int(config.train_micro_batch_size_per_gpu)
    ranks: dict[str, Any] = {"rank": rank, "world_size": world_size, "seed": config.seed or 0}
    if isinstance(data, DataLoader):
        if data.batch_size not in (None, batch_size):
            raise ValueError(
                f"training_data is a DataLoader with batch_size {data.batch_size}, and the config's "
                f"train_micro_batch_size_per_gpu is {batch_size}: make them equal, or leave "
                "train_micro_batch_size_per_gpu out of the config, and the DataLoader's counts"
            )
        loader = wrap_dataloader(data, **ranks)
    else:
        drop_last = config.dataloader_drop_last
        loader = build_loader(data, batch_size=batch_size, drop_last=drop_last, collate_fn=collate_fn, **ranks)
    if splitter is not None and isinstance(loader, StatefulLoader):
        loader.collate_fn = SequenceSplitCollate(loader.collate_fn, splitter)
    return loader


class EpochEndDetector:
    """Tells whether the micro-batch just trained on was the last of the loader's epoch.

    Only a loader that is read in step with training can tell: one batch between two calls.
    Batches from elsewhere, or read ahead into a list, end no epoch here.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._num_seen = self._count()

    def _count(self) -> int:
        """Batches handed over; always 0 for a loader that does not know."""
        return getattr(self._loader, "num_handed_over", 0)

    def __call__(self) -> bool:
        """Whether the window ends with this micro-batch because the epoch does."""
        num_seen, self._num_seen = self._num_seen, self._count()
        return self._num_seen - num_seen == 1 and self._loader.at_epoch_end
