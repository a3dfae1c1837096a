"""Whole windows through a pipeline, as an engine drives them.

    agree     how many micro-batches there are: the ranks of a pipeline take the fewest any of them has
    play      this rank's part of the schedule, gradients adding up under ZeRO's hooks
    tell      the mean loss goes from the last stage to all

The gradients of a window are reduced by ZeRO as without a pipeline: in each backward pass from
stage 2 on, else in the last.  A schedule whose backward passes run in halves, of which ZeRO's hooks
see only the first, keeps them whole until the window ends, at every stage.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.parallel.pipeline.module import PipelineModuleStages
from thalweg.parallel.pipeline.p2p import P2PChannel
from thalweg.parallel.pipeline.schedule_executor import ScheduleExecutor, StageCallbacks
from thalweg.parallel.pipeline.schedules.schedule import Action, PipelineSchedule
from thalweg.parallel.pipeline.split_model import SplitModelStages
from thalweg.parallel_dims import control_group
from thalweg.utils.dtypes import HALF_DTYPES
from thalweg.zero.shard import ShardedModel

LocalStages = PipelineModuleStages | SplitModelStages


@dataclass(frozen=True)
class ForwardHooks:
    """What an engine wants around each forward, and by what each loss is multiplied.

    ``loss_normalizer``: a :class:`thalweg.optim.accumulation.LossNormalizer`.
    ``save_context``, ``restore_context``: what a model knows of the micro-batch at hand beside its graph.
    """

    loss_normalizer: Any
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    loss_scale: Callable[[], float] = lambda: 1.0
    save_context: Callable[[], Any] = lambda: None
    restore_context: Callable[[Any], None] = lambda kept: None


class PipelineRunner:
    """Runs windows on this rank; ``make_schedule(count)`` makes the schedule of so many micro-batches."""

    unsupported_message = (
        "with pipelines, call engine.train_batch(data_iter) or engine.eval_batch(data_iter): the stages run all "
        "micro-batches of a step together"
    )

    def __init__(
        self,
        stages: LocalStages,
        make_schedule: Callable[[int], PipelineSchedule],
        pp_rank: int,
        channel: P2PChannel,
        reduction: ShardedModel,
        hooks: ForwardHooks,
    ) -> None:
        self._stages, self._make_schedule, self._pp_rank = stages, cache(make_schedule), pp_rank
        self._channel, self._group, self._reduction, self._hooks = channel, channel.group, reduction, hooks
        self._copied_stages: set[int] = set()
        self.needs_batch = stages.needs_batch  # whether this rank reads the data at all

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
        schedule, hooks = self._make_schedule(len(batches)), self._hooks
        loss_scale, losses_and_weights = hooks.loss_scale(), []
        if schedule.split_backward:
            self._reduction.defer_reduction()
        else:
            self._reduction.set_backward_flags(last=False)

        def scale_loss(loss: Tensor) -> Tensor:
            loss = loss.float() if loss.dtype in HALF_DTYPES else loss
            return hooks.loss_normalizer.scale_pipeline_loss(loss, len(batches)) * loss_scale

        def before_backward(action: Action, last: bool) -> None:
            if not schedule.split_backward:
                self._reduction.set_backward_flags(last=last)

        def after_backward(action: Action) -> None:
            for group in self._reduction.groups if action.kind == "W" else ():
                group.upcast_grads()

        def weights(stage: int) -> list[Any]:
            return [self._reduction.get_leaf(parameter) for parameter in self._stages.parameters(stage)]

        run = partial(self._run_stage, losses_and_weights, schedule.num_stages - 1)
        around = (before_backward, after_backward, hooks.save_context, hooks.restore_context)
        callbacks = StageCallbacks(run, weights, scale_loss, *around)
        ScheduleExecutor(schedule, self._pp_rank, self._channel, callbacks, self._copied_stages).train(batches)
        return self._mean_loss(losses_and_weights)

    def evaluate(self, batches: Sequence[Any]) -> Tensor:
        """The mean loss (0-dim) on every rank of the pipeline, without gradients."""
        schedule, losses_and_weights = self._make_schedule(len(batches)), []
        run = partial(self._run_stage, losses_and_weights, schedule.num_stages - 1)
        callbacks = StageCallbacks(run, self._stages.parameters, lambda loss: loss)
        ScheduleExecutor(schedule, self._pp_rank, self._channel, callbacks).evaluate(batches)
        return self._mean_loss(losses_and_weights)

    def _run_stage(self, losses_and_weights: list[Tensor], last_stage: int, stage: int, value: Any, batch: Any) -> Any:
        with self._hooks.forward_context():
            result = self._stages.run(stage, value, batch)
        if stage == last_stage:
            losses_and_weights.append(self._hooks.loss_normalizer.loss_and_weight(result))
        return result

    def _mean_loss(self, losses_and_weights: list[Tensor]) -> Tensor:
        total = sum(losses_and_weights, torch.zeros(2, dtype=torch.float64, device=self._channel.device))
        if self._group is not None:
            self._all_reduce(total)  # all but the last stage add nothing
        return self._hooks.loss_normalizer.mean(total)

    def _all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        size = dist.get_world_size(self._group)
        with self._channel.ledger.timed("all_reduce", "window", "pipeline", tensor.nbytes, size):
            dist.all_reduce(tensor, op=op, group=control_group(self._group, tensor.device))
