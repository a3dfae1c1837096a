"""Curricula: the pace, which samples a step meets, and sequences that are cut to it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import thalweg
from thalweg.config.schema.data import CurriculumMetric, CurriculumSchedule
from thalweg.data import DataAnalyzer
from thalweg.data.curriculum import Curriculum, CurriculumSampler
from thalweg.data.loader import StatefulLoader
from thalweg.nn.curriculum import CurriculumScheduler, truncate_sequences

SIZE = 96
LENGTHS = np.random.default_rng(3).permutation(SIZE) // 4 + 1  # 24 values, four samples each


def _linear(low: int, high: int, steps: int, multiple: int = 1) -> dict[str, Any]:
    pace = {"total_curriculum_step": steps, "difficulty_step": multiple}
    return {"min_difficulty": low, "max_difficulty": high, "schedule_type": "fixed_linear", "schedule_config": pace}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (_linear(8, 64, 8, 8), {1: 8, 2: 16, 4: 32, 8: 64, 100: 64}),  # 8 + 7 t, down to a multiple of 8
        (_linear(10, 64, 8, 8), {1: 16, 8: 64}),
        (
            {"min_difficulty": 0, "max_difficulty": 100, "schedule_type": "fixed_root",
             "schedule_config": {"total_curriculum_step": 100, "difficulty_step": 5, "root_degree": 2}},
            {1: 10, 25: 50, 81: 90, 100: 100},
        ),
        (
            {"min_difficulty": 1, "max_difficulty": 3, "schedule_type": "fixed_discrete",
             "schedule_config": {"difficulty": [1, 2, 3], "max_step": [5, 10]}},
            {1: 1, 5: 1, 6: 2, 10: 2, 11: 3},
        ),
    ],
)  # fmt: skip
def test_the_pace_is_that_of_its_formula(schedule: dict[str, Any], expected: dict[int, int]) -> None:
    scheduler = CurriculumScheduler(CurriculumSchedule.model_validate(schedule))
    assert {step: scheduler.get_difficulty(step) for step in expected} == expected


def test_a_difficulty_is_never_below_the_lowest() -> None:
    """10 rounded down to a multiple of 8 would be 8, and 5 nothing at all."""
    scheduler = CurriculumScheduler(CurriculumSchedule.model_validate(_linear(5, 64, 1000, 8)))
    assert scheduler.get_difficulty(1) == 5


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("index")
    analyzer = DataAnalyzer(
        TensorDataset(torch.from_numpy(LENGTHS)),
        metric_names=["size"],
        metric_functions=[lambda batch: batch[0]],
        batch_size=7,
        save_path=folder,
    )
    analyzer.run_map_reduce()
    return {f"index_to_{kind}_path": f"{folder}/size/size_index_to_{kind}" for kind in ("sample", "metric")}


def _curriculum(index: dict[str, str], batch: int, **metric: Any) -> Curriculum:
    metric = {**index, "clustering_type": "schedule_based", **_linear(6, 24, 10), **metric}
    return Curriculum({"size": CurriculumMetric.model_validate(metric)}, SIZE, batch, seed=7)


def test_a_step_meets_samples_that_are_easy_enough_and_every_one_once_a_round(index: dict[str, str]) -> None:
    curriculum = _curriculum(index, 8)
    ids = curriculum.take(0, 40 * 8)
    for step in range(1, 41):
        assert LENGTHS[ids[(step - 1) * 8 : step * 8]].max() <= curriculum.get_difficulties(step)["size"]
    assert LENGTHS[ids[:8]].max() <= 7 < LENGTHS[ids[-96:]].max()  # the control: later ones are harder
    assert Counter(ids[2 * SIZE : 3 * SIZE].tolist()) == Counter(range(SIZE))
    assert ids[2 * SIZE : 3 * SIZE].tolist() != ids[SIZE : 2 * SIZE].tolist()


def test_percentiles_are_parts_of_the_samples_in_order(index: dict[str, str]) -> None:
    curriculum = _curriculum(index, 8, difficulty_type="percentile", **_linear(25, 100, 3, 25))
    assert LENGTHS[curriculum.take(0, 8)].max() <= 12  # half of them at the first step
    assert curriculum.get_difficulties(3) == {"size": 100}
    assert set(curriculum.take(2 * SIZE, 3 * SIZE).tolist()) == set(range(SIZE))


def test_several_metrics_ask_for_samples_that_are_easy_by_each(index: dict[str, str]) -> None:
    by_value, by_part = (
        CurriculumMetric.model_validate({**index, "clustering_type": "schedule_based", **metric})
        for metric in (_linear(10, 24, 10), {"difficulty_type": "percentile", **_linear(10, 100, 90)})
    )
    both = Curriculum({"a": by_value, "b": by_part}, SIZE, 8, seed=0)
    assert both.get_difficulties(1) == {"a": 11, "b": 11}
    assert set(both.take(0, 8).tolist()) <= set(np.flatnonzero(LENGTHS <= 3).tolist())  # 11 of 100 of 96: ten samples


def test_too_hard_a_start_and_a_foreign_index_are_said(index: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="raise the curriculum's min_difficulty"):
        _curriculum(index, 8, **_linear(0, 24, 1000)).take(0, 8)
    metric = CurriculumMetric.model_validate({**index, "clustering_type": "schedule_based", **_linear(6, 24, 10)})
    with pytest.raises(ValueError, match="is of 96 samples, and training_data has 95"):
        Curriculum({"size": metric}, SIZE - 1, 8, seed=7)


def _loader(index: dict[str, str], rank: int, world: int, micro: int) -> StatefulLoader:
    curriculum = _curriculum(index, 12)
    sampler = CurriculumSampler(
        num_samples=SIZE * 3, batch_size=micro, rank=rank, world_size=world, seed=7, curriculum=curriculum
    )
    return StatefulLoader(TensorDataset(torch.arange(SIZE)), sampler)


def _ids(index: dict[str, str], world: int, micro: int, num_batches: int, state: Any = None) -> tuple[list[int], Any]:
    """The samples of all ranks in the order of the job, and where they end."""
    loaders = [_loader(index, rank, world, micro) for rank in range(world)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    streams = [iter(loader) for loader in loaders]
    ids = [i for _ in range(num_batches) for stream in streams for i in next(stream)[0].tolist()]
    assert len({str(loader.state_dict()) for loader in loaders}) == 1
    return ids, loaders[0].state_dict()


def test_a_run_goes_on_with_the_same_samples_at_another_world_size(index: dict[str, str]) -> None:
    whole, _ = _ids(index, 1, 12, 10)
    first, state = _ids(index, 2, 3, 7)  # 42 samples: within a global batch of 12
    second, state = _ids(index, 3, 2, 5, state)
    third, _ = _ids(index, 1, 6, 8, state)
    assert first + second + third == whole
    assert _ids(index, 3, 2, 5)[0] != second  # the control: without the state


class Tokens(nn.Module):
    """Remembers the shapes that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.seen: list[tuple[int, ...]] = []

    def forward(self, input_ids: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
        self.seen.append((*input_ids.shape, *mask.shape, *weights.shape))
        return (input_ids.float() * self.scale).mean()


class Told(Tokens):
    def forward(self, input_ids: Tensor, curriculum_seqlen: int = 0) -> Tensor:  # type: ignore[override]
        self.seen.append((input_ids.shape[1], curriculum_seqlen))
        return (input_ids.float() * self.scale).mean()


def _engine(model: nn.Module, **config: Any) -> Any:
    base = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    return thalweg.initialize(model=model, config={**base, **config})[0]


def test_training_sees_sequences_cut_to_the_pace_and_evaluation_whole_ones() -> None:
    model = Tokens()
    engine = _engine(model, curriculum_learning={"enabled": True, **_linear(4, 12, 4, 4)})
    batch = (torch.ones(2, 12, dtype=torch.long), torch.ones(2, 1, 12, 12), torch.ones(2))
    for _ in range(4):
        engine.backward(engine(*batch))
        engine.step()
    engine.eval()
    engine(*batch)
    lengths = [4, 8, 8, 12, 12]
    assert model.seen == [(2, n, 2, 1, n, n, 2) for n in lengths]


def test_a_model_that_takes_curriculum_seqlen_is_told_and_a_metric_called_seqlen_does_the_same() -> None:
    sampling = {"curriculum_learning": {"enabled": True, "curriculum_metrics": {"seqlen": _linear(4, 12, 4, 4)}}}
    efficiency = {"enabled": True, "data_sampling": {"enabled": True, **sampling}}
    model = Told()
    engine = _engine(model, data_efficiency=efficiency)
    engine.backward(engine(torch.ones(2, 12, dtype=torch.long)))
    assert model.seen == [(12, 4)]


def test_a_custom_schedule_is_a_function_of_the_step() -> None:
    model = Told()
    custom = {"min_difficulty": 1, "max_difficulty": 9, "schedule_type": "custom"}
    engine = _engine(model, curriculum_learning={"enabled": True, **custom})
    ids = torch.ones(2, 12, dtype=torch.long)
    with pytest.raises(ValueError, match="set_custom_curriculum_learning_schedule"):
        engine(ids)
    with pytest.raises(ValueError, match="no curriculum of the config is called length; there are: seqlen"):
        engine.set_custom_curriculum_learning_schedule({"length": lambda step: 1})
    engine.set_custom_curriculum_learning_schedule({"seqlen": lambda step: 5 * step})
    for _ in range(2):
        engine.backward(engine(ids))
        engine.step()
    assert model.seen == [(12, 5), (12, 10)]


def test_what_counts_no_tokens_is_not_cut() -> None:
    batch = {"input_ids": torch.zeros(6, 6, dtype=torch.long), "labels": torch.zeros(6), "positions": torch.arange(6)}
    assert [tuple(t.shape) for t in truncate_sequences(batch, 4).values()] == [(6, 4), (6,), (6,)]
    wide = {"input_ids": torch.zeros(2, 6, dtype=torch.long), "positions": torch.arange(6), "rest": torch.zeros(2, 5)}
    cut = truncate_sequences(wide, 4)
    assert [tuple(t.shape) for t in cut.values()] == [(2, 4), (4,), (2, 5)]
    assert cut["input_ids"].view(-1).shape == (8,)  # as BERT's loss does it
    with pytest.raises(ValueError, match="has none"):
        truncate_sequences({"pixels": torch.zeros(2, 3, 4, 4)}, 2)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"min_difficulty": None}, "min_difficulty"),
        ({"schedule_config": {"total_curriculum_step": 4}}, "schedule_config.difficulty_step"),
        ({"schedule_type": "fixed_root"}, "schedule_config.root_degree"),
        ({"clustering_type": "schedule_based"}, "index_to_sample_path"),
    ],
)
def test_what_a_curriculum_lacks_is_named(change: dict[str, Any], path: str) -> None:
    metrics = {"seqlen": {**_linear(4, 12, 4, 4), **change}}
    sampling = {"enabled": True, "curriculum_learning": {"enabled": True, "curriculum_metrics": metrics}}
    with pytest.raises(thalweg.config.errors.ConfigError) as caught:  # type: ignore[attr-defined]
        thalweg.load_config({"data_efficiency": {"enabled": True, "data_sampling": sampling}})
    assert f"data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.seqlen.{path}" in {
        problem.path for problem in caught.value.problems
    }
    thalweg.load_config({"data_efficiency": {"enabled": False, "data_sampling": sampling}})  # switched off: not asked
