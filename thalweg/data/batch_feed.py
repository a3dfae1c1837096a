"""Micro-batches on their way into an engine: from the caller's iterator or the engine's own loader."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from thalweg.device import copy_to_device
from thalweg.utils.trees import map_tensors


class BatchFeed:
    """Hands out micro-batches."""

    def __init__(self, loader: Any, device: torch.device) -> None:
        self._loader, self._device = loader, device
        self._batches: Iterator[Any] | None = None
        self.batch_fn: Callable[[Any], Any] = lambda batch: batch  # what makes a micro-batch of what an iterator gives
        # ``ends_windows``: whether an epoch's end ends a window.
        self._num_seen, self.ends_windows = self._count_handed_over(), True

    def is_epoch_end(self) -> bool:
        """Whether the micro-batch just trained on was the last of the loader's epoch, and of its window.

        Only a loader that is read in step with training can tell: one batch between two calls.
        Batches from elsewhere, or read ahead into a list, end no epoch here.
        """
        num_seen, self._num_seen = self._num_seen, self._count_handed_over()
        return self.ends_windows and self._num_seen - num_seen == 1 and self._loader.at_epoch_end

    def _count_handed_over(self) -> int:
        """Batches so far; always 0 for a loader that does not know."""
        return getattr(self._loader, "num_handed_over", 0)

    def rewind(self) -> None:
        """Begin again where the loader now stands."""
        self._batches = None

    def next_batches(self, data_iter: Iterator[Any] | None, num_batches: int) -> Iterator[Any]:
        """Up to ``num_batches`` micro-batches on the device, of ``data_iter`` or of the loader.

        Raises:
            ValueError: there is neither.
        """
        if data_iter is None:
            if self._loader is None:
                raise ValueError("train_batch() needs data: pass data_iter=, or training_data= to initialize()")
            if self._batches is None:
                self._batches = cycle(self._loader)
            data_iter = self._batches
        for _ in range(num_batches):
            try:
                batch = next(data_iter)
            except StopIteration:
                return
            yield to_device(self.batch_fn(batch), self._device)

    def next_window(self, data_iter: Iterator[Any] | None, num_batches: int) -> list[Any]:
        """As :meth:`next_batches`, in a list; fewer where the loader's epoch ends."""
        batches = []
        for batch in self.next_batches(data_iter, num_batches):
            batches.append(batch)
            if self.is_epoch_end():
                break
        return batches


def cycle(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the loader's batches epoch after epoch; ends only if two epochs in a row are empty.

    One may be: a stream that was saved at its end resumes there.
    """
    num_empty_epochs = 0
    while num_empty_epochs < 2:
        num_empty_epochs += 1
        for batch in loader:
            num_empty_epochs = 0
            yield batch


def to_device(batch: Any, device: torch.device) -> Any:
    """The same tree with its tensors on ``device``."""
    return map_tensors(batch, lambda tensor: copy_to_device(tensor, device))
