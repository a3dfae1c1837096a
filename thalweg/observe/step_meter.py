"""The meter: what happened between two updates, gathered into one :class:`StepRecord`.

Counting is local and cheap; only a record that somebody reads costs a collective, one
all-reduce of five numbers, and which steps are read is the same on every rank.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.observe.recorder import Recorder
from thalweg.observe.step_record import StepRecord
from thalweg.utils.trees import iter_tensors

SEQUENCE_META_KEY = "sequence_part"
"""The key of a batch of which this rank has been given its part; its value knows the whole ``length``."""


class StepMeter:
    """Counts losses, samples and tokens of a window and hands them to ``recorder``.

    ``flops_per_token``: of one training token, given the sequence length.  ``num_batch_copies``: ranks of the
    group that are given the same rows.  ``every``: the steps whose records somebody reads.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        group: dist.ProcessGroup | None = None,
        flops_per_token: Callable[[int], float] | None = None,
        memory_mib: Callable[[], float] | None = None,
        num_batch_copies: int = 1,
        every: int = 1,
    ) -> None:
        self.recorder, self._group, self._num_batch_copies, self._every = recorder, group, num_batch_copies, every
        self._flops_per_token, self._memory_mib = flops_per_token, memory_mib
        self._window_start = time.perf_counter()
        self._reset()

    def _reset(self) -> None:
        self._loss_sum: Tensor | float = 0.0
        self._num_losses = 0
        self._num_samples = 0
        self._num_tokens = 0

    def add_batch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Count the first tensor among the inputs: its rows, and its elements if they are token ids."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.ndim > 0:
                self._num_samples += value.shape[0]
                if not value.is_floating_point() and value.ndim == 2:
                    length = getattr(kwargs.get(SEQUENCE_META_KEY), "length", value.shape[1])
                    self._num_tokens += value.shape[0] * length
                return

    def add_loss(self, loss: Tensor) -> None:
        """Add one micro-batch's loss, undivided."""
        self._loss_sum = self._loss_sum + loss.detach().float()
        self._num_losses += 1

    def add_window(self, batches: Sequence[Any], loss: Tensor) -> None:
        """Count the micro-batches of a window, and their mean loss."""
        for batch in batches:
            named = isinstance(batch, Mapping)
            self.add_batch(() if named else tuple(iter_tensors(batch)), batch if named else {})
        self.add_loss(loss)

    def is_due(self, step: int) -> bool:
        """Whether somebody reads the record of ``step``; if not, its counts go, as reading them waits for a device."""
        if step % self._every:
            self._window_start = time.perf_counter()
            self._reset()
        return step % self._every == 0

    def step(self, step: int, **known: Any) -> StepRecord:
        """Close the window: the record of the whole job, on every rank; ``known``: its fields that are not counted
        here."""
        sums = [float(self._loss_sum), self._num_losses, self._num_samples, self._num_tokens]
        totals = torch.tensor(sums, dtype=torch.float64)
        if self._group is not None and dist.get_world_size(self._group) > 1:
            dist.all_reduce(totals, group=self._group)
        totals[2:] /= self._num_batch_copies
        loss, num_losses, samples, tokens = totals.tolist()
        length = round(tokens / samples) if samples else 0
        flops = self._flops_per_token(length) * tokens if self._flops_per_token else 0.0
        now = time.perf_counter()
        seconds, self._window_start = now - self._window_start, now
        record = StepRecord(
            step=step,
            loss=loss / num_losses if num_losses else None,
            samples=int(samples) or None,
            tokens=int(tokens) or None,
            seconds=seconds,
            tokens_per_s=tokens / seconds if tokens else None,
            model_tflops=flops / seconds / 1e12 if flops else None,
            memory_mib=self._memory_mib() if self._memory_mib else None,
            **known,
        )
        self.recorder.step(record)
        self._reset()
        return record
