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

from thalweg.comm import Ledger
from thalweg.parallel.pipeline.actions import Action, Schedule
from thalweg.parallel.pipeline.runtime import Runner, StageCalls
from thalweg.parallel.pipeline.wire import Wire
from thalweg.utils.dtypes import HALF_DTYPES


class Staged(Protocol):
    """This rank's stages; ``needs_batch``: whether it reads the data."""

    module: Any

    @property
    def needs_batch(self) -> bool:
        """Whether this rank reads the data."""
        ...

    def run(self, stage: int, value: Any, batch: Any) -> Any:
        """A stage's forward; the last one returns the loss."""
        ...

    def weights(self, stage: int) -> list[nn.Parameter]:
        """The parameters that the stage uses."""
        ...

    def problem(self, batch: Any) -> str | None:
        """What is wrong with a micro-batch, if anything is."""
        ...


class Reduction(Protocol):
    """What of ZeRO is asked of (:class:`thalweg.zero.shard.Sharded`)."""

    groups: Any

    def prepare_backward(self, last: bool, sync: bool = True) -> None:
        """Set what the coming backward does."""
        ...

    def hold(self) -> None:
        """Keep everything whole until the window ends."""
        ...


class Averaging(Protocol):
    """What of :class:`thalweg.optim.averaging.Averaging` a pipeline needs."""

    def part(self, loss: Tensor, count: int) -> Tensor:
        """The loss at hand as it is to be differentiated, one of ``count``."""
        ...

    def noted(self, loss: Tensor) -> Tensor:
        """The loss at hand and its weight, (2,)."""
        ...

    def mean(self, noted: Tensor) -> Tensor:
        """Of a sum of those, the window's loss (0-dim)."""
        ...


@dataclass(frozen=True)
class Around:
    """What an engine wants around each forward, and by what each loss is multiplied.

    ``keep``, ``resume``: what a model knows of the micro-batch at hand beside its graph.
    """

    averaging: Averaging
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    scale: Callable[[], float] = lambda: 1.0
    keep: Callable[[], Any] = lambda: None
    resume: Callable[[Any], None] = lambda kept: None


class Driver:
    """Runs windows on this rank; ``schedule_of(count)`` makes the schedule of so many micro-batches."""

    refusal = (
        "this engine runs stages of a pipeline, which take turns over a whole window of micro-batches: call "
        "engine.train_batch(data_iter) or engine.eval_batch(data_iter)"
    )

    def __init__(
        self,
        stages: Staged,
        schedule_of: Callable[[int], Schedule],
        place: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
        reduction: Reduction,
        around: Around,
        ledger: Ledger,
        back: dist.ProcessGroup | None = None,
    ) -> None:
        self._stages, self._schedule_of, self._place = stages, schedule_of, place
        self._group, self._device = group, device
        self._reduction, self._around = reduction, around
        self._schedules: dict[int, Schedule] = {}
        self._ledger = ledger
        self._noted: list[Tensor] = []
        self._copied: set[int] = set()
        self._last_stage = 0
        self._wire = Wire(group, device, ledger, back)

    @property
    def needs_batch(self) -> bool:
        """Whether this rank reads the data at all."""
        return self._stages.needs_batch

    def agree(self, batches: Sequence[Any] | None) -> list[Any]:
        """The micro-batches that every rank of the pipeline has; None from one that reads none; collective.

        Raises:
            StopIteration: some rank has none.
            ValueError: on every rank, if some rank's batches are not what the stages take.
        """
        problem = next(filter(None, map(self._stages.problem, batches or ())), None)
        count = torch.tensor([-1 if problem else 2**31 if batches is None else len(batches)])
        if self._group is not None:
            self._all_reduce(count, dist.ReduceOp.MIN)
        agreed = int(count)
        if agreed < 0:
            raise ValueError(problem or "another stage of this pipeline was given data that it cannot take")
        if not agreed:
            raise StopIteration("the data iterator is empty")
        return [None] * agreed if batches is None else list(batches[:agreed])

    def train(self, batches: Sequence[Any]) -> Tensor:
        """Forward and backward of all; returns their mean loss (0-dim) on every rank of the pipeline."""
        count = len(batches)
        schedule = self._schedule(count)
        scale = self._around.scale()
        if schedule.halved:
            self._reduction.hold()
        else:
            self._reduction.prepare_backward(last=False)
        calls = StageCalls(
            self._run,
            self._stages.weights,
            lambda loss: self._part(loss, count) * scale,
            before=lambda action, last: self._before(schedule, last),
            after=self._after,
            keep=self._around.keep,
            resume=self._around.resume,
        )
        Runner(schedule, self._place, self._wire, calls, self._copied).train(batches)
        return self._mean()

    def evaluate(self, batches: Sequence[Any]) -> Tensor:
        """The mean loss (0-dim) on every rank of the pipeline, without gradients."""
        calls = StageCalls(self._run, self._stages.weights, lambda loss: loss)
        Runner(self._schedule(len(batches)), self._place, self._wire, calls).evaluate(batches)
        return self._mean()

    def _schedule(self, count: int) -> Schedule:
        if count not in self._schedules:
            self._schedules[count] = self._schedule_of(count)
        schedule = self._schedules[count]
        self._last_stage = schedule.num_stages - 1
        self._noted.clear()  # of a window that an exception ended
        return schedule

    def _run(self, stage: int, value: Any, batch: Any) -> Any:
        with self._around.context():
            result = self._stages.run(stage, value, batch)
        if stage == self._last_stage:
            self._noted.append(self._around.averaging.noted(result))
        return result

    def _part(self, loss: Tensor, count: int) -> Tensor:
        return self._around.averaging.part(loss.float() if loss.dtype in HALF_DTYPES else loss, count)

    def _before(self, schedule: Schedule, last: bool) -> None:
        if not schedule.halved:
            self._reduction.prepare_backward(last=last)

    def _after(self, action: Action) -> None:
        if action.kind == "W":
            for group in self._reduction.groups:
                group.widen_grads()

    def _mean(self) -> Tensor:
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        for noted in self._noted:
            total += noted
        self._noted.clear()
        if self._group is not None:
            self._all_reduce(total)  # all but the last stage add nothing
        return self._around.averaging.mean(total)

    def _all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        size = dist.get_world_size(self._group)
        with self._ledger.timed(
            "all_reduce", "window", "pipeline", full_bytes=tensor.nbytes, world_size=size
        ):
            dist.all_reduce(tensor, op=op, group=self._group)
