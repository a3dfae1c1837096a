"""Samples from easy to hard: which of them a step may meet, and which it takes.

    step of the schedule --> a difficulty for each metric --> the samples that are easy enough by all of them (the pool)
    position p in the run --> round p // W and place p % W in the pool of W samples, whose order each round is another

A pool is dealt out without repetition, round after round.  Everything follows from the seed, the schedules and the
position in samples of the whole job, so the loader's state is that of any other (``sampler.py``): a run goes on at any
world size with the samples that it would have met.  Schedules count global batches, from 1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from thalweg.config.schema.data import CurriculumMetric
from thalweg.data.data_analyzer import DifficultyIndex
from thalweg.data.sampler import EpochSampler, permutation
from thalweg.nn.curriculum import CurriculumScheduler


class Curriculum:
    """The samples of a run over a dataset of ``num_samples``.

    Raises:
        ValueError: an index is missing or is of another dataset.
    """

    def __init__(
        self, metrics: Mapping[str, CurriculumMetric], num_samples: int, global_batch_size: int, seed: int
    ) -> None:
        self._global_batch_size, self._seed = global_batch_size, seed
        self._metrics = dict(metrics)
        self.schedules = {name: CurriculumScheduler(metric) for name, metric in metrics.items()}
        self._indexes = {name: _open_index(name, metric, num_samples) for name, metric in metrics.items()}
        self._pool: tuple[dict[str, int], np.ndarray] | None = None
        self._order: tuple[tuple[int, int], np.ndarray] | None = None

    def get_difficulties(self, step: int) -> dict[str, int]:
        """What each metric allows at a step, counted from 1."""
        return {name: schedule.get_difficulty(step) for name, schedule in self.schedules.items()}

    def take(self, start: int, stop: int) -> np.ndarray:
        """Sample ids at the positions ``[start, stop)`` of the run, int64."""
        pieces = []
        while start < stop:
            step = start // self._global_batch_size
            end = min(stop, (step + 1) * self._global_batch_size)
            pieces += self._deal(self._get_pool(step + 1), start, end)
            start = end
        return np.concatenate(pieces)

    def _deal(self, pool: np.ndarray, start: int, stop: int) -> list[np.ndarray]:
        pieces = []
        while start < stop:
            number, place = divmod(start, len(pool))
            if self._order is None or self._order[0] != (len(pool), number):
                self._order = (len(pool), number), permutation(len(pool), self._seed, number)
            pieces.append(pool[self._order[1][place : place + stop - start]])
            start += len(pieces[-1])
        return pieces

    def _get_pool(self, step: int) -> np.ndarray:
        difficulties = self.get_difficulties(step)
        if self._pool is None or self._pool[0] != difficulties:
            chosen = [self._easy_enough(name, difficulty) for name, difficulty in difficulties.items()]
            pool = chosen[0]
            for other in chosen[1:]:
                pool = pool[np.isin(pool, other)]
            if not len(pool):
                raise ValueError(
                    f"no sample is as easy as {difficulties} asks at step {step}: raise the curriculum's min_difficulty"
                )
            self._pool = difficulties, pool
        return self._pool[1]

    def _easy_enough(self, name: str, difficulty: int) -> np.ndarray:
        metric, index = self._metrics[name], self._indexes[name]
        if metric.difficulty_type == "value":
            return index.up_to_value(difficulty)
        assert metric.max_difficulty
        return index.up_to_fraction(difficulty, metric.max_difficulty)


def _open_index(name: str, metric: CurriculumMetric, num_samples: int) -> DifficultyIndex:
    assert metric.index_to_sample_path is not None
    by_value = metric.difficulty_type == "value"
    index = DifficultyIndex.open(metric.index_to_sample_path, metric.index_to_metric_path if by_value else None)
    if len(index.sample_ids) != num_samples:
        raise ValueError(
            f"the index of {name} is of {len(index.sample_ids)} samples, and training_data has {num_samples}: "
            "analyse this dataset"
        )
    return index


class _RunSlice:
    """The ids of one pass, computed where they are read: a pass may be a thousand epochs of the dataset."""

    def __init__(self, take: Callable[[int, int], np.ndarray], offset: int) -> None:
        self._take, self._offset = take, offset

    def __getitem__(self, part: slice) -> np.ndarray:
        return self._take(self._offset + part.start, self._offset + part.stop)


@dataclass(frozen=True, kw_only=True)
class CurriculumSampler(EpochSampler):
    """Deals out a curriculum; an epoch of it is ``num_samples`` positions of the run."""

    curriculum: Curriculum

    def ids(self, epoch: int) -> np.ndarray:
        """All ids of ``epoch``, to be cut into slices."""
        ids: object = _RunSlice(self.curriculum.take, epoch * self.num_samples)
        return ids  # type: ignore[return-value]
