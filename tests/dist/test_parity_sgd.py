"""Gradients and updates against one plain process under SGD with momentum, which hides no scale as AdamW does.

AdamW divides a gradient by its own size: a sum in place of a mean moves a loss by 2e-6.  Here the first gradients are
compared, and what six updates changed; the bounds follow from the formats, and each fault alone exceeds them.
"""

from __future__ import annotations

import pytest
import torch

from tests.dist.models import OddShapesModel, tiny_gpt
from tests.dist.parity import FP32_SLACK, ParityCase, run_engine, run_plain
from tests.dist.zeropp_support import FEATURE_SETS, LAYOUTS, set_fake_host
from tests.harness import run_ranks
from tests.marks import nightly

RATE = 0.1
# Half a unit in the last place of each format, times the roundings that a gradient of these models meets in a row
# (a few dozen, which add up as their root in the 2-norm).
EPS = {"fp32": 2.0**-24, "bf16": 2.0**-9, "fp16": 2.0**-12}
BOUND = {dtype: 32 * eps * (FP32_SLACK if dtype == "fp32" else 1.0) for dtype, eps in EPS.items()}
# Four bits a gradient: blocks of 256 numbers of one scale, of which the largest is about three times their root mean
# square, so a step is 3/7 of that and the error 3/7/sqrt(12), an eighth; it has no sign and no memory, so of the scale
# of all parameters' change little is left.  Measured: at most 0.6%.
QUANTIZED_SCALE = 0.03
FAULTS = ("sum for mean", "rate", "clipping dropped", "stray decay")


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


def sgd_case(stage: int, dtype: str = "fp32", **changes) -> ParityCase:
    windows = changes.pop("windows", (2, 2, 1, 2, 2, 1))
    if dtype == "fp16":  # no update is skipped until a scale is found
        changes["extra"] = {"fp16": {"enabled": True, "initial_scale_power": 8}, **changes.get("extra", {})}
    return ParityCase(stage, dtype, windows, 2, changes.pop("clip", 0.0), "SGD", {"lr": RATE, "momentum": 0.9}).with_(
        **changes
    )


def with_fault(case: ParityCase, fault: str) -> ParityCase:
    """The engine's side with one thing wrong."""
    if fault == "sum for mean":
        return case.with_(extra={**case.extra, "gradient_allreduce_op": "sum"})
    if fault == "rate":
        return case.with_(params={**case.params, "lr": 1.1 * RATE})
    if fault == "clipping dropped":
        return case.with_(clip=0.0)
    return case.with_(params={**case.params, "weight_decay": 0.01})


def _errors(model, case: ParityCase, plain, rank: int, world: int) -> dict[str, float]:
    outcome = run_engine(model, case, rank, world, with_gradients=True)
    scale, rest = outcome.update_errors(plain, model)
    return {"gradient": outcome.gradient_error(plain), "scale": scale, "rest": rest}


def _stages(rank: int, world: int, dtype: str, stages: tuple[int, ...], every: bool) -> list[str]:
    """At each of ``stages``, with clipping and without; ``every``: also the model of odd shapes."""
    torch.set_num_threads(1)
    failures = []
    for name, model in (("gpt", tiny_gpt()), ("odd", OddShapesModel()))[: 1 + every]:
        for clip in (0.0, 0.05):
            plain = run_plain(model, sgd_case(0, clip=clip), world, sgd)
            for stage in stages:
                errors = _errors(model, sgd_case(stage, dtype, clip=clip), plain, rank, world)
                failures += [
                    f"{name} stage {stage} clip {clip}: {what} is off by {error:.1e}"
                    for what, error in errors.items()
                    if not error <= BOUND[dtype]
                ]
    return failures


@pytest.mark.parametrize(
    ("world", "dtype", "stages", "every"),
    [
        pytest.param(2, "fp32", (0, 1, 2, 3), False, id="2-fp32"),
        pytest.param(2, "bf16", (2,), False, id="2-bf16"),
        pytest.param(2, "fp16", (3,), False, id="2-fp16"),
        *(nightly(world, dtype, (0, 1, 2, 3), True) for world in (2, 3) for dtype in ("fp32", "bf16", "fp16")),
    ],
)
def test_first_gradients_and_updates_are_those_of_one_process(world, dtype, stages, every):
    for failures in run_ranks(_stages, world, dtype, stages, every):
        assert failures == []


def _controls(rank: int, world: int, dtype: str) -> dict[str, float]:
    torch.set_num_threads(1)
    model = tiny_gpt()
    plain = run_plain(model, sgd_case(0, clip=0.05), world, sgd)
    unclipped = run_plain(model, sgd_case(0), world, sgd)
    worst = {}
    for fault in FAULTS:
        # Clipping would hide a wrong scale of the gradients from the update.
        is_clip = fault == "clipping dropped"
        case = with_fault(sgd_case(2, dtype, clip=0.05 if is_clip else 0.0), fault)
        worst[fault] = max(_errors(model, case, plain if is_clip else unclipped, rank, world).values())
    return worst


@pytest.mark.parametrize("dtype", ["fp32", nightly("bf16"), nightly("fp16")])
def test_each_fault_alone_exceeds_the_bounds(dtype):
    for fault, worst in run_ranks(_controls, 2, dtype)[0].items():
        assert worst > BOUND[dtype], fault


def _quantized(rank: int, world: int, mixes: tuple[str, ...]) -> dict[str, float]:
    torch.set_num_threads(1)
    set_fake_host(LAYOUTS["2 + 2"], rank)
    model, scales = tiny_gpt(), {}

    def case(mix: str) -> ParityCase:
        return sgd_case(3, extra={"zero_optimization": {"stage": 3, **FEATURE_SETS[mix]}, "log_level": "error"})

    plain = run_plain(model, sgd_case(3), world, sgd)
    for mix in mixes:
        scales[mix] = _errors(model, case(mix), plain, rank, world)["scale"]
    scales["wrong rate"] = _errors(model, with_fault(case("all"), "rate"), plain, rank, world)["scale"]
    return scales


@pytest.mark.parametrize(
    "mixes", [("qgZ",), nightly(("LoCo all", "all MiCS")), nightly(("qgZ", "LoCo", "all", "LoCo all", "all MiCS"))]
)
def test_quantized_gradients_keep_the_scale_of_an_update(mixes):
    """AdamW's loss within 6e-2, as test_zeropp.py has it, would pass a rate 25% wrong."""
    scales = run_ranks(_quantized, 4, mixes)[0]
    assert scales.pop("wrong rate") > QUANTIZED_SCALE
    assert {mix: scale for mix, scale in scales.items() if not scale <= QUANTIZED_SCALE} == {}
