"""Whole windows through a pipeline, as an engine drives them.

    agree     how many micro-batches there are: the ranks of a pipeline take the fewest any of them has
    play      this rank's part of the schedule, gradients adding up under ZeRO's hooks
    tell      the mean loss goes from the last stage to all

The gradients of a window are reduced by ZeRO as without a pipeline: in each backward pass from
stage 2 on, else in the last.  A schedule whose backward passes run in halves, of which ZeRO's hooks
see only the first, keeps them whole until the window ends, at every stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thalweg.comm import CommsLog
from thalweg.parallel.pipeline.p2p import P2PChannel
from thalweg.parallel.pipeline.schedule_executor import ScheduleExecutor, StageCallbacks
from thalweg.parallel.pipeline.schedules.schedule import Action, PipelineSchedule
from thalweg.utils.dtypes import HALF_DTYPES


class LocalStages(Protocol):
    """This rank's stages; ``needs_batch``: whether it reads the data."""

    module: Any

    @property
    def needs_batch(self) -> bool:
        """Whether this rank reads the data."""
        ...

    def run(self, stage: int, value: Any, batch: Any) -> Any:
        """A stage's forward; the last one returns the loss."""
        ...

    def parameters(self, stage: int) -> list[nn.Parameter]:
        """The parameters that the stage uses."""
        ...

    def find_batch_error(self, batch: Any) -> str | None:
        """What is wrong with a micro-batch, if anything is."""
        ...


class GradientReduction(Protocol):
    """What of ZeRO is asked of (:class:`thalweg.zero.shard.ShardedModel`)."""

    groups: Any

    def set_backward_flags(self, last: bool, sync: bool = True) -> None:
        """Set what the coming backward does."""
        ...

    def defer_reduction(self) -> None:
        """Keep everything whole until the window ends."""
        ...


class PipelineLossNormalizer(Protocol):
    """What of :class:`thalweg.optim.accumulation.LossNormalizer` a pipeline needs."""

    def scale_pipeline_loss(self, loss: Tensor, num_micro_batches: int) -> Tensor:
        """The loss at hand as it is to be differentiated, one of ``num_micro_batches``."""
        ...

    def loss_and_weight(self, loss: Tensor) -> Tensor:
        """The loss at hand and its weight, (2,)."""
        ...

    def mean(self, total: Tensor) -> Tensor:
        """Of a sum of those, the window's loss (0-dim)."""
        ...


@dataclass(frozen=True)
class ForwardHooks:
    """What an engine wants around each forward, and by what each loss is multiplied.

    ``save_context``, ``restore_context``: what a model knows of the micro-batch at hand beside its graph.
    """

    loss_normalizer: PipelineLossNormalizer
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    loss_scale: Callable[[], float] = lambda: 1.0
    save_context: Callable[[], Any] = lambda: None
    restore_context: Callable[[Any], None] = lambda kept: None


