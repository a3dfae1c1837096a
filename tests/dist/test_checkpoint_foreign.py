"""Folders that DeepSpeed 0.19.8 wrote on two ranks: a job goes on from them with DeepSpeed's own losses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import thalweg
from tests.data.deepspeed.job import ROWS, SAVED_AFTER, SCHEDULE, STEPS, OddModel, make_batch, param_groups
from tests.harness import run_ranks
from tests.marks import nightly

REUSE_RANKS = True

DATA = Path(__file__).parent.parent / "data" / "deepspeed"


def engine_of(world: int, stage: int, case: str):
    model = OddModel()
    config = {
        "train_batch_size": ROWS,
        "train_micro_batch_size_per_gpu": ROWS // world,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        "bf16": {"enabled": case.endswith("bf16")},
        "cpu_kernels": "torch",
    }
    groups = param_groups(model)
    if case != "stage0":
        config["scheduler"] = {"type": "WarmupLR", "params": SCHEDULE}
    return thalweg.initialize(model=model, model_parameters=groups, config=config)[0]


def resume_job(rank: int, world: int, folder: str, stage: int, case: str, with_optimizer: bool) -> dict:
    engine = engine_of(world, stage, case)
    path, client = engine.load_checkpoint(folder, load_optimizer_states=with_optimizer)
    found = {"path": Path(path).name, "client": client, "steps": engine.global_steps, "samples": engine.global_samples}
    found["losses"] = []
    for step in range(SAVED_AFTER, STEPS):
        loss = engine(*make_batch(step, rank, world))
        engine.backward(loss)
        engine.step()
        found["losses"].append(loss.item())
    engine.close()
    return found


def mean_losses(results: list[dict]) -> list[float]:
    return [sum(values) / len(results) for values in zip(*(r["losses"] for r in results), strict=True)]


CASES = ["stage1", "stage2", "stage3"]
OTHERS = ["stage2_elastic"]


@pytest.mark.parametrize(
    ("case", "world", "stage"),
    [
        ("stage1", 3, 1),
        ("stage2", 2, 2),
        ("stage2", 1, 3),
        ("stage3", 2, 3),
        ("stage3", 3, 2),
        ("stage2_elastic", 3, 2),
        *(nightly(case, world, stage) for case in [*CASES, *OTHERS] for world in (1, 2, 3, 4) for stage in range(4)),
    ],
)
def test_job_goes_on_with_deepspeeds_losses(case: str, world: int, stage: int) -> None:
    expected = json.loads((DATA / case / "losses.json").read_text())
    results = run_ranks(resume_job, world, str(DATA / case), stage, case, True)
    assert mean_losses(results) == pytest.approx(expected, abs=1e-5)
    first = results[0]
    assert (first["path"], first["steps"], first["samples"]) == ("global_step3", 3, 36)
    assert (first["client"]["epoch"], first["client"]["note"]) == (7, (1, "x"))
    assert first["client"]["table"].tolist() == [0, 1, 2]


def test_without_the_moments_the_losses_differ() -> None:
    """The control of the test above: weights alone do not give these losses."""
    expected = json.loads((DATA / "stage2" / "losses.json").read_text())
    losses = mean_losses(run_ranks(resume_job, 2, str(DATA / "stage2"), 2, "stage2", False))
    assert losses[0] == pytest.approx(expected[0], abs=1e-5)
    assert abs(losses[2] - expected[2]) > 1e-3


def test_of_stage_0_the_weights_are_loaded() -> None:
    """Its optimiser's parameters have numbers and no names."""
    expected = json.loads((DATA / "stage0" / "losses.json").read_text())
    losses = mean_losses(run_ranks(resume_job, 2, str(DATA / "stage0"), 1, "stage0", False))
    assert losses[0] == pytest.approx(expected[0], abs=1e-5)
    with pytest.raises(AssertionError, match="restore the weights alone"):
        run_ranks(resume_job, 2, str(DATA / "stage0"), 1, "stage0", True)


def test_bf16_job_goes_on() -> None:
    expected = json.loads((DATA / "stage1_bf16" / "losses.json").read_text())
    losses = mean_losses(run_ranks(resume_job, 3, str(DATA / "stage1_bf16"), 2, "stage1_bf16", True))
    assert losses == pytest.approx(expected, rel=1e-2)
