"""The analyser: an index that a map in any number of pieces gives alike, and that a stopped one goes on with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from thalweg.data import data_analyzer
from thalweg.data.data_analyzer import DataAnalyzer, DifficultyIndex, open_sample_metric

SIZE = 250


@pytest.fixture(autouse=True, scope="module")
def _few_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_analyzer, "_MAX_PARTS", 40)  # of 7 samples each
        yield


class Texts(Dataset):
    """Sample i has (7 i) mod 50 + 1 words; counts how many were read."""

    def __init__(self) -> None:
        self.num_read = 0

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.num_read += 1
        return {"length": torch.tensor(7 * index % 50 + 1), "words": torch.tensor([index % 3, 7 * index % 5])}


def _count_words(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.bincount(batch["words"].flatten(), minlength=5)


def _analyzer(path: Path, **options: Any) -> DataAnalyzer:
    defaults: dict[str, Any] = {
        "dataset": Texts(),
        "metric_names": ["seqlen", "words"],
        "metric_functions": [lambda batch: batch["length"], _count_words],
        "metric_types": ["single_value_per_sample", "accumulate_value_over_samples"],
        "metric_dtypes": [np.uint16, torch.int64],
        "batch_size": 2,
        "save_path": path,
    }
    return DataAnalyzer(**{**defaults, **options})


def _read(path: Path) -> dict[str, np.ndarray]:
    return {file.name: np.load(file, allow_pickle=False) for file in sorted(path.glob("*/*.npy"))}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, _few_parts: None) -> Path:
    path = tmp_path_factory.mktemp("whole")
    _analyzer(path).run_map_reduce()
    return path


def test_the_index_is_the_samples_by_value_and_counts_are_added_up(whole: Path) -> None:
    lengths = 7 * np.arange(SIZE) % 50 + 1
    found = _read(whole)
    assert found["seqlen_sample_to_metric.npy"].dtype == np.uint16
    assert np.array_equal(open_sample_metric(whole, "seqlen"), lengths)
    assert np.array_equal(found["seqlen_index_to_sample.npy"], np.argsort(lengths, kind="stable"))
    assert np.array_equal(found["seqlen_index_to_metric.npy"], np.sort(lengths))
    words = np.concatenate([np.arange(SIZE) % 3, 7 * np.arange(SIZE) % 5])
    assert np.array_equal(found["words_metric_value.npy"], np.bincount(words, minlength=5))


def test_parts_of_an_earlier_run_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another function of the same name is nothing that a folder knows of."""
    for factor, told in ((1, False), (2, True)):
        caplog.clear()
        functions = [lambda batch, f=factor: f * batch["length"], _count_words]
        _analyzer(tmp_path, metric_functions=functions).run_map_reduce()
        assert (f"{tmp_path}: 36 of 36 parts are of an earlier run" in caplog.text) == told
        assert open_sample_metric(tmp_path, "seqlen")[0] == 1


def test_an_index_is_opened_by_the_names_of_deepspeed(whole: Path) -> None:
    base = f"{whole}/seqlen/seqlen_index_to"
    index = DifficultyIndex.open(f"{base}_sample", f"{base}_metric.npy")
    lengths = 7 * np.arange(SIZE) % 50 + 1
    assert isinstance(index.sample_ids, np.memmap)
    assert set(index.up_to_value(3)) == set(np.flatnonzero(lengths <= 3)) and len(index.up_to_value(0)) == 0
    assert len(index.up_to_fraction(1, 4)) == SIZE // 4 and len(index.up_to_fraction(9, 4)) == SIZE
    assert np.array_equal(DifficultyIndex.open(f"{base}_sample_percentile_merged").sample_ids, index.sample_ids)
    with pytest.raises(ValueError, match="run_map_reduce"):
        DifficultyIndex.open(f"{base}_nothing")


def test_workers_and_processes_give_the_index_of_one(whole: Path, tmp_path: Path) -> None:
    _analyzer(tmp_path, num_workers=2, worker_id=1).run_map()
    with pytest.raises(ValueError, match=r"parts are not in .*call run_map\(\) of workers \[0\]"):
        _analyzer(tmp_path, num_workers=2).run_reduce()
    _analyzer(tmp_path, num_workers=2, num_threads=2).run_map_reduce()
    ours, one = _read(tmp_path), _read(whole)
    assert ours.keys() == one.keys() and all(np.array_equal(ours[name], one[name]) for name in one)


def test_a_stopped_map_goes_on_where_it_was(whole: Path, tmp_path: Path) -> None:
    """What was computed is not computed again, also by another number of workers."""

    def fail_late(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if fail_late.calls == 70:  # type: ignore[attr-defined]
            raise KeyboardInterrupt
        fail_late.calls += 1  # type: ignore[attr-defined]
        return batch["length"]

    fail_late.calls = 0  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        _analyzer(tmp_path, metric_functions=[fail_late, _count_words]).run_map()
    assert not list(tmp_path.glob("*/parts/.*"))
    texts = Texts()
    _analyzer(tmp_path, dataset=texts, num_workers=2, worker_id=0).run_map()
    _analyzer(tmp_path, dataset=texts, num_workers=2, worker_id=1).run_map_reduce()
    _analyzer(tmp_path, dataset=texts).run_reduce()
    assert 0 < texts.num_read < SIZE - 70
    assert np.array_equal(_read(tmp_path)["seqlen_index_to_sample.npy"], _read(whole)["seqlen_index_to_sample.npy"])


def test_another_analysis_in_the_folder_and_wrong_metrics_are_refused(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds another analysis"):
        _analyzer(whole, metric_dtypes=[np.int32, np.int64]).run_map()
    with pytest.raises(ValueError, match="has 1 values: return one for each"):
        _analyzer(tmp_path / "a", metric_functions=[lambda batch: torch.ones(1), _count_words]).run_map()
    with pytest.raises(ValueError, match="uint16 cannot hold"):
        _analyzer(tmp_path / "b", metric_functions=[lambda batch: -batch["length"], _count_words]).run_map()
    with pytest.raises(ValueError, match="of one length"):
        _analyzer(tmp_path, metric_types=["single_value_per_sample"])
