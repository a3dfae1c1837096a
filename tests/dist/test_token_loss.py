"""``token_weighted_loss``: ranks and micro-batches with different numbers of targets, against one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests import inspect
from tests.dist.parity import full_named
from tests.dist.pipeline_parity import PipelineCase, PipelineResult, run_engine, run_plain
from tests.dist.test_pipeline_engine import TOLERANCE
from tests.harness import run_ranks
from tests.marks import nightly

pytest.importorskip("transformers")
STEPS = 3
RAGGED: dict[str, Any] = {
    "lengths": (9, 12, 7),
    "batch_kinds": ("ragged", "plain", "ragged", "masked"),
    "sizes": (4, 4, 8),
    "extra": {"token_weighted_loss": True},
}
DISK = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
AT_4 = [
    PipelineCase("llama", 1, stage=0, num_micro_batches=1, **RAGGED),
    PipelineCase("llama", 1, stage=3, num_micro_batches=3, **RAGGED),
    PipelineCase("gpt", 1, tp=2, stage=2, num_micro_batches=2, **RAGGED),
    PipelineCase("llama", 1, sp=2, stage=1, num_micro_batches=3, **RAGGED),
    PipelineCase("gpt", 1, cp=2, stage=3, num_micro_batches=2, **RAGGED),
    PipelineCase("llama", 2, stage=1, num_micro_batches=3, **RAGGED),
    PipelineCase("gpt", 2, stage=3, schedule="zb_h1", num_micro_batches=4, **RAGGED),
    PipelineCase("layers with attention", 2, stage=2, schedule="interleaved", num_micro_batches=2, **RAGGED),
    PipelineCase("llama", 2, sp=2, stage=2, num_micro_batches=3, **RAGGED),
    PipelineCase("layers with attention", 2, cp=2, stage=3, schedule="gpipe", **RAGGED),
]
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}, "token_weighted_loss": True}

LOOPS = ("engine", "plain", "own loss", "in two", "evaluates")


def _loop(case: PipelineCase, world: int, how: str) -> PipelineResult:
    """A user's own loop over the engine, in one of five ways."""
    import thalweg

    engine, *_ = thalweg.initialize(model=case.model(), config=case.config(world))
    mesh = inspect.data_mesh(engine)
    data = case.micro_batches(mesh.get_local_rank(), mesh.size())
    norms = []

    def evaluate():
        with torch.no_grad():
            engine(*next(case.micro_batches()))

    for _ in range(STEPS):
        for item in (next(data) for _ in range(case.num_micro_batches)):
            if how == "own loss":
                logits, labels = engine(item[0]).float().flatten(0, 1), item[1].flatten().to(engine.device)
                loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
                count = int((labels != -100).sum())
                engine.backward(loss / max(1, count), num_items=count)
                engine.step()
                continue
            if how == "evaluates":
                evaluate()
            loss = engine(*item)
            if how == "evaluates":
                evaluate()
            if how == "plain":
                (loss / case.num_micro_batches).backward()
            elif how == "in two":
                engine.backward(0.25 * loss, retain_graph=True)
                engine.backward(0.75 * loss)
                engine.step()
            else:
                engine.backward(loss)
                engine.step()
        if how == "plain":
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        norms.append(engine.get_global_grad_norm())
    found = {name: p.tolist() for name, p in full_named(engine.module.named_parameters()).items()}
    engine.close()
    return PipelineResult([], norms, found)


def _run(
    rank: int, world: int, cases: list[PipelineCase], loops: list[PipelineCase]
) -> tuple[list[PipelineResult], list[list[PipelineResult]]]:
    whole = [run_engine(case, world, STEPS) for case in cases]
    return whole, [[_loop(case, world, how) for how in LOOPS] for case in loops]


def _worst(
    results: list[PipelineResult], plain: PipelineResult, keys: tuple[str, ...] = tuple(TOLERANCE)
) -> dict[str, float]:
    found = [run.max_differences(plain) for run in results]
    return {key: max(one[key] for one in found) for key in keys}


@pytest.mark.parametrize("every", [False, nightly(True)])
def test_all_ranks_and_micro_batches_together_equal_one_process(every):
    cases = AT_4 if every else [*AT_4[:3], *AT_4[5::3]]
    extras = [(micros, {**RAGGED["extra"], **more}) for micros, more in ((1, DISK), (3, {}))[: 1 + every]]
    loops = [replace(AT_4[0], kind="gpt", num_micro_batches=micros, extra=extra) for micros, extra in extras]
    mean_of_means = replace(AT_4[1], extra={})
    half = replace(AT_4[2], extra=FP16)
    results = run_ranks(_run, 4, [*cases, mean_of_means, half], loops, timeout=240.0)
    plains = {}
    for number, case in enumerate(cases):
        key = (case.kind, case.num_micro_batches)
        plain = plains.setdefault(key, run_plain(case, STEPS))
        found = _worst([whole[number] for whole, _ in results], plain)
        assert all(found[key] <= limit for key, limit in TOLERANCE.items()), (case, found)
    plain = plains[AT_4[1].kind, AT_4[1].num_micro_batches]
    control = _worst([whole[len(cases)] for whole, _ in results], plain)
    assert not any(value <= 1e-3 for value in control.values()), control  # NaN where a rank has no target
    found = _worst([whole[len(cases) + 1] for whole, _ in results], plains["gpt", 2])
    assert found["loss"] < 5e-3 and found["parameter"] < 2e-2, found
    for number, case in enumerate(loops):
        plain = replace(run_plain(case, STEPS), losses=[])
        for index, how in enumerate(LOOPS):
            found = _worst([of[number][index] for _, of in results], plain, ("norm", "parameter"))
            assert all(value <= TOLERANCE[key] for key, value in found.items()), (case, how, found)


def _refusals(rank: int, world: int) -> list[str]:
    import thalweg

    case = PipelineCase("gpt", 1, num_micro_batches=1, extra={"token_weighted_loss": True})
    engine, *_ = thalweg.initialize(model=case.model(), config=case.config(world))
    item = next(case.micro_batches())
    said = []
    with pytest.raises(ValueError, match="num_items") as caught:
        engine.backward(engine(item[0]).float().mean())
    said.append(str(caught.value))
    engine.close()
    config = {**case.config(world), "gradient_allreduce_op": "sum"}
    with pytest.raises(ValueError, match="token_weighted_loss") as caught:
        thalweg.initialize(model=case.model(), config=config)
    return [*said, str(caught.value)]


def test_losses_that_nobody_counted_are_refused():
    assert len(run_ranks(_refusals, 1)[0]) == 2
