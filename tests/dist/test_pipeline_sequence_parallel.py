"""Ranks that share sequences within the stages of a pipeline, against one process.

With data, tensor and expert ranks besides: tests/dist/matrix.py.
"""

from __future__ import annotations

import pytest

from tests.dist.pipeline_parity import PipelineCase, PipelineResult, run_engine, run_plain
from tests.dist.test_pipeline_engine import TOLERANCE
from tests.harness import run_ranks
from tests.marks import nightly

pytest.importorskip("transformers")
STEPS = 3
REMAT = {"activation_checkpointing": {"policy": "full"}}
MIXED = {"lengths": (9, 12, 7, 11), "batch_kinds": ("padded", "plain", "packed", "masked"), "sizes": (2, 4, 3)}
AT_4 = [
    PipelineCase("llama", 2, sp=2, stage=3, **MIXED),
    PipelineCase("llama", 2, cp=2, stage=1, schedule="gpipe", extra=REMAT, **MIXED),
    PipelineCase("qwen3", 2, sp=2, stage=2, schedule="gpipe", **MIXED),
    PipelineCase("gpt2", 2, cp=2, stage=3, schedule="zb_h1", **MIXED),
    PipelineCase("gpt", 2, sp=2, stage=1, extra=REMAT, lengths=(9, 12, 7), batch_kinds=("plain", "masked")),
    PipelineCase("gpt", 2, cp=2, stage=2, schedule="zb_h1", lengths=(9, 12, 7), batch_kinds=("plain", "masked")),
    PipelineCase("layers with attention", 2, sp=2, stage=1, schedule="interleaved", num_micro_batches=2, **MIXED),
    PipelineCase("layers with attention", 2, cp=2, stage=3, schedule="zbv", **MIXED),
    PipelineCase("layers with attention", 2, cp=2, extra=REMAT, **MIXED),
]


def _run(rank: int, world: int, cases: list[PipelineCase]) -> list[PipelineResult]:
    return [run_engine(case, world, STEPS) for case in cases]


def _differences(world: int, cases: list[PipelineCase]) -> list[dict[str, float]]:
    """Of each case the largest of all ranks, which together have every parameter."""
    results, worst = run_ranks(_run, world, cases, timeout=240.0), []
    for number, case in enumerate(cases):
        plain, runs = run_plain(case, STEPS), [found[number] for found in results]
        assert set().union(*(run.parameters for run in runs)) == plain.parameters.keys(), case
        all_of = [run.max_differences(plain) for run in runs]
        worst.append({key: max(one[key] for one in all_of) for key in TOLERANCE})
    return worst


def check(world: int, cases: list[PipelineCase]) -> None:
    for case, found in zip(cases, _differences(world, cases), strict=True):
        assert all(found[key] <= limit for key, limit in TOLERANCE.items()), (case, found)


@pytest.mark.parametrize("every", [3, nightly(1)])
def test_parts_of_sequences_go_through_stages(every):
    check(4, AT_4[::every])
