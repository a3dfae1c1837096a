"""The loss scaler against a small model of it that counts in another way."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thalweg.config import load
from thalweg.config.schema.training import FP16
from thalweg.optim.loss_scaler import LossScaleFloorError, LossScaler


def reference(section: dict, verdicts: list[bool]) -> list[float]:
    """Scales after each update; written over the whole history instead of as a state machine."""
    window, patience = section["loss_scale_window"], section["hysteresis"]
    scale = 2.0 ** section["initial_scale_power"]
    left, last, scales = patience, None, []
    for now, bad in enumerate(verdicts):
        if bad:
            if left == 1:
                if scale == section["min_loss_scale"]:
                    scales.append(float("nan"))
                    return scales
                scale = max(scale / 2, section["min_loss_scale"])
            else:
                left -= 1
            last = now
        else:
            clean = now - last - 1 if last is not None else now
            grows = clean > 0 and clean % window == 0
            if section["consecutive_hysteresis"] or grows:
                left = patience
            if grows:
                scale *= 2
        scales.append(scale)
    return scales


sections = st.fixed_dictionaries(
    {
        "enabled": st.just(True),
        "initial_scale_power": st.integers(0, 6),
        "loss_scale_window": st.integers(1, 5),
        "hysteresis": st.integers(1, 4),
        "consecutive_hysteresis": st.booleans(),
        "min_loss_scale": st.sampled_from([0.25, 1.0]),
    }
)


@settings(deadline=None, max_examples=300)
@given(sections, st.lists(st.booleans(), max_size=40))
def test_against_the_reference(section: dict, verdicts: list[bool]) -> None:
    scaler = LossScaler(FP16(**section))
    for bad, want in zip(verdicts, reference(section, verdicts), strict=False):
        if want != want:
            with pytest.raises(LossScaleFloorError):
                scaler.update(bad)
            return
        scaler.update(bad)
        assert scaler.scale == want


@settings(deadline=None, max_examples=100)
@given(sections, st.lists(st.booleans(), max_size=20), st.lists(st.booleans(), max_size=20))
def test_state_round_trip(section: dict, before: list[bool], after: list[bool]) -> None:
    def feed(scaler: LossScaler, verdicts: list[bool]) -> list[float]:
        scales = []
        for bad in verdicts:
            try:
                scaler.update(bad)
            except LossScaleFloorError:
                scales.append(-1.0)
            scales.append(scaler.scale)
        return scales

    scaler = LossScaler(FP16.model_validate(section))
    feed(scaler, before)
    copy = LossScaler(FP16.model_validate(section))
    copy.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    assert copy.scale == scaler.scale
    assert feed(copy, after) == feed(scaler, after)


def test_defaults_are_those_of_the_keys() -> None:
    scaler = LossScaler(FP16.model_validate({"enabled": True}))
    assert scaler.dynamic and scaler.scale == 65536.0
    scaler.update(True)
    assert scaler.scale == 65536.0, "the first overflow only uses up the hysteresis of 2"
    scaler.update(True)
    assert scaler.scale == 32768.0
    for _ in range(1000):
        scaler.update(False)
    assert scaler.scale == 32768.0
    scaler.update(False)
    assert scaler.scale == 65536.0, "1000 clean steps after the last overflow, then it grows"


def test_static_scale_never_moves() -> None:
    scaler = LossScaler(FP16.model_validate({"enabled": True, "loss_scale": 128}))
    for bad in [True] * 5 + [False] * 3000:
        scaler.update(bad)
    assert scaler.scale == 128.0 and not scaler.dynamic


@pytest.mark.parametrize("section", [{}, {"enabled": False, "loss_scale": 128}])
def test_switched_off_is_one(section: dict) -> None:
    scaler = LossScaler(FP16.model_validate(section))
    scaler.update(True)
    assert scaler.scale == 1.0


def test_floor_error_names_the_cure_and_keeps_the_state() -> None:
    scaler = LossScaler(FP16.model_validate({"enabled": True, "initial_scale_power": 1, "hysteresis": 1}))
    scaler.update(True)
    before = scaler.state_dict()
    with pytest.raises(LossScaleFloorError, match=r"bf16.*learning rate"):
        scaler.update(True)
    assert scaler.state_dict() == before
    scaler.update(False)


def test_growth_stops_before_infinity() -> None:
    scaler = LossScaler(FP16.model_validate({"enabled": True, "loss_scale_window": 1}))
    for _ in range(200):
        scaler.update(False)
    assert scaler.scale == 2.0**64


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"loss_scale": -1}, "loss_scale"),
        ({"loss_scale": float("inf")}, "loss_scale"),
        ({"loss_scale_window": 0}, "loss_scale_window"),
        ({"hysteresis": 0}, "hysteresis"),
        ({"min_loss_scale": 0}, "min_loss_scale"),
        ({"initial_scale_power": 2, "min_loss_scale": 8}, "initial_scale_power"),
    ],
)
def test_bad_sections_are_named(section: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        load({"fp16": {"enabled": True, **section}})
