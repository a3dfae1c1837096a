"""Which rank takes which sample: one order an epoch, cut into steps, cut into shares.

    order of epoch 3      17  4 42  8 | 30  1 25 16 | 9 ...     the same on every rank
    position               0            4             8         counted in samples of the whole job
    step at position 4    rank 0: 30 1    rank 1: 25 16

A step takes the next ``world_size * batch_size`` ids, and rank *r* the r-th contiguous
share of them.  Everything follows from ``(seed, epoch, position)``, so a job that stops
at a position goes on from it with any world size and any micro-batch, and the ids of
each global batch stay the same however it is divided.

Invariants: within an epoch the shares of all ranks hold every id exactly once; every
rank gets the same number of batches, none empty (a rank without a batch would leave the
others waiting in a collective); no batch is larger than ``batch_size``.

The end of an epoch, when the ids left do not fill a step:

- ``drop_last=True`` leaves them out: fewer than ``world_size * batch_size``, and others
  each epoch when shuffled;
- ``drop_last=False`` deals them out in smaller shares that differ by one at most.  When
  fewer are left than ranks, the step before gives some up so that each rank has one.
  With ``batch_size`` 1, or when a job comes back with more ranks than samples are left,
  nothing can be given up: then, and only then, ids from the start of the epoch's order
  are repeated, fewer than ``world_size``, and counted in ``BatchSlice.num_duplicates``.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class BatchSlice:
    """One rank's part of a step: the epoch's samples ``[start, stop)`` go to all ranks, ``ids`` to this.

    ``is_last``: the epoch has no step after this one.
    """

    start: int
    stop: int
    ids: list[int]
    num_duplicates: int = 0
    is_last: bool = False


@dataclass(frozen=True)
class EpochSampler:
    """Deals out the sample ids of each epoch; a pure function of its fields.

    ``order`` overrides the seeded permutation: it maps the epoch to the ids in order, and
    must return the same on every rank.
    """

    num_samples: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    order: Callable[[int], Sequence[int] | np.ndarray] | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"batch_size {self.batch_size} and world_size {self.world_size} must be at least 1 "
                f"and rank {self.rank} below world_size"
            )
        step = self.world_size * self.batch_size
        if self.drop_last and self.num_samples < step:
            raise ValueError(
                f"the data cannot fill one step: {self.num_samples} samples, but world size "
                f"{self.world_size} x micro-batch {self.batch_size} = {step} samples a step and drop_last is "
                "true: use fewer ranks, a smaller train_micro_batch_size_per_gpu, more data, or drop_last off"
            )
        if self.num_samples < self.world_size:
            raise ValueError(
                f"the data cannot fill the world: {self.num_samples} samples for world size "
                f"{self.world_size}: use at most {self.num_samples} ranks, or give more data"
            )

    def __len__(self) -> int:
        """Number of batches that each rank gets in a whole epoch."""
        full, rest = divmod(self.num_samples, self.world_size * self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def ids(self, epoch: int) -> np.ndarray:
        """Return all ids of ``epoch`` in order, int64."""
        if self.order is not None:
            ids = np.asarray(self.order(epoch), dtype=np.int64)
            assert len(ids) == self.num_samples, (len(ids), self.num_samples)
            return ids
        if not self.shuffle:
            return np.arange(self.num_samples)
        return permutation(self.num_samples, self.seed, epoch)

    def iter_slices(self, epoch: int, position: int = 0) -> Iterator[BatchSlice]:
        """Yield this rank's shares of ``epoch`` from ``position`` on."""
        ids: np.ndarray | None = None
        while step_size := self.next_step_size(self.num_samples - position):
            ids = self.ids(epoch) if ids is None else ids
            low, high = rank_slice_bounds(step_size, self.rank, self.world_size)
            rank_ids = ids[position + low : position + high]
            num_duplicates = int(self.rank >= step_size)
            if num_duplicates:
                rank_ids = ids[self.rank - step_size : self.rank - step_size + 1]
            start, position = position, position + step_size
            is_last = self.next_step_size(self.num_samples - position) == 0
            yield BatchSlice(start, position, rank_ids.tolist(), num_duplicates, is_last)

    def next_step_size(self, remaining: int) -> int:
        """Return how many of the ``remaining`` samples the next step of all ranks takes; 0 ends the epoch."""
        step = self.world_size * self.batch_size
        if remaining < step:
            return 0 if self.drop_last else remaining
        rest = remaining - step
        if 0 < rest < self.world_size and self.batch_size > 1 and not self.drop_last:
            return remaining - self.world_size
        return step


def rank_slice_bounds(total: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return ``[low, high)``, the rank's contiguous share of ``total``; shares differ by one at most."""
    size, extra = divmod(total, world_size)
    low = rank * size + min(rank, extra)
    return low, low + size + (rank < extra)


def permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """Return a permutation of ``range(size)``, int64, that no version of any library can change.

    The ids are sorted by a 64-bit hash of (seed, epoch, id): the finaliser of SplitMix64
    (Steele, Lea and Flood 2014).  Neither torch nor numpy promises its own permutations to
    stay as they are, and a resumed job may run on another version.
    """
    mask = (1 << 64) - 1
    with np.errstate(over="ignore"):
        key = _mix(np.uint64((seed * 0x9E3779B97F4A7C15 + 1) & mask))
        key = _mix(key ^ np.uint64((epoch * 0xD1B54A32D192ED03 + 1) & mask))
        hashed = _mix(np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key)
    return np.argsort(hashed, kind="stable").astype(np.int64)


def _mix(value: Any) -> Any:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
