"""A pipeline schedule is data: for each rank, the order of its actions.

    F  forward of one micro-batch through one stage
    B  its whole backward
    I  the half of the backward that makes the gradient of the stage's input
    W  the other half, the gradients of its weights; any time after I

Stages are numbered along the model; ``placement`` says on which rank each lies.  Nothing
here communicates: what must be sent follows from the order and the placement (the output of
F goes to the next stage, the input's gradient of B or I to the previous one), and
:func:`check` proves that every rank can run its list without waiting forever.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

ActionKind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One action of one rank: ``kind`` of micro-batch ``micro`` through ``stage``."""

    kind: ActionKind
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"


@dataclass(frozen=True)
class PipelineSchedule:
    """The orders of all ranks.

    Attributes: ``stage_to_rank[s]`` the rank of stage ``s``; ``orders[r]`` what rank ``r`` does.
    """

    name: str
    num_micro_batches: int
    stage_to_rank: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]

    @property
    def num_stages(self) -> int:
        """Stages of the model."""
        return len(self.stage_to_rank)

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.orders)

    @cached_property
    def split_backward(self) -> frozenset[tuple[int, int]]:
        """The (stage, micro-batch) whose backward runs in halves, I and W."""
        return frozenset((a.stage, a.micro) for order in self.orders for a in order if a.kind == "I")

    def stages_on_rank(self, rank: int) -> tuple[int, ...]:
        """The stages that lie on ``rank``, in the model's order."""
        return tuple(stage for stage, where in enumerate(self.stage_to_rank) if where == rank)


def dependencies(action: Action, num_stages: int, is_split: Callable[[tuple[int, int]], bool]) -> Iterator[Action]:
    """What must be done before ``action`` may begin; ``is_split((stage, micro))``: whether its backward is halved."""
    kind, stage, micro = action
    if kind == "F":
        if stage > 0:
            yield Action("F", stage - 1, micro)
    elif kind == "W":
        yield Action("I", stage, micro)
    else:
        yield Action("F", stage, micro)
        if stage + 1 < num_stages:
            yield Action("I" if is_split((stage + 1, micro)) else "B", stage + 1, micro)


def replay(schedule: PipelineSchedule) -> Iterator[tuple[int, Action, list[Action]]]:
    """(rank, action, what it waits for) as ranks can do them, in some order; ends where all wait for each other."""
    done: set[Action] = set()
    positions = [0] * schedule.num_ranks
    progressed = True
    while progressed:
        progressed = False
        for rank, order in enumerate(schedule.orders):
            while positions[rank] < len(order):
                action = order[positions[rank]]
                needed = list(dependencies(action, schedule.num_stages, schedule.split_backward.__contains__))
                if not done.issuperset(needed):
                    break
                yield rank, action, needed
                done.add(action)
                positions[rank] += 1
                progressed = True


def validate_schedule(schedule: PipelineSchedule) -> None:
    """Prove that ``schedule`` is complete and that no rank waits forever.

    Raises:
        ValueError: an action is missing, done twice or on the wrong rank, or the ranks
            wait for each other; the message names the first such action.
    """
    split_backward = schedule.split_backward
    remaining = {
        Action(kind, stage, micro): schedule.stage_to_rank[stage]  # type: ignore[arg-type]
        for stage in range(schedule.num_stages)
        for micro in range(schedule.num_micro_batches)
        for kind in ("FIW" if (stage, micro) in split_backward else "FB")
    }
    for rank, order in enumerate(schedule.orders):
        for action in order:
            expected_rank = remaining.pop(action, None)
            if expected_rank is None:
                raise ValueError(f"{schedule.name}: rank {rank} does {action} twice, or it does not belong here")
            if expected_rank != rank:
                raise ValueError(
                    f"{schedule.name}: rank {rank} does {action}, whose stage lies on rank {expected_rank}"
                )
    if remaining:
        action, expected_rank = next(iter(remaining.items()))
        raise ValueError(f"{schedule.name}: rank {expected_rank} never does {action}")
    done = {action for _, action, _ in replay(schedule)}
    waiting = ((rank, next((a for a in order if a not in done), None)) for rank, order in enumerate(schedule.orders))
    if stuck := ", ".join(f"rank {rank} at {action}" for rank, action in waiting if action is not None):
        raise ValueError(f"{schedule.name}: the ranks wait for each other: {stuck}")
