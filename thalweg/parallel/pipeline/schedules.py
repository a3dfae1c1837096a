"""The schedules, each as the order that it makes.

GPipe, 1F1B and interleaved 1F1B have closed forms.  The zero-bubble ones (Qi et al. 2023,
"Zero Bubble Pipeline Parallelism") are what a list scheduler makes of their rule, *take the
gradient of the input as soon as it can be had, fill every wait with the gradient of weights*,
under a limit on the activations held, with the measured costs where there are any:

gpipe         all forwards, then all backwards                            m activations
1f1b          a backward as soon as there is one (PipeDream-Flush)        p - r
interleaved   1f1b over several stages a rank, round and round            Narayanan et al. 2021
zb_h1         1f1b in halves, every rank with the first one's memory         p
zbv           two stages a rank, placed as a V, backward in halves        1f1b's memory
dualpipev     torch's order for DualPipe cut in half (DeepSeek 2024)      as torch has it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from thalweg.parallel.pipeline._torch import torch_orders
from thalweg.parallel.pipeline.actions import Action, Everything, Kind, Schedule, check, needs
from thalweg.parallel.pipeline.simulate import Costs, arrives, simulate

Name = Literal["gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipev"]
NAMES: tuple[Name, ...] = get_args(Name)


def stages_per_rank(name: Name, chunks: int = 2) -> int:
    """How many stages each rank holds: 2 where the placement is a V, ``chunks`` where it is interleaved."""
    if name in ("zbv", "dualpipev"):
        return 2
    return chunks if name == "interleaved" else 1


def build(
    name: Name, num_ranks: int, num_micro_batches: int, *, chunks: int = 2, costs: Costs | None = None
) -> Schedule:
    """The schedule of that name, checked.

    Raises:
        ValueError: an unknown name, or counts that the schedule cannot take.
    """
    if name not in NAMES:
        raise ValueError(f"unknown pipeline schedule {name!r}: choose one of {', '.join(NAMES)}")
    if num_ranks < 1 or num_micro_batches < 1:
        raise ValueError(f"a pipeline needs ranks and micro-batches, got {num_ranks} and {num_micro_batches}")
    placement = placement_of(name, num_ranks, chunks)
    costs = costs or Costs.equal(len(placement))
    job = _Job(num_ranks, num_micro_batches, stages_per_rank(name, chunks), placement, costs)
    schedule = Schedule(name, num_micro_batches, placement, _MAKERS[name](job))
    check(schedule)
    return schedule


def placement_of(name: Name, num_ranks: int, chunks: int = 2) -> tuple[int, ...]:
    """The rank of each stage: in turn, or down the ranks and up again."""
    fold = name in ("zbv", "dualpipev")
    num_stages = num_ranks * stages_per_rank(name, chunks)
    return tuple(_v(stage, num_ranks) if fold else stage % num_ranks for stage in range(num_stages))


def _v(stage: int, num_ranks: int) -> int:
    return stage if stage < num_ranks else 2 * num_ranks - 1 - stage


@dataclass(frozen=True)
class _Job:
    num_ranks: int
    num_micro: int
    per_rank: int
    placement: tuple[int, ...]
    costs: Costs


Orders = tuple[tuple[Action, ...], ...]


def _gpipe(job: _Job) -> Orders:
    micros = range(job.num_micro)
    return tuple(
        tuple(Action(kind, rank, micro) for kind in ("F", "B") for micro in micros)
        for rank in range(job.num_ranks)
    )


def _one_f_one_b(job: _Job) -> Orders:
    orders = []
    for rank in range(job.num_ranks):
        forwards = [Action("F", rank, micro) for micro in range(job.num_micro)]
        backwards = [Action("B", rank, micro) for micro in range(job.num_micro)]
        orders.append(_warm_up_then_alternate(forwards, backwards, job.num_ranks - rank - 1))
    return tuple(orders)


def _interleaved(job: _Job) -> Orders:
    ranks, chunks = job.num_ranks, job.per_rank
    orders = []
    for rank in range(ranks):
        forwards, backwards = [], []
        # As many micro-batches as there are ranks go through all chunks before the next lot.
        for first in range(0, job.num_micro, ranks):
            lot = range(first, first + ranks)
            forwards += [Action("F", chunk * ranks + rank, micro) for chunk in range(chunks) for micro in lot]
            backwards += [
                Action("B", chunk * ranks + rank, micro) for chunk in reversed(range(chunks)) for micro in lot
            ]
        warm_up = 2 * (ranks - rank - 1) + (chunks - 1) * ranks
        full = _warm_up_then_alternate(forwards, backwards, warm_up)
        # The last lot is filled up and what does not exist left out again: an order without waits stays one.
        orders.append(tuple(action for action in full if action.micro < job.num_micro))
    return tuple(orders)


def _warm_up_then_alternate(
    forwards: list[Action], backwards: list[Action], warm_up: int
) -> tuple[Action, ...]:
    warm_up = min(warm_up, len(forwards))
    order = forwards[:warm_up]
    for index, forward in enumerate(forwards[warm_up:]):
        order += [forward, backwards[index]]
    return tuple(order + backwards[len(forwards) - warm_up :])


def _zb_h1(job: _Job) -> Orders:
    return _zero_bubble(job, job.num_ranks)


def _zbv(job: _Job) -> Orders:
    return _zero_bubble(job, 2 * job.num_ranks)


def _zero_bubble(job: _Job, most: int) -> Orders:
    """The shortest of what list scheduling finds, no rank ever holding over ``most`` activations.

    A rank that fills its memory with forwards at once may have nothing to alternate with
    later, so tighter limits towards the end of the pipeline are tried too, and both orders
    of preference between a forward and a backward that could begin at the same time.
    """
    found = []
    for slack in range(0, most, max(1, most // 8)):
        limits = [max(1, min(most, most - rank + slack)) for rank in range(job.num_ranks)]
        found += [_greedy(job, limits, preference) for preference in _PREFERENCES]
    return min(found, key=lambda orders: _makespan(job, orders))


_PREFERENCES: tuple[dict[Kind, int], ...] = ({"I": 0, "F": 1, "W": 2}, {"F": 0, "I": 1, "W": 2})


def _makespan(job: _Job, orders: Orders) -> float:
    return simulate(Schedule("", job.num_micro, job.placement, orders), job.costs).makespan


def _greedy(job: _Job, limits: list[int], preference: dict[Kind, int]) -> Orders:
    """List scheduling: whatever can begin first does, the preferred kind among equals.

    ``limits[r]``: the most activations that rank ``r`` may hold, from a forward to its W.
    """
    placement, costs = job.placement, job.costs
    spans: dict[Action, tuple[float, float]] = {}
    arrivals: dict[Action, float] = {}
    orders: list[list[Action]] = [[] for _ in range(job.num_ranks)]
    free, held = [0.0] * job.num_ranks, [0] * job.num_ranks
    # Micro-batches pass each stage in order, so each kind and stage has one that is next.
    upcoming = {Action(kind, stage, 0) for kind in preference for stage in range(len(placement))}
    while upcoming:
        best = None
        for action in upcoming:
            rank = placement[action.stage]
            if action.kind == "F" and held[rank] >= limits[rank]:
                continue
            arrival = arrivals.get(action)
            if arrival is None:
                wanted = list(needs(action, len(placement), Everything()))
                if any(need not in spans for need in wanted):
                    continue
                arrival = max((arrives(need, spans, rank, placement, costs) for need in wanted), default=0.0)
                arrivals[action] = arrival
            # Later stages first among equals: what has come furthest frees memory soonest.
            stage = action.stage if action.kind == "W" else -action.stage
            key = (max(free[rank], arrival), preference[action.kind], stage, action.micro)
            best = min(best, (key, action)) if best else (key, action)
        assert best is not None, "the limit on activations holds back every action"
        (begin, *_), action = best
        rank = placement[action.stage]
        free[rank] = begin + costs.of(action.kind, action.stage)
        spans[action] = (begin, free[rank])
        held[rank] += (action.kind == "F") - (action.kind == "W")
        orders[rank].append(action)
        upcoming.discard(action)
        if action.micro + 1 < job.num_micro:
            upcoming.add(action._replace(micro=action.micro + 1))
    return tuple(map(tuple, orders))


def _dualpipev(job: _Job) -> Orders:
    return torch_orders("ScheduleDualPipeV", job.num_ranks, job.num_micro, job.placement)


_MAKERS: dict[Name, Callable[[_Job], Orders]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _interleaved,
    "zb_h1": _zb_h1,
    "zbv": _zbv,
    "dualpipev": _dualpipev,
}
