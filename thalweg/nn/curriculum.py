"""The pace of a curriculum, and sequences that are cut short at first (Li, Zhang and He 2021, arXiv 2108.06084).

A schedule says which difficulty training may meet at a step.  Where the difficulty is the length of a sequence,
nothing has to be known of the data: every batch is cut to that length on its way into the model.  All ranks are at
the same step, so they cut alike, and a run that is resumed goes on where it was: there is no state.
"""

import functools
import inspect
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from thalweg.config import Config
from thalweg.config.schema.data import CurriculumSchedule
from thalweg.parallel.tensor.layers import replace_forward
from thalweg.utils.trees import iter_tensors, map_tensors


def rising_value(step: int, low: int, high: int, num_steps: int, multiple: int, root_degree: float = 1) -> int:
    """From ``low`` to ``high`` in ``num_steps``, as a root of the step, rounded down to multiples of ``multiple``."""
    value = math.floor((step / num_steps) ** (1 / root_degree) * (high - low) + low)
    return max(low, min(value - value % multiple, high))


class CurriculumScheduler:
    """Which difficulty is allowed at a step; a function of the step alone."""

    def __init__(self, schedule: CurriculumSchedule) -> None:
        self.schedule = schedule
        self._custom_get_difficulty: Callable[[int], int] | None = None

    def set_custom_get_difficulty(self, get_difficulty: Callable[[int], int]) -> None:
        """Take the difficulty of a ``custom`` schedule from a function of the step; give every rank the same."""
        self._custom_get_difficulty = get_difficulty

    def get_difficulty(self, global_steps: int) -> int:
        """The difficulty of step ``global_steps``, counted from 1.

        Raises:
            ValueError: the schedule is ``custom`` and no function was given.
        """
        schedule, pace = self.schedule, self.schedule.schedule_config
        if schedule.schedule_type == "custom":
            if self._custom_get_difficulty is None:
                raise ValueError(
                    'schedule_type is "custom": call engine.set_custom_curriculum_learning_schedule({METRIC: function '
                    "of the step}) before the first batch"
                )
            return self._custom_get_difficulty(global_steps)
        if schedule.schedule_type == "fixed_discrete":
            return pace.difficulty[bisect_left(pace.max_step, global_steps)]
        assert schedule.min_difficulty is not None and schedule.max_difficulty is not None
        assert pace.total_curriculum_step is not None and pace.difficulty_step is not None
        root_degree = 1.0 if schedule.schedule_type == "fixed_linear" else pace.root_degree or 1.0
        bounds = schedule.min_difficulty, schedule.max_difficulty
        return rising_value(global_steps, *bounds, pace.total_curriculum_step, pace.difficulty_step, root_degree)


def token_dims(shape: Sequence[int], num_sequences: int, length: int) -> list[int]:
    """Which dims of a tensor count the tokens of ``num_sequences`` sequences of ``length``: of (B, T, ...) the second,
    of a mask (B, H, T, T) the last two, of positions (T,) the first."""
    if len(shape) == 4:
        return [dim for dim in (2, 3) if shape[dim] == length]
    if len(shape) == 1:
        return [0] if shape[0] == length != num_sequences else []
    return [1] if len(shape) > 1 and shape[1] == length else []


def truncate_sequences(batch: Any, length: int) -> Any:
    """The tree ``batch`` with the first ``length`` tokens of its sequences.

    Raises:
        ValueError: it holds no token ids.
    """
    ids = next((t for t in iter_tensors(batch) if t.ndim > 1 and not t.is_floating_point()), None)
    if ids is None:
        raise ValueError("a curriculum of seqlen cuts token ids (batch, tokens), and the batch has none: switch it off")
    num_sequences, whole = ids.shape[:2]

    def cut(tensor: Tensor) -> Tensor:
        for dim in token_dims(tensor.shape, num_sequences, whole):
            tensor = tensor.narrow(dim, 0, length)
        return tensor.contiguous()  # BERT's loss takes a view of its labels as one row

    return map_tensors(batch, cut) if length < whole else batch


def apply_curriculum_seqlen(
    model: nn.Module, config: Config, global_step: Callable[[], int]
) -> dict[str, CurriculumScheduler]:
    """Let ``model`` train on sequences that are as long as the config's curriculum allows; its schedules by metric.

    A model whose ``forward`` takes ``curriculum_seqlen`` is told it, as by DeepSpeed, and cuts by itself.
    ``global_step`` tells how many updates there have been.
    """
    metrics = config.data_efficiency.curriculum_metrics.items()
    schedules = {name: CurriculumScheduler(one) for name, one in metrics if one.clustering_type == "single_cluster"}
    older = config.curriculum_learning
    if older.enabled:
        schedules[older.curriculum_type] = CurriculumScheduler(older)
    if not schedules:
        return {}
    inner = type(model).forward
    tells = "curriculum_seqlen" in inspect.signature(inner).parameters

    @functools.wraps(inner)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            seqlen = min(schedule.get_difficulty(global_step() + 1) for schedule in schedules.values())
            if tells:
                kwargs = {"curriculum_seqlen": seqlen, **kwargs}
            else:
                args, kwargs = truncate_sequences((args, kwargs), seqlen)
        return inner(self, *args, **kwargs)

    replace_forward(model, forward)
    return schedules
