"""Shares of a dataset that can only be read from start to end.

Every rank reads the same stream, numbers the samples as they come, and keeps its own
share of each step by the same rule as for a dataset with a length (``sampler.py``).  That
rule needs to know how many samples are left only up to one step and one sample per rank,
so the reader looks that far ahead and no further.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from thalweg.data.sampler import EpochPlan, Share, share_bounds


class StreamShares(IterableDataset):
    """Yields ``(share, collated batch)`` for one rank, from sample ``start`` of the stream on.

    A dataset with ``set_epoch`` is told nothing here: a stream that differs between epochs
    has to arrange that itself, and alike on each rank.
    """

    def __init__(
        self, dataset: Any, plan: EpochPlan, start: int, collate_fn: Callable[[list[Any]], Any]
    ) -> None:
        self._dataset = dataset
        self._plan = plan
        self._start = start
        self._collate = collate_fn

    def __iter__(self) -> Iterator[tuple[Share, Any]]:
        plan = self._plan
        ahead = plan.world_size * plan.batch_size + plan.world_size
        stream = islice(iter(self._dataset), self._start, None)
        window: list[Any] = list(islice(stream, ahead))
        position = self._start
        while total := plan.take(len(window)):
            low, high = share_bounds(total, plan.rank, plan.world_size)
            ids = list(range(position + low, position + high))
            samples = window[low:high]
            repeated = int(not samples)
            if repeated:  # fewer samples left than ranks: see the rule in sampler.py
                again = (plan.rank - total) % total
                ids, samples = [position + again], [window[again]]
            del window[:total]
            window += islice(stream, ahead - len(window))
            start, position = position, position + total
            last = plan.take(len(window)) == 0
            yield Share(start, position, ids, repeated, last), self._collate(samples)
