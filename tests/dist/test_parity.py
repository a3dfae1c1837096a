"""Every stage against one plain process, in every cell of the matrix (PAIN_POINTS rows 3, 4, 17)."""

from __future__ import annotations

import pytest
import torch

from tests.dist.models import OddShapesModel, tiny_gpt
from tests.dist.parity import (
    FP32_SLACK,
    ParityCase,
    TrainOutcome,
    bitwise_equal,
    full_tensor,
    full_tensors,
    ragged_windows,
    run_engine,
    run_plain,
)
from tests.harness import run_ranks
from tests.marks import nightly

STAGES = (0, 1, 2, 3)
TOLERANCE = {"fp32": 2e-6, "bf16": 2e-2, "fp16": 3e-3}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0)


def _cells(stage: int, every: bool) -> list[tuple[str, ParityCase]]:
    """Every cell, or those that a world size can break and one of each other kind."""
    cells = [
        ("gpt", ParityCase(stage)),
        ("gpt", ParityCase(stage, windows=(2,) * 5, accumulation=2, clip=0.05)),
        ("gpt", ParityCase(stage, windows=ragged_windows(4, 6), accumulation=4)),
        ("odd", ParityCase(stage, windows=ragged_windows(2, 6), accumulation=2, clip=0.05)),
        ("gpt", ParityCase(stage, "bf16", windows=(1,) * 4, clip=0.05)),
    ]
    if not every:
        fp16 = ParityCase(stage, "fp16", windows=(2, 2, 1, 2), accumulation=2, clip=0.05)
        return [cells[1], *cells[3:], ("gpt", fp16)]
    cells += [("gpt", ParityCase(stage, windows=(n,) * 5, accumulation=n, clip=c)) for n in (1, 4) for c in (0, 0.05)]
    cells += [("odd", ParityCase(stage, windows=(1,) * 20))]
    for dtype in ("bf16", "fp16"):
        cells += [("gpt", ParityCase(stage, dtype, windows=(n,) * 4, accumulation=n)) for n in (1, 2, 4)]
        cells += [("gpt", ParityCase(stage, dtype, windows=ragged_windows(4, 6), accumulation=4, clip=0.05))]
    return cells


def _matrix(rank: int, world: int, every: bool) -> list[str]:
    torch.set_num_threads(1)
    models = {"gpt": tiny_gpt(), "odd": OddShapesModel()}
    plain: dict[tuple, TrainOutcome] = {}
    engines: dict[tuple, TrainOutcome] = {}
    failures = []
    for stage in STAGES:
        for name, case in _cells(stage, every):
            key = (name, case.windows, case.clip)
            if key not in plain:
                plain[key] = run_plain(models[name], case, world, adamw)
            outcome = engines[(*key, case.dtype, stage)] = run_engine(models[name], case, rank, world)
            worst = outcome.max_loss_difference(plain[key])
            if not worst <= TOLERANCE[case.dtype] * (FP32_SLACK if case.dtype == "fp32" else 1.0):
                failures.append(f"{name} {case} differs by {worst:.2e}")
    for (*key, stage), outcome in engines.items():
        whole = max(key[1]) == 1  # one micro-batch an update: nothing is accumulated
        twin = engines[(*key, 2)]
        if (stage == 3 or (stage == 1 and whole)) and not (
            bitwise_equal(outcome.parameters, twin.parameters) and outcome.losses == twin.losses
        ):
            failures.append(f"stages {stage} and 2 differ in bits: {key}")
        if stage == 1 and not whole and outcome.max_loss_difference(twin) > 1e-6 * FP32_SLACK and key[3] == "fp32":
            failures.append(f"stages 1 and 2 differ by {outcome.max_loss_difference(twin):.2e}: {key}")
    return failures


@pytest.mark.parametrize(
    ("world", "every"), [(3, False), nightly(1, False), *(nightly(world, True) for world in (2, 3, 4))]
)
def test_row04_stages_equal_one_process(world, every):
    for failures in run_ranks(_matrix, world, every, timeout=400):
        assert failures == []


def _wrong(rank: int, world: int) -> dict[str, float]:
    model = tiny_gpt()
    case = ParityCase(stage=2, windows=(2,) * 6, accumulation=2)
    plain = run_plain(model, case, world, adamw)
    wrong = {
        "learning rate": case.with_(params={"lr": 1.01e-2}),
        "clipping": case.with_(clip=0.05),
        "weight decay": case.with_(params={"lr": 1e-2, "weight_decay": 0.01}),
        "averaging": case.with_(extra={"gradient_allreduce_op": "sum"}, optimizer="SGD"),
    }
    return {name: run_engine(model, other, rank, world).max_loss_difference(plain) for name, other in wrong.items()}


def test_negative_controls_fail():
    """The matrix's tolerance is far below what any of these mistakes causes."""
    for name, worst in run_ranks(_wrong, 2)[0].items():
        assert worst > 10 * TOLERANCE["fp32"], name


def _gathered(rank: int, world: int) -> list[bool]:
    import thalweg

    config = ParityCase(3).config()
    engine, *_ = thalweg.initialize(model=OddShapesModel(), config=config)
    params = list(engine.module.parameters())
    return [torch.equal(one, full_tensor(p)) for one, p in zip(full_tensors(params), params, strict=True)]


@pytest.mark.parametrize("world", [2, 3])
def test_shards_that_cross_together_are_what_each_gives(world):
    """What most tests compare is what torch gathers, of fewer rows than ranks too."""
    for equal in run_ranks(_gathered, world):
        assert len(equal) > 8 and all(equal)
