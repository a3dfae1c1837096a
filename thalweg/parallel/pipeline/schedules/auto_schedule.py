"""Which schedule: the one that a simulation with the costs at hand ends first.

Among those within two percent of the best, the one that holds the fewest activations wins, as the clock of a
simulation is no better than that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thalweg.parallel.pipeline.schedules.builders import SCHEDULE_NAMES, ScheduleName, build_schedule
from thalweg.parallel.pipeline.schedules.simulate import ActionCosts, Timeline, simulate

_TIE_FACTOR = 1.02
# A schedule in halves walks each graph twice; measured at 1 to 3% of a backward pass on a processor.
_SPLIT_BACKWARD_OVERHEAD = 0.02


@dataclass(frozen=True)
class ScheduleCandidate:
    """One schedule of this many micro-batches, played."""

    name: ScheduleName
    timeline: Timeline
    seconds: float
    peak_in_flight: int


def rank_schedules(
    num_ranks: int,
    num_micro_batches: int,
    max_stages: int,
    get_costs: Callable[[int], ActionCosts] | None = None,
    num_virtual_stages: int = 2,
) -> list[ScheduleCandidate]:
    """Every schedule that ``num_ranks``, ``num_micro_batches`` and ``max_stages`` allow, the best first.

    ``get_costs(num_stages)``: what the actions of the model cost, cut into so many stages; by default all
    the same, in sum one unit a rank.
    """

    def even_costs(num_stages: int) -> ActionCosts:
        rank_share = [num_ranks / num_stages] * num_stages
        return ActionCosts(rank_share, rank_share, rank_share)

    ranked = []
    for name in SCHEDULE_NAMES:
        try:
            schedule = build_schedule(name, num_ranks, num_micro_batches, num_virtual_stages=num_virtual_stages)
        except ValueError:
            continue  # too few micro-batches for it
        if schedule.num_stages > max_stages:
            continue
        timeline = simulate(schedule, (get_costs or even_costs)(schedule.num_stages))
        num_local_stages = schedule.num_stages // num_ranks
        peak = max(timeline.peak_in_flight(rank) for rank in range(num_ranks))
        seconds = timeline.makespan * (1 + _SPLIT_BACKWARD_OVERHEAD if schedule.split_backward else 1.0)
        ranked.append(ScheduleCandidate(name, timeline, seconds, -(-peak // num_local_stages)))
    return sorted(ranked, key=lambda one: one.seconds)


def choose_schedule(candidates: Sequence[ScheduleCandidate]) -> ScheduleCandidate:
    """The best of ``candidates``, as :func:`rank_schedules` gives them."""
    equal = (one for one in candidates if one.seconds <= _TIE_FACTOR * candidates[0].seconds)
    return min(equal, key=lambda one: one.peak_in_flight)
