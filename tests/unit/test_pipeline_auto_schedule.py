"""Choosing a schedule and a cut by costs: measured ones, simulated, with a limit of memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dist.models import tiny_gpt
from tests.unit.infer_models import tiny_decoder
from thalweg.config import load_config
from thalweg.parallel.pipeline.partition import partition_balanced
from thalweg.parallel.pipeline.profile_blocks import profile_blocks, stage_costs
from thalweg.parallel.pipeline.schedules.auto_schedule import choose_schedule, rank_schedules


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 4), st.integers(1, 8))
def test_the_choice_is_the_best_of_what_is_allowed(ranks, micros):
    found = rank_schedules(ranks, micros, max_stages=2 * ranks)
    best = choose_schedule(found)
    assert best.seconds <= 1.02 * min(one.seconds for one in found)
    narrow = rank_schedules(ranks, micros, max_stages=ranks)
    assert {one.name for one in narrow} <= {"gpipe", "1f1b", "zb_h1"}
    equal = [one for one in found if one.seconds <= 1.02 * found[0].seconds]
    assert best.peak_in_flight == min(one.peak_in_flight for one in equal)


def test_a_cut_heeds_what_fits():
    costs = [1.0, 1.0, 1.0, 1.0, 4.0]
    assert partition_balanced(costs, 2) == [range(4), range(4, 5)]
    narrow = partition_balanced(costs, 2, fits=lambda stage, start, stop: stop - start <= 3)
    assert narrow == [range(3), range(3, 5)]
    with pytest.raises(ValueError, match="no cut into 2 stages fits"):
        partition_balanced(costs, 2, fits=lambda stage, start, stop: stop - start <= 2)


@pytest.mark.alone
def test_measured_costs_find_the_slow_block():
    model = tiny_gpt()

    class Slow(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            for _ in range(30):
                y = self.inner(x)
            return y

    model.blocks[0] = Slow(model.blocks[0])
    tokens = torch.ones(2, 12, dtype=torch.long)
    parts = profile_blocks(model, "blocks", {"tokens_BT": tokens, "labels_BT": tokens})
    assert len(parts) == 3 and all(part.seconds > 0 and part.saved_bytes > 0 for part in parts)
    assert parts[0].forward > 5 * parts[1].forward
    assert parts[0].parameter_bytes == parts[1].parameter_bytes
    assert all(p.grad is None for p in model.parameters())
    cuts = partition_balanced([part.seconds for part in parts], 2, min_layers=1)
    assert cuts == [range(1), range(1, 3)]
    costs = stage_costs(parts, cuts)
    assert costs.action_cost("B", 0) == pytest.approx(parts[0].backward)


def test_a_model_with_a_cache_is_measured_and_partition_may_be_auto():
    """Its cache would grow from one repeat to the next, and its gradients reach into the last one's graph."""
    model, tokens = tiny_decoder("llama").train(), torch.arange(8)[None]
    costs = profile_blocks(model, "model.layers", {"input_ids": tokens, "labels": tokens})
    assert len(costs) == len(model.model.layers) and all(cost.forward > 0 for cost in costs)
    assert (
        load_config(
            {"train_batch_size": 2, "pipeline": {"stages": 2, "partition": "auto"}}, world_size=2
        ).pipeline.partition
        == "auto"
    )
