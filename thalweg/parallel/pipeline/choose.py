"""Which schedule: the one that a simulation with the costs at hand ends first.

Candidates whose activations would not fit are left out; among those within two percent of the best,
the one that holds the fewest activations wins, as the clock of a simulation is no better than that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thalweg.parallel.pipeline.schedules import NAMES, Name, build
from thalweg.parallel.pipeline.simulate import Costs, Timeline, simulate

_CLOSE = 1.02
# A schedule in halves walks each graph twice; measured at 1 to 3% of a backward pass on a processor.
_HALVES = 0.02


@dataclass(frozen=True)
class Candidate:
    """One schedule of this many micro-batches, played."""

    name: Name
    timeline: Timeline
    seconds: float
    peak: int


def candidates(
    num_ranks: int,
    num_micro: int,
    most_stages: int,
    costs_of: Callable[[int], Costs] | None = None,
    chunks: int = 2,
) -> list[Candidate]:
    """Every schedule that ``num_ranks``, ``num_micro`` and ``most_stages`` allow, the best first.

    ``costs_of(num_stages)``: what the actions of the model cost, cut into so many stages; by default all
    the same, in sum one unit a rank.
    """

    def even(num_stages: int) -> Costs:
        each = [num_ranks / num_stages] * num_stages
        return Costs(each, each, each)

    found = []
    for name in NAMES:
        try:
            schedule = build(name, num_ranks, num_micro, chunks=chunks)
        except ValueError:
            continue  # too few micro-batches for it
        if schedule.num_stages > most_stages:
            continue
        timeline = simulate(schedule, (costs_of or even)(schedule.num_stages))
        share = schedule.num_stages // num_ranks
        peak = max(timeline.peak_in_flight(rank) for rank in range(num_ranks))
        seconds = timeline.makespan * (1 + _HALVES if schedule.halved else 1.0)
        found.append(Candidate(name, timeline, seconds, -(-peak // share)))
    return sorted(found, key=lambda one: one.seconds)


def choose(found: Sequence[Candidate], most_in_flight: int | None = None) -> Candidate:
    """The best of ``found``, as :func:`candidates` gives them; ``most_in_flight``: micro-batches that fit."""
    fitting = [one for one in found if most_in_flight is None or one.peak <= most_in_flight]
    if not fitting:
        return min(found, key=lambda one: one.peak)
    best = fitting[0].seconds
    return min((one for one in fitting if one.seconds <= _CLOSE * best), key=lambda one: one.peak)
