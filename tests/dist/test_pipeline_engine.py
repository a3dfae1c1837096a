"""``initialize`` with pipeline stages against one process: ZeRO, schedules, other axes, oddities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from tests.dist.pipeline_parity import LR, PipelineCase, PipelineResult, run_engine, run_plain
from tests.harness import run_ranks
from tests.marks import nightly

pytest.importorskip("transformers")
TOLERANCE = {"loss": 1e-5, "norm": 1e-5, "parameter": 1e-4}
STEPS = 20
AT_2 = [
    *(PipelineCase("layers", 2, stage=stage) for stage in range(4)),
    *(PipelineCase("gpt", 2, stage=stage, num_micro_batches=3) for stage in (1, 3)),
    *(PipelineCase("layers", 2, stage=stage, schedule="zb_h1") for stage in (1, 3)),
    PipelineCase("layers", 2, stage=2, schedule="gpipe"),
    PipelineCase("layers", 2, stage=2, schedule="zbv"),
    PipelineCase("layers", 2, stage=1, schedule="interleaved", num_micro_batches=3),
    PipelineCase("layers", 2, stage=3, schedule="dualpipev"),
    PipelineCase("llama", 2, stage=3, schedule="zb_h1"),
    PipelineCase("gpt2", 2, stage=2),
    PipelineCase("layers", 2, sizes=(4, 1, 3, 2)),
    PipelineCase("gpt", 2, sizes=(1, 5), extra={"activation_checkpointing": {"policy": "full"}}),
    PipelineCase("layers", 2, schedule="zb_h1", extra={"pipeline": {"stages": 2, "activation_checkpoint_interval": 1}}),
]
AT_4 = [
    *(PipelineCase("layers", 2, stage=stage, num_micro_batches=3) for stage in range(4)),
    *(PipelineCase("llama", 2, stage=stage, schedule="zb_h1") for stage in (1, 3)),
    *(PipelineCase("layers", 4, stage=stage, num_micro_batches=5) for stage in (0, 3)),
    PipelineCase("layers1", 4, stage=1),  # more stages than layers: one has no parameters
    PipelineCase("layers", 4, stage=2, schedule="zb_h1", num_micro_batches=6),
    PipelineCase("layers6", 4, stage=1, schedule="zbv"),
    PipelineCase("gpt", 2, stage=3, schedule="zb_h1", num_micro_batches=3),
]


@cache
def _plain(kind: str, micros: int, sizes: tuple[int, ...], lr: float = LR) -> PipelineResult:
    return run_plain(PipelineCase(kind, 1, num_micro_batches=micros, sizes=sizes), STEPS, lr)


def _run(rank: int, world: int, cases: list[PipelineCase]) -> list[PipelineResult]:
    return [run_engine(case, world, STEPS) for case in cases]


def check(
    world: int,
    cases: list[PipelineCase],
    run: Callable[..., list[PipelineResult]] = _run,
    device: str | None = None,
) -> None:
    results = run_ranks(run, world, cases, timeout=300.0, device=device)
    for number, case in enumerate(cases):
        plain = _plain(case.kind, case.num_micro_batches, case.sizes)
        covered: set[str] = set()
        for run in (found[number] for found in results):
            difference = run.max_differences(plain)
            assert all(difference[key] <= limit for key, limit in TOLERANCE.items()), (case, difference)
            covered |= run.parameters.keys()
        assert covered == plain.parameters.keys()


@pytest.mark.parametrize("every", [4, nightly(1)])
def test_row38_a_pipeline_with_any_stage_of_zero_equals_one_process(every):
    check(2, AT_2[::every])
    run = run_plain(AT_2[0], STEPS)
    wrong = run.max_differences(_plain("layers", 4, (4,), 1.005 * LR))
    assert wrong["loss"] > TOLERANCE["loss"] and wrong["parameter"] > TOLERANCE["parameter"]


# The gradient of a key's bias is a rounding error, of which a smaller eps would make whole steps.
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "ns_dtype": "fp32", "eps": 1e-5}}}
IN_BACKWARD = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}, "gradient_clipping": 0.0}
OPTIMIZERS = [
    *(PipelineCase(kind, 2, stage=1, num_micro_batches=2, extra=MUON) for kind in ("gpt", "llama", "layers untied")),
    PipelineCase("gpt", 2, num_micro_batches=1, extra=IN_BACKWARD),
]


def test_embeddings_and_heads_are_updated_alike_whatever_the_optimizer():
    """By Muon, not as hidden matrices on the last stage; on the host, not before tied weights have added up."""
    alone = run_ranks(_run, 1, [replace(case, pp=1) for case in OPTIMIZERS])[0]
    for found in run_ranks(_run, 2, OPTIMIZERS):
        for case, run, one in zip(OPTIMIZERS, found, alone, strict=True):
            difference = run.max_differences(one)
            assert all(difference[key] <= limit for key, limit in TOLERANCE.items()), (case, difference)


def test_weight_gradients_of_a_split_backward_are_reduced_over_data_ranks():
    """Below stage 3, where the gradient that a program sees is not the one that autograd fills."""
    check(4, [PipelineCase("layers", 2, stage=1, schedule="zb_h1", num_micro_batches=3)])


def test_a_stage_without_parameters_adds_nothing_to_the_norm_on_a_device():
    """Its zero is on the host, and the sum over stages is the device's library's: the others waited for ever."""
    check(3, [PipelineCase("layers1", 3, stage=1)], device="sim")


@pytest.mark.parametrize("every", [nightly(5), nightly(1)])
def test_pipelines_with_data_ranks(every):
    check(4, AT_4[::every])
