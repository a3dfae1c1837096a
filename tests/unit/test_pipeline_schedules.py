"""Schedules as data: sound, of the bubble that the papers state, within their memory."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from thalweg.parallel.pipeline._torch_pipelining import backward_inputs, backward_weights
from thalweg.parallel.pipeline.p2p import P2PChannel
from thalweg.parallel.pipeline.partition import partition_balanced
from thalweg.parallel.pipeline.schedule_executor import ScheduleExecutor, StageCallbacks
from thalweg.parallel.pipeline.schedules.builders import SCHEDULE_NAMES, assign_stages, build_schedule
from thalweg.parallel.pipeline.schedules.schedule import Action, PipelineSchedule, validate_schedule
from thalweg.parallel.pipeline.schedules.simulate import ActionCosts, simulate
from thalweg.parallel.pipeline.schedules.visualize import timeline_to_svg, timeline_to_text

COUNTS = [(2, 2), (2, 8), (3, 7), (4, 4), (4, 8), (4, 16), (8, 16)]


@pytest.mark.parametrize(("ranks", "micro"), COUNTS)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_is_the_textbook_one(name, ranks, micro):
    bubble = simulate(build_schedule(name, ranks, micro)).bubble
    assert bubble == pytest.approx((ranks - 1) / (micro + ranks - 1))


@pytest.mark.parametrize(("ranks", "micro"), COUNTS)
def test_zbv_at_least_halves_the_bubble_within_the_same_memory(ranks, micro):
    plain, better = (
        simulate(build_schedule("1f1b", ranks, micro)),
        simulate(build_schedule("zbv", ranks, micro)),
    )
    assert better.bubble <= 0.5 * plain.bubble
    # Its stages are half as large.
    assert max(better.peak_in_flight(r) for r in range(ranks)) <= 2 * plain.peak_in_flight(0)


@pytest.mark.parametrize(("ranks", "micro"), COUNTS)
def test_zb_h1_shrinks_the_bubble_within_the_first_ranks_memory(ranks, micro):
    plain, better = (
        simulate(build_schedule("1f1b", ranks, micro)),
        simulate(build_schedule("zb_h1", ranks, micro)),
    )
    assert better.bubble <= 0.58 * plain.bubble
    assert max(better.peak_in_flight(r) for r in range(ranks)) <= plain.peak_in_flight(0)


def test_1f1b_holds_fewer_activations_than_gpipe():
    gpipe, one = simulate(build_schedule("gpipe", 4, 16)), simulate(build_schedule("1f1b", 4, 16))
    assert [gpipe.peak_in_flight(r) for r in range(4)] == [16] * 4
    assert [one.peak_in_flight(r) for r in range(4)] == [4, 3, 2, 1]


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(SCHEDULE_NAMES), st.integers(1, 5), st.integers(1, 11), st.integers(1, 3))
def test_every_schedule_is_complete_and_never_waits_forever(name, ranks, micro, chunks):
    if name == "dualpipev" and micro < 2 * ranks:
        return
    schedule = build_schedule(name, ranks, micro, num_virtual_stages=chunks)
    validate_schedule(schedule)
    assert schedule.num_stages == ranks * len(assign_stages(name, 1, chunks))
    assert 0.0 <= simulate(schedule, ActionCosts.uniform(schedule.num_stages)).bubble < 1.0


def test_check_names_what_is_wrong():
    good = build_schedule("1f1b", 2, 2)
    first, second = good.orders
    with pytest.raises(ValueError, match="rank 1 never does 1B1"):
        validate_schedule(PipelineSchedule("x", 2, good.stage_to_rank, (first, second[:-1])))
    with pytest.raises(ValueError, match="twice"):
        validate_schedule(PipelineSchedule("x", 2, good.stage_to_rank, (first, (*second, second[0]))))
    with pytest.raises(ValueError, match="stage lies on rank 1"):
        validate_schedule(PipelineSchedule("x", 2, good.stage_to_rank, ((*first, Action("F", 1, 0)), second[1:])))
    backwards_first = tuple(sorted(first, key=lambda action: action.kind))
    with pytest.raises(ValueError, match="wait for each other: rank 0 at 0B0"):
        validate_schedule(PipelineSchedule("x", 2, good.stage_to_rank, (backwards_first, second)))
    with pytest.raises(ValueError, match="choose one of"):
        build_schedule("2f2b", 2, 2)  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 5))
def test_no_cut_has_a_cheaper_dearest_stage(costs, stages):
    def dearest(left, rest):
        if rest == 1:
            return sum(left)
        return min(max(sum(left[:i]), dearest(left[i:], rest - 1)) for i in range(len(left) + 1))

    runs = partition_balanced(costs, stages)
    assert [i for run in runs for i in run] == list(range(len(costs)))
    assert len(runs) == stages
    assert max(sum(costs[i] for i in run) for run in runs) == dearest(costs, stages)


def test_pictures_hold_every_action():
    timeline = simulate(build_schedule("1f1b", 2, 3))
    assert timeline_to_text(timeline).splitlines() == [
        "rank 0: F0 F1  .  . B0  - F2 B1  -  . B2  -",
        "rank 1:  . F0 B0  - F1 B1  - F2 B2  -  .  .",
    ]
    tree = ElementTree.fromstring(timeline_to_svg(timeline))
    titles = [node.text for node in tree.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 1 + 2 * 2 * 3
    assert "bubble 25.0%" in str(titles[0])


def test_halves_add_up_where_one_gradient_is_a_view_of_another():
    weight = nn.Parameter(torch.zeros(4))
    sent = []
    for _ in range(3):
        value = torch.zeros(4, requires_grad=True)
        # The gradient of a sum is one number seen four times, here the same one for both.
        grads, rest = backward_inputs([(value + weight).sum()], None, [value], [weight])
        backward_weights([weight], rest)
        sent.append(grads[0])
    assert weight.grad.tolist() == [3.0] * 4
    assert [grad.tolist() for grad in sent] == [[1.0] * 4] * 3


class _RecordingChannel(P2PChannel):
    """Notes what a rank computes, sends and receives, in order."""

    def __init__(self) -> None:
        self._recv_order, self._received = {}, {}
        self.program: list[tuple[str, int]] = []

    def send(self, destination, kind, value, name="messages"):
        self.program.append(("send", destination))

    def _receive_next(self, source, kind):
        self.program.append(("receive", source))
        return torch.zeros(1, requires_grad=True) if kind[0] == "value" else [torch.ones(1)]

    def wait_sends(self):
        return


def _programs(schedule: PipelineSchedule) -> list[list[tuple[str, int]]]:
    found = []
    for rank in range(len(schedule.orders)):
        wire = _RecordingChannel()

        def run(stage, value, batch, wire=wire):
            wire.program.append(("compute", stage))
            return (torch.zeros(1, requires_grad=True) if value is None else value * 2.0).sum()[None]

        calls = StageCallbacks(run, lambda stage: [], lambda loss: loss)
        ScheduleExecutor(schedule, rank, wire, calls).train([None] * schedule.num_micro_batches)
        found.append(wire.program)
    return found


def _ends(programs: list[list[tuple[str, int]]], two_groups: bool) -> bool:
    """Whether all ranks come to an end where a message needs both its ranks at once, and those of a pair of
    ranks in one group go in order (NCCL): computing waits for receives, a send only for what is before it."""
    at = [0] * len(programs)  # what has been computed or received
    lines: list[dict[tuple[bool, int], list[tuple[str, int]]]] = [{} for _ in programs]
    for rank, program in enumerate(programs):
        for index, (kind, other) in enumerate(program):
            if kind != "compute":
                up = (rank < other) == (kind == "send")
                lines[rank].setdefault((up or not two_groups, other), []).append((kind, index))
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program) and program[at[rank]][0] != "receive":
                at[rank], moved = at[rank] + 1, True
            for (up, other), line in lines[rank].items():
                if not line or line[0][0] != "send" or at[rank] <= line[0][1]:
                    continue
                theirs = lines[other][up, rank]
                if theirs and theirs[0] == ("receive", at[other]):
                    line.pop(0), theirs.pop(0)
                    at[other], moved = at[other] + 1, True
    return all(at[rank] == len(program) for rank, program in enumerate(programs))


def test_messages_of_two_groups_never_block_each_other_as_those_of_one_would():
    for name in SCHEDULE_NAMES:
        for ranks, micro in ((2, 4), (3, 7), (4, 8), (5, 10)):
            assert _ends(_programs(build_schedule(name, ranks, micro)), two_groups=True), (name, ranks, micro)
    assert not _ends(_programs(build_schedule("1f1b", 2, 4)), two_groups=False)
