"""Small facts about batches and model outputs that any training loop needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from thalweg.device import copy_to_device
from thalweg.utils.trees import map_tensors


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
