"""``token_weighted_loss``: ranks and micro-batches with different numbers of targets, against one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.dist.pipe_parity import Case, Run, run_engine, run_plain
from tests.dist.test_pipeline_engine import TOLERANCE
from tests.harness import run_ranks

pytest.importorskip("transformers")
STEPS = 3
RAGGED: dict[str, Any] = {
    "lengths": (9, 12, 7),
    "textures": ("ragged", "plain", "ragged", "masked"),
    "sizes": (4, 4, 8),
    "extra": {"token_weighted_loss": True},
}
AT_4 = [
    Case("llama", 1, stage=0, micros=1, **RAGGED),
    Case("llama", 1, stage=3, micros=3, **RAGGED),
    Case("gpt", 1, tp=2, stage=2, micros=2, **RAGGED),
    Case("llama", 1, sp=2, stage=1, micros=3, **RAGGED),
    Case("gpt", 1, cp=2, stage=3, micros=2, **RAGGED),
    Case("llama", 2, stage=1, micros=3, **RAGGED),
    Case("gpt", 2, stage=3, schedule="zb_h1", micros=4, **RAGGED),
    Case("layers with attention", 2, stage=2, schedule="interleaved", micros=2, **RAGGED),
    Case("llama", 2, sp=2, stage=2, micros=3, **RAGGED),
    Case("layers with attention", 2, cp=2, stage=3, schedule="gpipe", **RAGGED),
]


def _run(rank: int, world: int, cases: list[Case]) -> list[Run]:
    return [run_engine(case, world, STEPS) for case in cases]


def _worst(results: list[Run], plain: Run, keys: tuple[str, ...] = tuple(TOLERANCE)) -> dict[str, float]:
    found = [run.differences(plain) for run in results]
    return {key: max(one[key] for one in found) for key in keys}


def test_all_ranks_and_micro_batches_together_equal_one_process():
    mean_of_means = replace(AT_4[1], extra={})
    results = run_ranks(_run, 4, [*AT_4, mean_of_means], timeout=240.0)
    plains = {}
    for number, case in enumerate(AT_4):
        key = (case.kind, case.micros)
        plain = plains.setdefault(key, run_plain(case, STEPS))
        found = _worst([whole[number] for whole in results], plain)
        assert all(found[key] <= limit for key, limit in TOLERANCE.items()), (case, found)
    plain = plains[AT_4[1].kind, AT_4[1].micros]
    control = _worst([whole[len(AT_4)] for whole in results], plain)
    assert not any(value <= 1e-3 for value in control.values()), control  # NaN where a rank has no target


def _refusals(rank: int, world: int) -> list[str]:
    import thalweg

    case = Case("gpt", 1, micros=1, extra={"token_weighted_loss": True})
    engine, *_ = thalweg.initialize(model=case.model(), config=case.config(world))
    item = next(case.data())
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
