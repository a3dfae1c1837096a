"""Pipelines with tensor and expert ranks against one process."""

from __future__ import annotations

import os

import pytest

from tests.dist.pipeline_parity import PipelineCase
from tests.dist.test_pipeline_engine import _run, check
from tests.marks import nightly

pytest.importorskip("transformers")
AT_4 = [
    *(PipelineCase("layers of experts", 2, stage=stage, num_micro_batches=2) for stage in (1, 3)),
    *(PipelineCase("llama", 2, tp=2, stage=stage, num_micro_batches=2) for stage in (0, 1, 3)),
    PipelineCase("gpt2", 2, tp=2, stage=2, num_micro_batches=2),
]
# Experts' gradients come to rest in rows of their own; a tied layer's weight is read outside of its forward pass.
SPLIT = [PipelineCase("layers of experts", 2, stage=stage, num_micro_batches=3, schedule="zb_h1") for stage in (1, 3)]
AT_8 = [PipelineCase("llama", 2, tp=2, stage=stage, num_micro_batches=2) for stage in (1, 3)]


@pytest.mark.parametrize("cases", [SPLIT[:1], nightly(SPLIT[1:])], ids=["stage 1", "stage 3"])
def test_a_split_backward_pass_reaches_experts(cases):
    check(4, cases)


def _over_links(rank, world, cases):
    os.environ["THALWEG_SHARED_MEMORY"] = "0"
    return _run(rank, world, cases)


@pytest.mark.parametrize("kind", ["layers", nightly("layers of experts")])
def test_a_tied_layer_where_parameters_are_gathered(kind):
    """Over links each unit is gathered for its own forward pass; in a host's memory all are there at any time."""
    check(4, [PipelineCase(kind, 2, stage=3, num_micro_batches=2)], _over_links)


@pytest.mark.nightly
@pytest.mark.parametrize("every", [2, nightly(1)])
def test_pipelines_with_tensor_and_expert_ranks(every):
    check(4, AT_4[::every])


@pytest.mark.nightly
def test_all_three_axes():
    check(8, AT_8)
