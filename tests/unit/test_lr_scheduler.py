"""The schedules against formulas written down on their own, key by key; and their state."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thalweg.optim.build import build_lr_scheduler
from thalweg.optim.lr_scheduler import OneCycle, WarmupLR


def optimizer(*lrs: float, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **kw) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs or (0.1,)]
    return kind(groups, **kw)


def run(name: str, params: dict, count: int, opt: torch.optim.Optimizer | None = None) -> list[list[float]]:
    """The groups' rates that the updates 1, 2, ..., count use."""
    opt = opt or optimizer()
    schedule = build_lr_scheduler(name, params, opt)
    used = []
    for _ in range(count):
        used.append([group["lr"] for group in opt.param_groups])
        assert schedule.get_last_lr() == used[-1]
        schedule.step()
    return used


def firsts(rows: list[list[float]]) -> list[float]:
    return [row[0] for row in rows]


def warmup(n: int, steps: int, shape: str) -> float:
    """Share of the rise that iteration n = update - 2 has reached; the first update sees none of it."""
    steps = max(2, steps)
    if n < 0:
        return 0.0
    if n >= steps:
        return 1.0
    return math.log(1 + n, steps) if shape == "log" else n / steps


def test_warmup_log_written_out() -> None:
    got = firsts(run("WarmupLR", {"warmup_max_lr": 1.0, "warmup_num_steps": 4}, 8))
    log4 = [0, 0, 0.5, math.log(3) / math.log(4), 1.0, 1.0, 1.0, 1.0]
    assert got == pytest.approx(log4)


def test_warmup_linear_written_out() -> None:
    params = {"warmup_min_lr": 1.0, "warmup_max_lr": 3.0, "warmup_num_steps": 4, "warmup_type": "linear"}
    assert firsts(run("WarmupLR", params, 8)) == pytest.approx([1, 1, 1.5, 2, 2.5, 3, 3, 3])


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 30),
    st.sampled_from(["log", "linear"]),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(1, 60),
)
def test_warmups_and_decay(steps: int, shape: str, low: float, high: float, total: int) -> None:
    shared = {
        "warmup_min_lr": low,
        "warmup_max_lr": high,
        "warmup_num_steps": steps,
        "warmup_type": shape,
    }
    steps_used = max(2, steps)
    plain, decayed = [], []
    for n in range(-1, 70):
        rise = warmup(n, steps, shape)
        plain.append(low + (high - low) * rise)
        if n >= steps_used:
            rise = max(0.0, (total - n) / max(1, total - steps_used))
        decayed.append(low + (high - low) * rise)
    assert firsts(run("WarmupLR", shared, 71)) == pytest.approx(plain, abs=1e-12)
    assert firsts(run("WarmupDecayLR", {**shared, "total_num_steps": total}, 71)) == pytest.approx(decayed, abs=1e-12)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 20),
    st.sampled_from(["log", "linear"]),
    st.floats(0, 1),
    st.floats(0, 0.5),
    st.integers(1, 60),
)
def test_warmup_cosine(steps: int, shape: str, start: float, end: float, total: int) -> None:
    params = {
        "total_num_steps": total,
        "warmup_min_ratio": start,
        "cos_min_ratio": end,
        "warmup_num_steps": steps,
        "warmup_type": shape,
    }
    used = max(2, steps)
    want = [0.0]
    for n in range(70):
        if n < used:
            want.append(start + (1 - start) * warmup(n, steps, shape))
        else:
            phase = min(1.0, (n - used + 1) / max(1, total - used))
            want.append(end + (1 - end) * 0.5 * (1 + math.cos(phase * math.pi)))
    rows = run("WarmupCosineLR", params, 71, optimizer(0.1, 2.0))
    assert [row[0] for row in rows] == pytest.approx([0.1 * w for w in want], abs=1e-12)
    assert [row[1] for row in rows] == pytest.approx([2.0 * w for w in want], abs=1e-12)


