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

from thalweg.data.sampler import BatchSlice, EpochSampler, rank_slice_bounds


class ShardedIterableDataset(IterableDataset):
    """Yields ``(share, collated batch)`` for one rank, from sample ``start`` of the stream on.

    A dataset with ``set_epoch`` is told nothing here: a stream that differs between epochs
    has to arrange that itself, and alike on each rank.
    """

    def __init__(
        self, dataset: Any, epoch_sampler: EpochSampler, start: int, collate_fn: Callable[[list[Any]], Any]
    ) -> None:
        self._dataset = dataset
        self._epoch_sampler = epoch_sampler
        self._start = start
        self._collate = collate_fn

    def __iter__(self) -> Iterator[tuple[BatchSlice, Any]]:
        epoch_sampler = self._epoch_sampler
        lookahead = epoch_sampler.world_size * epoch_sampler.batch_size + epoch_sampler.world_size
        stream = islice(iter(self._dataset), self._start, None)
        lookahead_buffer: list[Any] = list(islice(stream, lookahead))
        position = self._start
        while step_size := epoch_sampler.next_step_size(len(lookahead_buffer)):
            low, high = rank_slice_bounds(step_size, epoch_sampler.rank, epoch_sampler.world_size)
            ids = list(range(position + low, position + high))
            samples = lookahead_buffer[low:high]
            num_duplicates = int(not samples)
            if num_duplicates:  # fewer samples left than ranks: see the rule in sampler.py
                duplicate_index = (epoch_sampler.rank - step_size) % step_size
                ids, samples = [position + duplicate_index], [lookahead_buffer[duplicate_index]]
            del lookahead_buffer[:step_size]
            lookahead_buffer += islice(stream, lookahead - len(lookahead_buffer))
            start, position = position, position + step_size
            is_last = epoch_sampler.next_step_size(len(lookahead_buffer)) == 0
            yield BatchSlice(start, position, ids, num_duplicates, is_last), self._collate(samples)
