"""Micro-batches by tokens: as many samples as fit in ``max_tokens``, and a learning rate that follows their number.

    order of an epoch    17 (40 tokens)   4 (90)   42 (30) | 8 (200) | 30 (60)  1 (110)  25 (20) | ...   max_tokens 200
    a step               the next world_size micro-batches, one for each rank

The order is cut greedily, so the micro-batches do not depend on the number of ranks, and the position, in samples of
the whole job, says where a job goes on at any world size.  Every rank gets the same number of micro-batches: where an
epoch has fewer left than ranks, the largest are halved until each has one; are there fewer samples than ranks, these
are left out.  So are samples that are longer than ``max_tokens``, and micro-batches of fewer than ``min_batch_size``.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from thalweg.data.packing import IGNORE_INDEX
from thalweg.data.sampler import BatchSlice, EpochSampler, permutation
from thalweg.optim.accumulation import StepListener, StepResult
from thalweg.optim.lr_scheduler import set_group_lr


@dataclass(frozen=True, kw_only=True)
class DynamicBatchSampler(EpochSampler):
    """Deals out micro-batches of at most ``max_tokens``; ``lengths`` (N,) are the tokens of each sample."""

    lengths: np.ndarray
    max_tokens: int
    min_batch_size: int = 1
    max_batch_size: int | None = None
    picking_order: str = "dataloader"
    _plans: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        """Micro-batches of each rank in the first epoch; ``random`` order makes others of a few more or less."""
        return sum(1 for _ in self.iter_slices(0))

    def plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids of an epoch in order, and the bounds of its micro-batches in them, the first of which is 0."""
        if epoch not in self._plans:
            self._plans.clear()
            self._plans[epoch] = self._make_plan(epoch)
        return self._plans[epoch]

    def _make_plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        if self.picking_order == "random":
            ids = permutation(self.num_samples, self.seed, epoch)
        elif self.picking_order == "seqlen":
            ids = np.argsort(self.lengths, kind="stable")
        else:
            ids = np.arange(self.num_samples)
        ids = ids[self.lengths[ids] <= self.max_tokens]
        ends = np.cumsum(self.lengths[ids])
        kept, sizes, start = [ids[:0]], [0], 0
        while start < len(ids):
            before = ends[start - 1] if start else 0
            stop = int(np.searchsorted(ends, before + self.max_tokens, side="right"))
            stop = min(stop, start + (self.max_batch_size or self.num_samples))
            if stop - start >= self.min_batch_size:
                kept.append(ids[start:stop])
                sizes.append(stop - start)
            start = stop
        return np.concatenate(kept), np.cumsum(sizes)

    def iter_slices(self, epoch: int, position: int = 0) -> Iterator[BatchSlice]:
        """Yield this rank's micro-batches of ``epoch`` from ``position`` on."""
        ids, bounds = self.plan(epoch)
        first, last = int(np.searchsorted(bounds, position)), len(bounds) - 1
        while first < last:
            stop = min(first + self.world_size, last)
            parts = [ids[bounds[k] : bounds[k + 1]] for k in range(first, stop)]
            if len(parts) < self.world_size:
                parts = [] if self.drop_last else _halve_until(parts, self.world_size)
            if not parts:
                return
            rest = int(bounds[last] - bounds[stop])
            is_last = last - stop < self.world_size and (self.drop_last or rest < self.world_size)
            start, first = int(bounds[first]), stop
            yield BatchSlice(start, int(bounds[stop]), parts[self.rank].tolist(), is_last=is_last)


def _halve_until(parts: list[np.ndarray], num_parts: int) -> list[np.ndarray]:
    """The same ids in ``num_parts`` parts, none with more tokens than it had; nothing where there are too few."""
    while len(parts) < num_parts:
        largest = max(range(len(parts)), key=lambda k: len(parts[k]))
        middle = len(parts[largest]) // 2
        if middle == 0:
            return []
        parts[largest : largest + 1] = [parts[largest][:middle], parts[largest][middle:]]
    return parts


def measure_length(sample: Any) -> int:
    """Tokens of a sample: of its ``input_ids``, of its first item, or of the sample itself.

    Raises:
        ValueError: it has no length.
    """
    if isinstance(sample, Mapping):
        sample = sample["input_ids"] if "input_ids" in sample else next(iter(sample.values()), None)
    elif isinstance(sample, tuple):
        sample = sample[0]
    if not hasattr(sample, "__len__"):
        raise ValueError(
            "dynamic_batching finds no tokens in the samples: analyse the dataset by a metric named seqlen, and give "
            "its folder as metrics_path"
        )
    return len(sample)


def pad_collate(samples: list[Any]) -> Any:
    """Collate samples of different lengths: each field padded at its end, labels with -100, others with 0.

    Labels are what has ``labels`` in its name, and of a pair the second, where it is whole numbers.
    """

    def stack(values: list[Any], padding: int) -> Any:
        if not isinstance(values[0], Tensor | np.ndarray | list) or not np.ndim(values[0]):
            return default_collate(values)
        return pad_sequence([torch.as_tensor(value) for value in values], batch_first=True, padding_value=padding)

    first = samples[0]
    if isinstance(first, Mapping):
        return {name: stack([one[name] for one in samples], IGNORE_INDEX if "labels" in name else 0) for name in first}
    if isinstance(first, tuple):
        batch = [stack(list(values), 0) for values in zip(*samples, strict=True)]
        if len(first) == 2 and getattr(batch[1], "dtype", None) in (torch.int32, torch.int64):
            batch[1] = stack([labels for _, labels in samples], IGNORE_INDEX)
        return tuple(batch)
    return stack(samples, 0)


class BatchSizeLR(StepListener):
    """Sets the rate of a window to ``lr (samples / base_batch_size)``, or its square root, until its step is over.

    The rate of the optimizer, or of its schedule, is that of ``base_batch_size`` samples.  The batch is the loader's
    last, so a loop that reads ahead of its steps has the rate of what it has read.
    """

    def __init__(self, loader: Any, optimizer: Any, base_batch_size: int, method: str) -> None:
        self._loader, self._optimizer, self._base_batch_size = loader, optimizer, base_batch_size
        self._scale: Callable[[float], float] = math.sqrt if method == "sqrt" else float
        self._num_seen, self._num_samples = loader.num_handed_over, 0
        self._base_lrs: list[float] | None = None

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Count the loader's batch that the model is given; the window's last makes the rate complete."""
        num_seen, self._num_seen = self._num_seen, self._loader.num_handed_over
        if not module.training or not torch.is_grad_enabled() or num_seen == self._num_seen:
            return
        groups = self._optimizer.param_groups
        if self._base_lrs is None:
            self._base_lrs = [float(group["lr"]) for group in groups]
        self._num_samples += self._loader.last_num_samples
        self._set_rates(self._scale(self._num_samples / self._base_batch_size))

    def after_step(self, result: StepResult) -> None:
        """The window is over: the next one begins with the plain rate."""
        if self._base_lrs is not None:
            self._set_rates(1.0)
        self._base_lrs, self._num_samples = None, 0

    def _set_rates(self, factor: float) -> None:
        for group, lr in zip(self._optimizer.param_groups, self._base_lrs or (), strict=True):
            set_group_lr(group, lr * factor)