@pytest.mark.parametrize("staircase", [False, True])
def test_range_test(staircase: bool) -> None:
    params = {
        "lr_range_test_min_lr": 0.5,
        "lr_range_test_step_size": 3,
        "lr_range_test_step_rate": 2.0,
        "lr_range_test_staircase": staircase,
    }
    got = firsts(run("LRRangeTest", params, 8))
    stairs = [0.5, 0.5, 0.5, 1.5, 1.5, 1.5, 2.5, 2.5]
    ramp = [0.5 * (1 + 2 * k / 3) for k in range(8)]
    assert got == pytest.approx(stairs if staircase else ramp)


def test_one_cycle_written_out() -> None:
    opt = optimizer(0.3, betas=(0.9, 0.95))
    params = {
        "cycle_min_lr": 1.0,
        "cycle_max_lr": 3.0,
        "cycle_first_step_size": 4,
        "cycle_second_step_size": 2,
        "decay_step_size": 2,
        "decay_lr_rate": 1.0,
        "decay_mom_rate": 0.05,
        "cycle_min_mom": 0.6,
        "cycle_max_mom": 0.8,
    }
    schedule = build_lr_scheduler("onecycle", params, opt)
    rates, momenta = [], []
    for _ in range(10):
        rates.append(opt.param_groups[0]["lr"])
        momenta.append(opt.param_groups[0]["betas"][0])
        schedule.step()
    assert rates == pytest.approx([1, 1.5, 2, 2.5, 3, 2, 1, 1 / 1.5, 1 / 2, 1 / 2.5])
    assert momenta == pytest.approx([0.6, 0.75, 0.7, 0.65, 0.6, 0.7, 0.8, 0.8 * 1.025, 0.8 * 1.05, 0.8 * 1.075])
    assert opt.param_groups[0]["betas"][1] == 0.95


def test_one_cycle_stairs() -> None:
    params = {
        "cycle_min_lr": 0.0,
        "cycle_max_lr": 1.0,
        "cycle_first_step_size": 4,
        "cycle_first_stair_count": 2,
    }
    got = firsts(run("OneCycle", params, 9))
    assert got == pytest.approx([0, 0, 0.5, 0.5, 1, 0.5, 0.5, 0, 0])


@pytest.mark.parametrize(("second", "share"), [(4, 0.5), (0, 1.0), (12, 0.25)])
def test_one_cycle_says_how_much_of_it_rises(second: int, share: float) -> None:
    params = {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 4, "cycle_second_step_size": second}
    schedule = build_lr_scheduler("OneCycle", params, optimizer(0.1))
    assert isinstance(schedule, OneCycle) and schedule.step_ratio == share


def test_one_cycle_moves_sgd_momentum_and_spares_optimizers_without_one() -> None:
    params = {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 2}
    sgd = optimizer(0.1, kind=torch.optim.SGD, momentum=0.5)
    schedule = build_lr_scheduler("OneCycle", params, sgd)
    schedule.step()
    assert sgd.param_groups[0]["momentum"] == pytest.approx(0.85)
    adagrad = optimizer(0.1, kind=torch.optim.Adagrad)
    build_lr_scheduler("OneCycle", params, adagrad).step()
    assert adagrad.param_groups[0]["lr"] == pytest.approx(0.5)
    fixed = optimizer(0.1)
    build_lr_scheduler("OneCycle", {**params, "cycle_momentum": False}, fixed).step()
    assert fixed.param_groups[0]["betas"] == (0.9, 0.999)


def test_lists_give_each_group_its_own_rates() -> None:
    rows = run("WarmupLR", {"warmup_max_lr": [1.0, 2.0], "warmup_min_lr": [0.0, 1.0]}, 1, optimizer(0.1, 0.2))
    assert rows == [[0.0, 1.0]]
    opt = optimizer(0.1, 0.2)
    schedule = build_lr_scheduler("WarmupLR", {"warmup_num_steps": 2}, opt)
    schedule.step(50)
    assert schedule.get_last_lr() == [0.1, 0.2]


