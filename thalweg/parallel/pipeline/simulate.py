"""Play a schedule on a clock: what it costs, without a device.

Every rank does its actions in order, each as soon as what it needs has arrived.  The
*bubble* is the share of the ranks' time in which they wait, between the first action of the
step and its last: ``1 - busy / (ranks x makespan)``, the (p - 1)/(m + p - 1) of GPipe and
1F1B (Huang et al. 2019; Narayanan et al. 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from thalweg.parallel.pipeline.actions import Action, Kind, Schedule, needs


@dataclass(frozen=True)
class Costs:
    """Seconds (or any unit) of the actions of each stage, and of a transfer between ranks.

    ``forward[s]``, ``input_grad[s]``, ``weight_grad[s]``; a whole backward is the sum of the two.
    """

    forward: Sequence[float]
    input_grad: Sequence[float]
    weight_grad: Sequence[float]
    transfer: float = 0.0

    @staticmethod
    def equal(num_stages: int, transfer: float = 0.0) -> Costs:
        """Stages of equal cost, a backward twice its forward: 1, 1, 1."""
        ones = [1.0] * num_stages
        return Costs(ones, ones, ones, transfer)

    def of(self, kind: Kind, stage: int) -> float:
        """The cost of one action."""
        if kind == "F":
            return self.forward[stage]
        if kind == "I":
            return self.input_grad[stage]
        if kind == "W":
            return self.weight_grad[stage]
        return self.input_grad[stage] + self.weight_grad[stage]


@dataclass(frozen=True)
class Timeline:
    """When each action began and ended, and what follows from that."""

    schedule: Schedule
    spans: dict[Action, tuple[float, float]] = field(repr=False)

    @property
    def makespan(self) -> float:
        """From the first action's begin to the last one's end."""
        return max(end for _, end in self.spans.values())

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they wait (0 to 1)."""
        busy = sum(end - begin for begin, end in self.spans.values())
        return 1.0 - busy / (self.schedule.num_ranks * self.makespan)

    def peak_in_flight(self, rank: int) -> int:
        """The most micro-batch activations that ``rank`` holds at once, over its stages."""
        held = most = 0
        for action in self.schedule.orders[rank]:
            held += (action.kind == "F") - (action.kind in ("B", "W"))
            most = max(most, held)
        return most


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Play ``schedule``; it must be sound (:func:`.actions.check`)."""
    costs = costs or Costs.equal(schedule.num_stages)
    stages, halved = schedule.num_stages, schedule.halved
    spans: dict[Action, tuple[float, float]] = {}
    positions = [0] * schedule.num_ranks
    free = [0.0] * schedule.num_ranks
    left = sum(len(order) for order in schedule.orders)
    while left:
        before = left
        for rank, order in enumerate(schedule.orders):
            while positions[rank] < len(order):
                action = order[positions[rank]]
                wanted = list(needs(action, stages, halved))
                if any(need not in spans for need in wanted):
                    break
                arrival = max(
                    (arrives(need, spans, rank, schedule.placement, costs) for need in wanted), default=0.0
                )
                begin = max(free[rank], arrival)
                free[rank] = begin + costs.of(action.kind, action.stage)
                spans[action] = (begin, free[rank])
                positions[rank] += 1
                left -= 1
        assert left < before, "an unsound schedule: check() it first"
    return Timeline(schedule, spans)


def arrives(
    need: Action,
    spans: dict[Action, tuple[float, float]],
    rank: int,
    placement: Sequence[int],
    costs: Costs,
) -> float:
    """When the result of ``need`` is at ``rank``."""
    here = placement[need.stage] == rank
    return spans[need][1] + (0.0 if here else costs.transfer)