class PipelineRunner:
    """Runs windows on this rank; ``make_schedule(count)`` makes the schedule of so many micro-batches."""

    unsupported_message = (
        "this engine runs stages of a pipeline, which take turns over a whole window of micro-batches: call "
        "engine.train_batch(data_iter) or engine.eval_batch(data_iter)"
    )

    def __init__(
        self,
        stages: LocalStages,
        make_schedule: Callable[[int], PipelineSchedule],
        pp_rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
        reduction: GradientReduction,
        hooks: ForwardHooks,
        ledger: CommsLog,
        reverse_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._stages, self._make_schedule, self._pp_rank = stages, make_schedule, pp_rank
        self._group, self._device = group, device
        self._reduction, self._hooks = reduction, hooks
        self._schedules: dict[int, PipelineSchedule] = {}
        self._ledger = ledger
        self._losses_and_weights: list[Tensor] = []
        self._copied_stages: set[int] = set()
        self._last_stage = 0
        self._channel = P2PChannel(group, device, ledger, reverse_group)

    @property
    def needs_batch(self) -> bool:
        """Whether this rank reads the data at all."""
        return self._stages.needs_batch

    def agree_micro_batches(self, batches: Sequence[Any] | None) -> list[Any]:
        """The micro-batches that every rank of the pipeline has; None from one that reads none; collective.

        Raises:
            StopIteration: some rank has none.
            ValueError: on every rank, if some rank's batches are not what the stages take.
        """
        error = next(filter(None, map(self._stages.find_batch_error, batches or ())), None)
        count = torch.tensor([-1 if error else 2**31 if batches is None else len(batches)])
        if self._group is not None:
            self._all_reduce(count, dist.ReduceOp.MIN)
        agreed = int(count)
        if agreed < 0:
            raise ValueError(error or "another stage of this pipeline was given data that it cannot take")
        if not agreed:
            raise StopIteration("the data iterator is empty")
        return [None] * agreed if batches is None else list(batches[:agreed])

    def train(self, batches: Sequence[Any]) -> Tensor:
        """Forward and backward of all; returns their mean loss (0-dim) on every rank of the pipeline."""
        num_micro_batches = len(batches)
        schedule = self._get_schedule(num_micro_batches)
        scale = self._hooks.loss_scale()
        if schedule.split_backward:
            self._reduction.defer_reduction()
        else:
            self._reduction.set_backward_flags(last=False)
        callbacks = StageCallbacks(
            self._run_stage,
            self._stages.parameters,
            lambda loss: self._scale_loss(loss, num_micro_batches) * scale,
            before_backward=lambda action, last: self._before_backward(schedule, last),
            after_backward=self._after_backward,
            save_context=self._hooks.save_context,
            restore_context=self._hooks.restore_context,
        )
        ScheduleExecutor(schedule, self._pp_rank, self._channel, callbacks, self._copied_stages).train(batches)
        return self._mean_loss()

    def evaluate(self, batches: Sequence[Any]) -> Tensor:
        """The mean loss (0-dim) on every rank of the pipeline, without gradients."""
        callbacks = StageCallbacks(self._run_stage, self._stages.parameters, lambda loss: loss)
        ScheduleExecutor(self._get_schedule(len(batches)), self._pp_rank, self._channel, callbacks).evaluate(batches)
        return self._mean_loss()

    def _get_schedule(self, num_micro_batches: int) -> PipelineSchedule:
        if num_micro_batches not in self._schedules:
            self._schedules[num_micro_batches] = self._make_schedule(num_micro_batches)
        schedule = self._schedules[num_micro_batches]
        self._last_stage = schedule.num_stages - 1
        self._losses_and_weights.clear()  # of a window that an exception ended
        return schedule

    def _run_stage(self, stage: int, value: Any, batch: Any) -> Any:
        with self._hooks.forward_context():
            result = self._stages.run(stage, value, batch)
        if stage == self._last_stage:
            self._losses_and_weights.append(self._hooks.loss_normalizer.loss_and_weight(result))
        return result

    def _scale_loss(self, loss: Tensor, num_micro_batches: int) -> Tensor:
        return self._hooks.loss_normalizer.scale_pipeline_loss(
            loss.float() if loss.dtype in HALF_DTYPES else loss, num_micro_batches
        )

    def _before_backward(self, schedule: PipelineSchedule, last: bool) -> None:
        if not schedule.split_backward:
            self._reduction.set_backward_flags(last=last)

    def _after_backward(self, action: Action) -> None:
        if action.kind == "W":
            for group in self._reduction.groups:
                group.upcast_grads()

    def _mean_loss(self) -> Tensor:
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        for loss_and_weight in self._losses_and_weights:
            total += loss_and_weight
        self._losses_and_weights.clear()
        if self._group is not None:
            self._all_reduce(total)  # all but the last stage add nothing
        return self._hooks.loss_normalizer.mean(total)

    def _all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        size = dist.get_world_size(self._group)
        with self._ledger.timed("all_reduce", "window", "pipeline", full_bytes=tensor.nbytes, world_size=size):
            dist.all_reduce(tensor, op=op, group=self._group)