SAMPLES = {
    "WarmupLR": {"warmup_num_steps": 5},
    "WarmupDecayLR": {"warmup_num_steps": 5, "total_num_steps": 12, "warmup_max_lr": 0.5},
    "WarmupCosineLR": {"warmup_num_steps": 5, "total_num_steps": 12},
    "LRRangeTest": {"lr_range_test_step_size": 3},
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 1.0, "cycle_first_step_size": 4, "decay_step_size": 1},
}


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("stop", [0, 1, 7, 20])
def test_state_round_trip(name: str, stop: int) -> None:
    whole = run(name, SAMPLES[name], 25, optimizer(0.1))
    first = optimizer(0.1)
    schedule = build_lr_scheduler(name, SAMPLES[name], first)
    for _ in range(stop):
        schedule.step()
    saved = json.loads(json.dumps(schedule.state_dict()))
    second = optimizer(0.1)
    schedule = build_lr_scheduler(name, SAMPLES[name], second)
    schedule.load_state_dict(saved)
    rest = []
    for _ in range(25 - stop):
        rest.append([second.param_groups[0]["lr"]])
        schedule.step()
    assert rest == whole[stop:]
    other = build_lr_scheduler(name, SAMPLES[name], optimizer(0.1))
    if stop == 7:
        assert other.get_last_lr() != whole[stop]


def test_torch_schedulers_by_name() -> None:
    rows = firsts(run("CosineAnnealingLR", {"T_max": 4}, 5))
    assert rows == pytest.approx([0.05 * (1 + math.cos(math.pi * k / 4)) for k in range(5)])


@pytest.mark.parametrize(
    ("name", "params", "says"),
    [
        ("WarmupL", {}, "unknown scheduler 'WarmupL'"),
        ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps"),
        ("WarmupLR", {"warmup_max_lr": "1e-3"}, "warmup_max_lr"),
        ("WarmupLR", {"warmup_max_lr": [1.0, 2.0]}, "1 parameter groups"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_max_mom": 1.0}, "cycle_max_mom"),
        ("LRRangeTest", {"lr_range_test_step_size": 2.5}, "whole number"),
        ("WarmupLR", {"warmup_min_lr": float("nan")}, "warmup_min_lr"),
    ],
)
def test_bad_input_is_named(name: str, params: dict, says: str) -> None:
    opt = optimizer(0.1)
    with pytest.raises(ValueError, match=says):
        build_lr_scheduler(name, params, opt)
    assert opt.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupCosineLR"])
def test_a_warm_up_of_an_unknown_type_is_logarithmic_and_says_so(name: str, caplog: pytest.LogCaptureFixture) -> None:
    length = {"total_num_steps": 20} if name == "WarmupCosineLR" else {}
    rows = {kind: run(name, {"warmup_num_steps": 9, "warmup_type": kind, **length}, 12) for kind in ("log", "linear")}
    assert not caplog.records
    cubic = run(name, {"warmup_num_steps": 9, "warmup_type": "cubic", **length}, 12)
    assert firsts(cubic) == firsts(rows["log"]) != firsts(rows["linear"]) and "'cubic'" in caplog.text


def test_a_group_that_joins_later_keeps_its_rate() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = build_lr_scheduler("WarmupLR", {"warmup_num_steps": 5, "warmup_max_lr": 0.4}, optimizer)
    schedule.step()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 0.02})
    before = schedule.get_last_lr()[0]
    for _ in range(3):
        schedule.step()
    first, later = schedule.get_last_lr()
    assert first == optimizer.param_groups[0]["lr"] > before
    assert later == optimizer.param_groups[1]["lr"] == 0.02


def test_one_cycle_tells_its_momenta_where_a_group_has_joined() -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.1, betas=(0.5, 0.99))
    schedule = OneCycle(optimizer, 0.1, 1.0, cycle_first_step_size=2)
    before = schedule.get_mom()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    assert schedule.get_mom() == before and len(before or []) == 1


def test_one_cycle_tells_its_momenta() -> None:
    """`get_mom` gives each group's betas with the momentum of the iteration; a cycle may have no second half."""
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.1, betas=(0.5, 0.99))
    schedule = OneCycle(optimizer, 0.1, 1.0, cycle_first_step_size=2, cycle_second_step_size=0)
    told = [schedule.get_mom()]
    for _ in range(2):
        schedule.step()
        told.append(schedule.get_mom())
    assert told[0] == [(0.9, 0.99)]
    assert told[1] == [(pytest.approx(0.85), 0.99)]
    assert optimizer.param_groups[0]["betas"] == told[2][0]
    assert WarmupLR(optimizer).get_mom() is None
