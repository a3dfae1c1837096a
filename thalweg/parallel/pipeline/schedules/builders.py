"""The schedules, each as the order that it makes.

GPipe, 1F1B and interleaved 1F1B have closed forms.  The zero-bubble ones (Qi et al. 2023,
"Zero Bubble Pipeline Parallelism") are what a list scheduler makes of their rule, *take the
gradient of the input as soon as it can be had, fill every wait with the gradient of weights*,
under a limit on the activations held, as if all actions cost the same:

gpipe         all forwards, then all backwards                            m activations
1f1b          a backward as soon as there is one (PipeDream-Flush)        p - r
interleaved   1f1b over several stages a rank, round and round            Narayanan et al. 2021
zb_h1         1f1b in halves, every rank with the first one's memory         p
zbv           two stages a rank, placed as a V, backward in halves        1f1b's memory
dualpipev     torch's order for DualPipe cut in half (DeepSeek 2024)      as torch has it
"""

from typing import Literal, get_args

from thalweg.parallel.pipeline._torch_pipelining import torch_schedule_orders
from thalweg.parallel.pipeline.schedules.schedule import Action, PipelineSchedule, dependencies, validate_schedule
from thalweg.parallel.pipeline.schedules.simulate import ActionCosts, simulate

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipev"]
Orders = tuple[tuple[Action, ...], ...]
SCHEDULE_NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)


def build_schedule(
    name: ScheduleName, num_ranks: int, num_micro_batches: int, *, num_virtual_stages: int = 2
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
    if name == "dualpipev":
        orders = torch_schedule_orders("ScheduleDualPipeV", num_ranks, num_micro_batches, stage_to_rank)
    elif name in ("zb_h1", "zbv"):
        orders = _zero_bubble(num_ranks, num_micro_batches, stage_to_rank)
    else:
        orders = tuple(
            _warm_up_then_alternate(name, rank, num_ranks, num_micro_batches, len(stage_to_rank) // num_ranks)
            for rank in range(num_ranks)
        )
    schedule = PipelineSchedule(name, num_micro_batches, stage_to_rank, orders)
    validate_schedule(schedule)
    return schedule


def assign_stages(name: ScheduleName, num_ranks: int, num_virtual_stages: int = 2) -> tuple[int, ...]:
    """The rank of each stage: in turn (each rank has ``num_virtual_stages`` where they are interleaved, else one), or
    down the ranks and up again, two stages a rank."""
    if name in ("zbv", "dualpipev"):
        return (*range(num_ranks), *reversed(range(num_ranks)))
    return tuple(range(num_ranks)) * (num_virtual_stages if name == "interleaved" else 1)


def _warm_up_then_alternate(
    name: ScheduleName, rank: int, num_ranks: int, num_micro_batches: int, num_chunks: int
) -> tuple[Action, ...]:
    """GPipe, 1F1B and interleaved 1F1B of one rank: so many forwards first, then in turn with backwards."""
    forwards, backwards = [], []
    # As many micro-batches as there are ranks go through all chunks before the next lot.
    for first in range(0, num_micro_batches, num_ranks):
        stages, lot = range(rank, num_chunks * num_ranks, num_ranks), range(first, first + num_ranks)
        forwards += [Action("F", stage, micro) for stage in stages for micro in lot]
        backwards += [Action("B", stage, micro) for stage in reversed(stages) for micro in lot]
    num_later = num_ranks - rank - 1
    warm_up = {"gpipe": len(forwards), "1f1b": num_later}.get(name, 2 * num_later + (num_chunks - 1) * num_ranks)
    warm_up = min(warm_up, len(forwards))
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    order += backwards[len(forwards) - warm_up :]
    # The last lot is filled up and what does not exist left out again: an order without waits stays one.
    return tuple(action for action in order if action.micro < num_micro_batches)


def _zero_bubble(num_ranks: int, num_micro_batches: int, stage_to_rank: tuple[int, ...]) -> Orders:
    """The shortest of what list scheduling finds, no rank ever holding more activations than there are stages.

    A rank that fills its memory with forwards at once may have nothing to alternate with
    later, so tighter limits towards the end of the pipeline are tried too, and both orders
    of preference between a forward and a backward that could begin at the same time.
    """
    most, costs = len(stage_to_rank), ActionCosts.uniform(len(stage_to_rank))
    schedules = []
    for slack in range(0, most, max(1, most // 8)):
        limits = [max(1, min(most, most - rank + slack)) for rank in range(num_ranks)]
        for kinds in ("IFW", "FIW"):
            orders = _list_schedule(num_micro_batches, stage_to_rank, costs, limits, kinds)
            schedules.append(PipelineSchedule("", num_micro_batches, stage_to_rank, orders))
    return min(schedules, key=lambda schedule: simulate(schedule, costs).makespan).orders


def _list_schedule(
    num_micro_batches: int, stage_to_rank: tuple[int, ...], costs: ActionCosts, limits: list[int], kinds: str
) -> Orders:
    """List scheduling: whatever can begin first does, the kind that is first in ``kinds`` among equals.

    ``limits[r]``: the most activations that rank ``r`` may hold, from a forward to its W.
    """
    intervals: dict[Action, tuple[float, float]] = {}
    arrivals: dict[Action, float] = {}
    orders: list[list[Action]] = [[] for _ in limits]
    rank_free_at, in_flight = [0.0] * len(limits), [0] * len(limits)
    # Micro-batches pass each stage in order, so each kind and stage has one that is next.
    upcoming = {Action(kind, stage, 0) for kind in kinds for stage in range(len(stage_to_rank))}  # type: ignore[arg-type]
    while upcoming:
        best = None
        for action in upcoming:
            rank = stage_to_rank[action.stage]
            if action.kind == "F" and in_flight[rank] >= limits[rank]:
                continue
            arrival = arrivals.get(action)
            if arrival is None:
                needed = list(dependencies(action, len(stage_to_rank), lambda _: True))
                if any(need not in intervals for need in needed):
                    continue
                arrival = max((intervals[need][1] for need in needed), default=0.0)
                arrivals[action] = arrival
            # Later stages first among equals: what has come furthest frees memory soonest.
            stage = action.stage if action.kind == "W" else -action.stage
            key = (max(rank_free_at[rank], arrival), kinds.index(action.kind), stage, action.micro)
            best = min(best, (key, action)) if best else (key, action)
        assert best is not None, "the limit on activations holds back every action"
        (begin, *_), action = best
        rank = stage_to_rank[action.stage]
        rank_free_at[rank] = begin + costs.action_cost(action.kind, action.stage)
        intervals[action] = (begin, rank_free_at[rank])
        in_flight[rank] += (action.kind == "F") - (action.kind == "W")
        orders[rank].append(action)
        upcoming.discard(action)
        if action.micro + 1 < num_micro_batches:
            upcoming.add(action._replace(micro=action.micro + 1))
    return tuple(map(tuple, orders))
