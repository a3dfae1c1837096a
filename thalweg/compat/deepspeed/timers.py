"""``deepspeed.utils.timer``: the samples per second of a loop."""

from time import time
from typing import Any

from thalweg.accelerator import get_accelerator


class ThroughputTimer:
    """Samples per second from :meth:`start` to :meth:`stop`, once ``start_step`` updates of ``batch_size`` are over.

    ``config`` has ``enabled``, and ``synchronized``: whether to wait for the device; None for both.  What DeepSpeed's
    logs is in Thalweg's progress line, so its options for lines are taken and do nothing.
    """

    def __init__(self, config: Any, batch_size: int | None, start_step: int = 2, *_: Any, **__: Any) -> None:
        self.config, self.batch_size, self.start_step = config, batch_size or 1, start_step
        self.initialized = self.started = False
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.start_time = self.end_time = self.total_elapsed_time = self.step_elapsed_time = 0.0

    def update_epoch_count(self) -> None:
        """An epoch ends."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """A micro-batch begins."""
        if self.config is None or self.config.enabled:
            self.initialized = self.started = True
            if self.global_step_count >= self.start_step:
                self.start_time = self._now()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """It ends, and with ``global_step`` an update does."""
        if not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += global_step
        if self.start_time:
            self.end_time = self._now()
            duration = self.end_time - self.start_time
            self.total_elapsed_time += duration
            self.step_elapsed_time = 0.0 if global_step else self.step_elapsed_time + duration

    def avg_samples_per_sec(self) -> float:
        """Of all updates after the first ``start_step``; -inf before there are any."""
        num_timed = self.global_step_count - self.start_step
        return self.batch_size * num_timed / self.total_elapsed_time if self.total_elapsed_time else float("-inf")

    def _now(self) -> float:
        if self.config is None or self.config.synchronized:
            get_accelerator().synchronize()
        return time()
