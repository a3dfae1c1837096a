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

from thalweg.parallel.pipeline._torch_pipelining import torch_schedule_orders
from thalweg.parallel.pipeline.schedules.schedule import (
    Action,
    ActionKind,
    AllSplit,
    PipelineSchedule,
    dependencies,
    validate_schedule,
)
from thalweg.parallel.pipeline.schedules.simulate import ActionCosts, arrival_time, simulate

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipev"]
SCHEDULE_NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)


def stages_per_rank(name: ScheduleName, num_virtual_stages: int = 2) -> int:
    """How many stages each rank holds: 2 where the placement is a V, ``num_virtual_stages`` where it is interleaved."""
    if name in ("zbv", "dualpipev"):
        return 2
    return num_virtual_stages if name == "interleaved" else 1


def build_schedule(
    name: ScheduleName,
    num_ranks: int,
    num_micro_batches: int,
    *,
    num_virtual_stages: int = 2,
    costs: ActionCosts | None = None,
) -> PipelineSchedule:
    """The schedule of that name, checked.

    Raises:
        ValueError: an unknown name, or counts that the schedule cannot take.
    """
    if name not in SCHEDULE_NAMES:
        raise ValueError(f"unknown pipeline schedule {name!r}: choose one of {', '.join(SCHEDULE_NAMES)}")
    if num_ranks < 1 or num_micro_batches < 1:
        raise ValueError(f"a pipeline needs ranks and micro-batches, got {num_ranks} and {num_micro_batches}")
    stage_to_rank = assign_stages(name, num_ranks, num_virtual_stages)
    costs = costs or ActionCosts.uniform(len(stage_to_rank))
    request = _ScheduleRequest(
        num_ranks, num_micro_batches, stages_per_rank(name, num_virtual_stages), stage_to_rank, costs
    )
    schedule = PipelineSchedule(name, num_micro_batches, stage_to_rank, _BUILDERS[name](request))
    validate_schedule(schedule)
    return schedule


def assign_stages(name: ScheduleName, num_ranks: int, num_virtual_stages: int = 2) -> tuple[int, ...]:
    """The rank of each stage: in turn, or down the ranks and up again."""
    is_v_shaped = name in ("zbv", "dualpipev")
    num_stages = num_ranks * stages_per_rank(name, num_virtual_stages)
    return tuple(_v_shape_rank(stage, num_ranks) if is_v_shaped else stage % num_ranks for stage in range(num_stages))


def _v_shape_rank(stage: int, num_ranks: int) -> int:
    return stage if stage < num_ranks else 2 * num_ranks - 1 - stage


@dataclass(frozen=True)
class _ScheduleRequest:
    num_ranks: int
    num_micro_batches: int
    num_virtual_stages: int
    stage_to_rank: tuple[int, ...]
    costs: ActionCosts


Orders = tuple[tuple[Action, ...], ...]


def _gpipe(request: _ScheduleRequest) -> Orders:
    micros = range(request.num_micro_batches)
    return tuple(
        tuple(Action(kind, rank, micro) for kind in ("F", "B") for micro in micros) for rank in range(request.num_ranks)
    )


def _one_forward_one_backward(request: _ScheduleRequest) -> Orders:
    orders = []
    for rank in range(request.num_ranks):
        forwards = [Action("F", rank, micro) for micro in range(request.num_micro_batches)]
        backwards = [Action("B", rank, micro) for micro in range(request.num_micro_batches)]
        orders.append(_warm_up_then_alternate(forwards, backwards, request.num_ranks - rank - 1))
    return tuple(orders)


def _interleaved(request: _ScheduleRequest) -> Orders:
    ranks, chunks = request.num_ranks, request.num_virtual_stages
    orders = []
    for rank in range(ranks):
        forwards, backwards = [], []
        # As many micro-batches as there are ranks go through all chunks before the next lot.
        for first in range(0, request.num_micro_batches, ranks):
            micro_batch_group = range(first, first + ranks)
            forwards += [
                Action("F", chunk * ranks + rank, micro) for chunk in range(chunks) for micro in micro_batch_group
            ]
            backwards += [
                Action("B", chunk * ranks + rank, micro)
                for chunk in reversed(range(chunks))
                for micro in micro_batch_group
            ]
        warm_up = 2 * (ranks - rank - 1) + (chunks - 1) * ranks
        full = _warm_up_then_alternate(forwards, backwards, warm_up)
        # The last lot is filled up and what does not exist left out again: an order without waits stays one.
        orders.append(tuple(action for action in full if action.micro < request.num_micro_batches))
    return tuple(orders)


