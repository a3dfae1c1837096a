"""Models that nobody described, cut by the derived plan, against one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.dist.auto_plan_models import SHARDABLE_MODELS, build_model, make_batch
from tests.dist.tensor_parity import make_config, train_engine, train_plain
from tests.harness import run_ranks
from tests.marks import nightly

TOLERANCE = {"loss": 1e-5, "gradient": 1e-5, "parameter": 1e-5}


def _at(name, rows, own=slice(None)):
    """The loss of a model, or an engine, at a step."""

    def loss_at(model, step):
        inputs, targets = make_batch(name, step, rows)
        return model(inputs[own], targets[own])

    return loss_at


def _parity(rank: int, world: int, cases: list[tuple[str, int, int]], steps: int) -> list[str]:
    torch.set_num_threads(1)
    failures = []
    for name, tensor, stage in cases:
        ranks = world // tensor
        rows, own = 2 * ranks, slice(rank // tensor, None, ranks)
        plain = train_plain(build_model(name), _at(name, rows), steps)
        found = train_engine(build_model(name), make_config(stage, tensor, rows, ranks), _at(name, rows, own), steps)
        differences = found.max_differences(plain)
        if any(not value <= TOLERANCE[key] for key, value in differences.items()):
            failures.append(f"{name}, tp {tensor}, stage {stage}: {differences}")
    return failures


@pytest.mark.parametrize("every", [2, nightly(1)])
def test_made_up_architectures_equal_one_process_at_two_ranks(every):
    cases = [(name, 2, 0) for name in SHARDABLE_MODELS][::every]
    for failures in run_ranks(_parity, 2, cases, 5, timeout=200):
        assert failures == []


@pytest.mark.parametrize("steps", [nightly(3), nightly(20)])
def test_made_up_architectures_at_four_ranks_and_with_sharding(steps):
    cases = [
        ("parallel", 4, 0),
        ("interleaved", 4, 1),
        ("one matrix", 2, 3),
        ("convolved", 2, 2),
        ("gated", 4, 0),
    ]
    for failures in run_ranks(_parity, 4, cases, steps, timeout=200):
        assert failures == []


def _control(rank: int, world: int) -> tuple[float, str]:
    """A plan with two rows' ranks exchanged is refused by the check; without the check its result differs."""
    import thalweg
    import thalweg.parallel.tensor.auto_plan.infer_plan as derive

    torch.set_num_threads(1)
    harmless = derive._drop_failing

    def exchanged(model, seen, regions, world):
        return [replace(region, in_indices=tuple(reversed(region.in_indices))) for region in regions]

    derive._drop_failing = exchanged
    with pytest.raises(ValueError, match="differs from the unsharded model") as caught:
        thalweg.initialize(model=build_model("interleaved"), config=make_config(0, 2, 2, 1))
    derive._drop_failing = harmless
    plain = train_plain(build_model("gated"), _at("gated", 2), 2)
    other = train_engine(build_model("gated", seed=1), make_config(0, 2, 2, 1), _at("gated", 2), 2)
    return other.max_differences(plain)["parameter"], str(caught.value)


def test_a_wrong_plan_is_refused_and_other_weights_are_noticed():
    for difference, text in run_ranks(_control, 2):
        assert difference > 1e-3
        assert "the graph of LanguageModel's linear layers" in text


def _disagreeing(rank: int, world: int, kind: str) -> str:
    """Rank 1 leaves the last pair whole, or can run nothing."""
    import thalweg
    import thalweg.parallel.tensor.auto_plan.infer_plan as derive

    torch.set_num_threads(1)
    harmless = derive._drop_failing

    def pairs_of_rank(model, seen, pairs, world):
        if rank == 1 and kind == "raises":
            raise RuntimeError("out of memory")
        return harmless(model, seen, pairs, world)[: -1 if rank == 1 else None]

    derive._drop_failing = pairs_of_rank
    with pytest.raises(ValueError) as caught:
        thalweg.initialize(model=build_model("gated"), config=make_config(0, 2, 2, 1))
    return str(caught.value)


def test_ranks_that_find_other_plans_are_told_where_they_differ():
    texts = run_ranks(_disagreeing, 2, "differs", timeout=60)
    assert texts[0] == texts[1]
    assert "rank 1" in texts[0] and "blocks.1." in texts[0] and "rank 0" in texts[0]
    assert "set tensor_parallel.autotp_size to 1" in texts[0]


def test_a_rank_that_finds_no_plan_does_not_leave_the_others_waiting():
    texts = run_ranks(_disagreeing, 2, "raises", timeout=60)
    assert "running it shows none" in texts[1]
    assert "rank 1" in texts[0] and "running it shows none" in texts[0]


def _refused(rank: int, world: int) -> str:
    import thalweg

    model = build_model("softmax")
    del model.head
    model.head = torch.nn.Identity()
    with pytest.raises(ValueError, match="running it shows none") as caught:
        thalweg.initialize(model=model, config=make_config(0, 2, 2, 1))
    return str(caught.value)


def test_a_model_in_which_nothing_can_be_cut_is_refused():
    assert all("set tensor_parallel.autotp_size to 1" in text for text in run_ranks(_refused, 2))
