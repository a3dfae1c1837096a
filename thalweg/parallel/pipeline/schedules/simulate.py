"""Play a schedule on a clock: what it costs, without a device.

Every rank does its actions in order, each as soon as what it needs has arrived.  The
*bubble* is the share of the ranks' time in which they wait, between the first action of the
step and its last: ``1 - busy / (ranks x makespan)``, the (p - 1)/(m + p - 1) of GPipe and
1F1B (Huang et al. 2019; Narayanan et al. 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from thalweg.parallel.pipeline.schedules.schedule import Action, ActionKind, PipelineSchedule, replay


@dataclass(frozen=True)
class ActionCosts:
    """Seconds (or any unit) of the actions of each stage; messages between ranks take no time.

    ``forward[s]``, ``input_grad[s]``, ``weight_grad[s]``; a whole backward is the sum of the two.
    """

    forward: Sequence[float]
    input_grad: Sequence[float]
    weight_grad: Sequence[float]

    @staticmethod
    def uniform(num_stages: int) -> ActionCosts:
        """Stages of equal cost, a backward twice its forward: 1, 1, 1."""
        ones = [1.0] * num_stages
        return ActionCosts(ones, ones, ones)

    def action_cost(self, kind: ActionKind, stage: int) -> float:
        """The cost of one action."""
        if kind == "F":
            return self.forward[stage]
        return (self.input_grad[stage] if kind != "W" else 0.0) + (self.weight_grad[stage] if kind != "I" else 0.0)


@dataclass(frozen=True)
class Timeline:
    """When each action began and ended, and what follows from that."""

    schedule: PipelineSchedule
    intervals: dict[Action, tuple[float, float]] = field(repr=False)

    @property
    def makespan(self) -> float:
        """From the first action's begin to the last one's end."""
        return max(end for _, end in self.intervals.values())

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they wait (0 to 1)."""
        busy = sum(end - begin for begin, end in self.intervals.values())
        return 1.0 - busy / (self.schedule.num_ranks * self.makespan)

    def peak_in_flight(self, rank: int) -> int:
        """The most micro-batch activations that ``rank`` holds at once, over its stages."""
        in_flight = peak = 0
        for action in self.schedule.orders[rank]:
            in_flight += (action.kind == "F") - (action.kind in ("B", "W"))
            peak = max(peak, in_flight)
        return peak


def simulate(schedule: PipelineSchedule, costs: ActionCosts | None = None) -> Timeline:
    """Play ``schedule``; it must be sound (:func:`.schedule.check`)."""
    costs = costs or ActionCosts.uniform(schedule.num_stages)
    intervals: dict[Action, tuple[float, float]] = {}
    rank_free_at = [0.0] * schedule.num_ranks
    for rank, action, needed in replay(schedule):
        begin = max(rank_free_at[rank], *(intervals[need][1] for need in needed), 0.0)
        rank_free_at[rank] = begin + costs.action_cost(action.kind, action.stage)
        intervals[action] = (begin, rank_free_at[rank])
    assert len(intervals) == sum(map(len, schedule.orders)), "an unsound schedule: validate it first"
    return Timeline(schedule, intervals)
