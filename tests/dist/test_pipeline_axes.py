"""Pipelines with tensor and expert ranks against one process."""

from __future__ import annotations

import pytest

from tests.dist.pipeline_parity import PipelineCase
from tests.dist.test_pipeline_engine import check
from tests.marks import nightly

pytest.importorskip("transformers")
AT_4 = [
    *(PipelineCase("layers of experts", 2, stage=stage, num_micro_batches=2) for stage in (1, 3)),
    *(PipelineCase("llama", 2, tp=2, stage=stage, num_micro_batches=2) for stage in (0, 1, 3)),
    PipelineCase("gpt2", 2, tp=2, stage=2, num_micro_batches=2),
]
AT_8 = [PipelineCase("llama", 2, tp=2, stage=stage, num_micro_batches=2) for stage in (1, 3)]


@pytest.mark.nightly
@pytest.mark.parametrize("every", [2, nightly(1)])
def test_pipelines_with_tensor_and_expert_ranks(every):
    check(4, AT_4[::every])


@pytest.mark.nightly
def test_all_three_axes():
    check(8, AT_8)
