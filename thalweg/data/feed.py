"""Micro-batches on their way into an engine: from the caller's iterator or the engine's own loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from thalweg.data.batches import forever, to_device
from thalweg.data.for_engine import EpochEnd


class Feed:
    """Hands out micro-batches; ``epoch_ends()`` tells whether the one just used was an epoch's last."""

    def __init__(self, loader: Any, device: torch.device) -> None:
        self._loader, self._device = loader, device
        self._batches: Iterator[Any] | None = None
        self.epoch_ends = EpochEnd(loader)

    def rewind(self) -> None:
        """Begin again where the loader now stands."""
        self._batches = None

    def take(self, data_iter: Iterator[Any] | None, count: int) -> Iterator[Any]:
        """Up to ``count`` micro-batches on the device, of ``data_iter`` or of the loader.

        Raises:
            ValueError: there is neither.
        """
        if data_iter is None:
            if self._loader is None:
                raise ValueError(
                    "train_batch() needs data: pass data_iter=, or training_data= to initialize()"
                )
            if self._batches is None:
                self._batches = forever(self._loader)
            data_iter = self._batches
        for _ in range(count):
            try:
                batch = next(data_iter)
            except StopIteration:
                return
            yield to_device(batch, self._device)

    def window(self, data_iter: Iterator[Any] | None, count: int) -> list[Any]:
        """As :meth:`take`, in one; fewer where the loader's epoch ends."""
        batches = []
        for batch in self.take(data_iter, count):
            batches.append(batch)
            if self.epoch_ends():
                break
        return batches
