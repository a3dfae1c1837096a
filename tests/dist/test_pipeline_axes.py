"""Pipelines with tensor and expert ranks against one process."""

from __future__ import annotations

import pytest

from tests.dist.pipe_parity import Case
from tests.dist.test_pipeline_engine import check

pytest.importorskip("transformers")
AT_4 = [
    *(Case("layers of experts", 2, stage=stage, micros=2) for stage in (1, 3)),
    *(Case("llama", 2, tp=2, stage=stage, micros=2) for stage in (0, 1, 3)),
    Case("gpt2", 2, tp=2, stage=2, micros=2),
]
AT_8 = [Case("llama", 2, tp=2, stage=stage, micros=2) for stage in (1, 3)]


def test_pipelines_with_tensor_and_expert_ranks():
    check(4, AT_4)


def test_all_three_axes():
    check(8, AT_8)