def _warm_up_then_alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> tuple[Action, ...]:
    warm_up = min(warm_up, len(forwards))
    order = forwards[:warm_up]
    for index, forward in enumerate(forwards[warm_up:]):
        order += [forward, backwards[index]]
    return tuple(order + backwards[len(forwards) - warm_up :])


def _zb_h1(request: _ScheduleRequest) -> Orders:
    return _zero_bubble(request, request.num_ranks)


def _zbv(request: _ScheduleRequest) -> Orders:
    return _zero_bubble(request, 2 * request.num_ranks)


def _zero_bubble(request: _ScheduleRequest, max_in_flight: int) -> Orders:
    """The shortest of what list scheduling finds, no rank ever holding over ``max_in_flight`` activations.

    A rank that fills its memory with forwards at once may have nothing to alternate with
    later, so tighter limits towards the end of the pipeline are tried too, and both orders
    of preference between a forward and a backward that could begin at the same time.
    """
    candidates = []
    for slack in range(0, max_in_flight, max(1, max_in_flight // 8)):
        limits = [max(1, min(max_in_flight, max_in_flight - rank + slack)) for rank in range(request.num_ranks)]
        candidates += [_list_schedule(request, limits, preference) for preference in _PREFERENCES]
    return min(candidates, key=lambda orders: _makespan(request, orders))


_PREFERENCES: tuple[dict[ActionKind, int], ...] = ({"I": 0, "F": 1, "W": 2}, {"F": 0, "I": 1, "W": 2})


def _makespan(request: _ScheduleRequest, orders: Orders) -> float:
    return simulate(
        PipelineSchedule("", request.num_micro_batches, request.stage_to_rank, orders), request.costs
    ).makespan


def _list_schedule(request: _ScheduleRequest, limits: list[int], preference: dict[ActionKind, int]) -> Orders:
    """List scheduling: whatever can begin first does, the preferred kind among equals.

    ``limits[r]``: the most activations that rank ``r`` may hold, from a forward to its W.
    """
    stage_to_rank, costs = request.stage_to_rank, request.costs
    intervals: dict[Action, tuple[float, float]] = {}
    arrivals: dict[Action, float] = {}
    orders: list[list[Action]] = [[] for _ in range(request.num_ranks)]
    rank_free_at, in_flight = [0.0] * request.num_ranks, [0] * request.num_ranks
    # Micro-batches pass each stage in order, so each kind and stage has one that is next.
    upcoming = {Action(kind, stage, 0) for kind in preference for stage in range(len(stage_to_rank))}
    while upcoming:
        best = None
        for action in upcoming:
            rank = stage_to_rank[action.stage]
            if action.kind == "F" and in_flight[rank] >= limits[rank]:
                continue
            arrival = arrivals.get(action)
            if arrival is None:
                needed = list(dependencies(action, len(stage_to_rank), AllSplit()))
                if any(need not in intervals for need in needed):
                    continue
                arrival = max(
                    (arrival_time(need, intervals, rank, stage_to_rank, costs) for need in needed), default=0.0
                )
                arrivals[action] = arrival
            # Later stages first among equals: what has come furthest frees memory soonest.
            stage = action.stage if action.kind == "W" else -action.stage
            key = (max(rank_free_at[rank], arrival), preference[action.kind], stage, action.micro)
            best = min(best, (key, action)) if best else (key, action)
        assert best is not None, "the limit on activations holds back every action"
        (begin, *_), action = best
        rank = stage_to_rank[action.stage]
        rank_free_at[rank] = begin + costs.action_cost(action.kind, action.stage)
        intervals[action] = (begin, rank_free_at[rank])
        in_flight[rank] += (action.kind == "F") - (action.kind == "W")
        orders[rank].append(action)
        upcoming.discard(action)
        if action.micro + 1 < request.num_micro_batches:
            upcoming.add(action._replace(micro=action.micro + 1))
    return tuple(map(tuple, orders))


def _dualpipev(request: _ScheduleRequest) -> Orders:
    return torch_schedule_orders(
        "ScheduleDualPipeV", request.num_ranks, request.num_micro_batches, request.stage_to_rank
    )


_BUILDERS: dict[ScheduleName, Callable[[_ScheduleRequest], Orders]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zb_h1": _zb_h1,
    "zbv": _zbv,
    "dualpipev": _dualpipev,
}
