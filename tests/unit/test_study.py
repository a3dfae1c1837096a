"""``thalweg study``: its file, its datasets, its turns, its rows and its page."""

from __future__ import annotations

import importlib.util
import json
import math
import multiprocessing
import os
import re
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.marks import nightly
from tests.unit.infer_models import tiny_encoder
from thalweg.infer.models import build_decoder_spec
from thalweg.infer.models.spec import list_linears
from thalweg.infer.runners.packed_weights import packed_bytes
from thalweg.study import cell as cell_module
from thalweg.study import datasets as study_datasets
from thalweg.study import run as study_run
from thalweg.study import training as study_training
from thalweg.study.config import PRESETS, STUDIES, StudyConfig, StudyDataset, load_study
from thalweg.study.datasets import explore, load_rows, normalize
from thalweg.study.metrics import agreement, estimate, interval, log_ratios, score
from thalweg.study.prepare import describe_shape
from thalweg.study.report import write_report
from thalweg.study.results import collect
from thalweg.study.run import list_turns, run_study
from thalweg.study.schemas import SCHEMAS
from thalweg.study.techniques import HuggingFace, count_weight_bytes
from thalweg.utils.formatting import format_bytes

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 300, "max_position_embeddings": 512, "pad_token_id": 0,
    "initializer_range": 0.3,
}  # fmt: skip
T5 = {
    "model_type": "t5", "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 300,
    "tie_word_embeddings": False, "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


def study_of(**changes: Any) -> StudyConfig:
    """A study of 1 model, 1 dataset, 2 techniques; 2 rounds of 2 turns."""
    scitail = {"name": "SciTail", "path": "sample:scitail", "schema": "bigbio_te", "samples": 4, "batch_size": 2,
               "new_tokens": 4}  # fmt: skip
    return StudyConfig.model_validate({
        "name": "small", "rounds": 2, "turns": 2, "steps": 2, "models": [{"name": "llama", "config": LLAMA}],
        "datasets": [scitail], "techniques": ["hugging face", "thalweg"],
        "hardware": [{"name": "one", "threads": 1, "price_per_hour": 3.6}], **changes,
    })  # fmt: skip


def split_words(texts: list[str], **_: Any) -> dict[str, list[list[str]]]:
    """A tokenizer."""
    return {"input_ids": [text.split() for text in texts]}


# The file


def test_all_problems_of_a_study_are_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text("models: []\ndatasets: [{name: a, path: b, schema: nowhere}]\ntechniques: [faster]\nround: 2\n")
    with pytest.raises(ValueError) as error:
        load_study(file)
    for part in ("models: Tuple should have at least 1 item", "nowhere", "faster", "round:"):
        assert part in str(error.value)
    assert str(error.value).count("at least 1 item") == 1, "the faulty dataset is no empty list"


def test_studies_of_the_package_are_found_by_name_and_a_missing_one_is_not() -> None:
    assert {load_study(file.stem).name for file in STUDIES.glob("*.yaml")} >= {"report", "training", "finetuning"}
    with pytest.raises(FileNotFoundError, match="report"):
        load_study("repord")


def test_every_preset_is_a_technique() -> None:
    assert {one.name for one in study_of(techniques=list(PRESETS)).techniques} == set(PRESETS)


def test_a_model_without_a_type_and_a_template_that_does_not_parse_are_refused() -> None:
    scitail = {"name": "d", "path": "sample:scitail", "schema": "bigbio_te"}
    with pytest.raises(ValueError, match="needs model_type") as error:
        study_of(models=[{"name": "a", "config": {"hidden_size": 3}}], datasets=[{**scitail, "template": "{premise"}])
    assert "expected '}'" in str(error.value)


def test_names_that_would_share_a_folder_are_refused() -> None:
    twice = [{"name": "a b", "config": LLAMA}, {"name": "a-b", "config": LLAMA}]
    with pytest.raises(ValueError, match="twice"):
        study_of(models=twice)


# Datasets


def dataset_of(path: str | Path, schema: str) -> StudyDataset:
    return StudyDataset.model_validate({"name": "d", "path": str(path), "schema": schema})


# What a study's file says of each schema's dataset on the hub.
HUB = {
    "bigbio_te": ("bigbio/scitail", "scitail_bigbio_te", "test", "refs/convert/parquet"),
    "bigbio_t2t": ("bigbio/multi_xscience", "multi_xscience_bigbio_t2t", "test", "refs/convert/parquet"),
    "multi_xscience": ("multi_x_science_sum", None, "test", "refs/convert/parquet"),
    "squad": ("rajpurkar/squad", None, "validation", None),
    "translation": ("wmt/wmt16", "de-en", "test", None),
    **{x: ("nyu-mll/glue", x, "validation", None) for x in ("sst2", "cola", "stsb", "mrpc", "qqp", "qnli", "rte")},
    "mnli": ("nyu-mll/glue", "mnli", "validation_matched", "main"),
}  # fmt: skip


@pytest.mark.parametrize("schema", [name for name, one in SCHEMAS.items() if one.sample])
def test_a_name_on_the_hub_is_asked_for_as_the_study_says(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    name, subset, split, revision = HUB[schema]
    sample = load_rows(dataset_of(f"sample:{SCHEMAS[schema].sample}", schema))
    calls: list[tuple[Any, ...]] = []

    def load_dataset(*args: Any, **kwargs: Any) -> datasets.Dataset:
        calls.append((args, kwargs))
        return datasets.Dataset.from_list(sample)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    given = {"subset": subset, "split": split, "revision": revision}
    fields = {"name": "d", "path": name, "schema": schema, **{key: one for key, one in given.items() if one}}
    dataset = StudyDataset.model_validate(fields)
    rows = normalize(load_rows(dataset), dataset)
    assert calls == [((name, subset), {"split": split, "revision": revision})]
    assert rows == normalize(sample, dataset_of("sample:x", schema)), "columns of Arrow are read as the sample's"
    # The control: the columns of another dataset are not.
    other = "squad" if schema != "squad" else "sst2"
    with pytest.raises(ValueError, match="has no"):
        normalize(load_rows(dataset), dataset_of("", other))


@pytest.mark.parametrize("schema", [name for name, one in SCHEMAS.items() if one.sample])
def test_the_sample_of_a_schema_has_its_columns(schema: str) -> None:
    dataset = dataset_of(f"sample:{SCHEMAS[schema].sample}", schema)
    rows, num_skipped = normalize(load_rows(dataset), dataset)
    assert len(rows) >= 4 and num_skipped == 0
    assert all(row["input"].strip() and row["output"].strip() and row["references"] for row in rows)
    assert "{" not in rows[0]["input"]


def test_rows_become_inputs_and_outputs() -> None:
    mnli = dataset_of("", "mnli")
    rows, num_skipped = normalize(
        [
            {"premise": "A dog runs.", "hypothesis": "An animal moves.", "label": 0},
            {"premise": "A dog runs.", "hypothesis": "A cat runs.", "label": -1},  # hidden, in GLUE's test splits
            {"premise": "  ", "hypothesis": "A cat runs.", "label": 2},
            {"premise": None, "hypothesis": "A cat runs.", "label": 2},
        ],
        mnli,
    )
    assert num_skipped == 3
    assert rows[0]["output"] == "entailment"
    assert rows[0]["input"].startswith("Premise: A dog runs.\nHypothesis: An animal moves.")
    squad = {"context": "Bern is in Switzerland.", "question": "Where is Bern?"}
    answers = [{"text": ["Switzerland", "in Switzerland"], "answer_start": [11, 8]}, {"text": [], "answer_start": []}]
    rows, num_skipped = normalize([{**squad, "answers": one} for one in answers], dataset_of("", "squad"))
    assert rows[0]["references"] == ["Switzerland", "in Switzerland"]
    assert num_skipped == 1


def test_a_template_replaces_the_schemas() -> None:
    dataset = dataset_of("", "sst2").model_copy(update={"template": "Q: {sentence}"})
    assert normalize([{"sentence": "good", "label": 1}], dataset)[0][0]["input"] == "Q: good"


BAD_FILES = {
    "a column is missing": (b'{"premise": "a", "label": "neutral"}\n', "no 'hypothesis'"),
    "no row is left": (b'{"premise": "", "hypothesis": "b", "label": "neutral"}\n', "none of 1 rows"),
    "not UTF-8": (b'{"premise": "a"}\n{"premise": "\xe9"}\n', "line 2: not UTF-8"),
    "a line without end": (b'{"premise": "' + b"a" * (3 << 20), "line 1: over 1 MiB"),
    "no row at all": (b"", "has no row"),
    "zeros of a disk that was full": (bytes(4096), "has no row"),
    "damaged": (b'{"premise": "a", \n', "cannot be read"),
}


@pytest.mark.parametrize("fault", BAD_FILES)
def test_a_bad_file_is_a_reason(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, reason = BAD_FILES[fault]
    monkeypatch.setattr(study_datasets, "MAX_LINE_BYTES", 1 << 20)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content)
    dataset = dataset_of(file, "bigbio_te")
    with pytest.raises(ValueError, match=re.escape(reason)):
        normalize(load_rows(dataset), dataset)


def count_read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="no /proc counts what is read")
def test_a_line_of_a_gigabyte_is_a_reason_that_is_found_early(tmp_path: Path, quick: Any) -> None:
    quick({"hugging face": 4.0, "thalweg": 1.0})
    file = tmp_path / "huge.jsonl"
    with file.open("wb") as writer:
        writer.write(b'{"premise": "')
        writer.truncate(1 << 30)  # a hole: zeros that take no disk
    good = study_of().datasets[0].model_dump(by_alias=True)
    before = count_read_bytes()
    run_study(study_of(datasets=[{**good, "name": "huge", "path": str(file)}, good]), tmp_path / "out", lambda _: None)
    read = count_read_bytes() - before
    rows = collect(tmp_path / "out")["rows"]
    assert [row["status"] for row in rows] == ["failed", "failed", "ok", "ok"]
    assert "line 1: over 64 MiB; a row is to be one line" in rows[0]["reason"]
    assert 64 << 20 < read < 80 << 20, "the line is read as far as it may be long"


def test_the_standard_library_is_rows_of_text() -> None:
    dataset = dataset_of("stdlib", "input_output")
    rows, num_skipped = normalize(load_rows(dataset), dataset)
    assert len(rows) > 100 and num_skipped == 0
    by_name = {row["input"]: row["output"] for row in rows}
    assert by_name["# json/decoder.py\n"].startswith('"""Implementation of JSONDecoder')
    assert max(map(len, by_name.values())) == 4096


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "tsv"])
def test_a_local_file_gives_what_the_sample_gives(suffix: str, tmp_path: Path) -> None:
    rows = [{"sentence": "good, really", "label": 1}, {"sentence": "bad", "label": 0}]
    file = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        mark = {"csv": ",", "tsv": "\t"}[suffix]
        file.write_text(
            "".join(f"{a}{mark}{b}\n" for a, b in [("sentence", "label"), ('"good, really"', 1), ("bad", 0)])
        )
    dataset = dataset_of(file, "sst2")
    found = normalize(load_rows(dataset), dataset)[0]
    assert [row["output"] for row in found] == ["positive", "negative"]
    assert found[0]["input"].startswith("good, really")


def test_a_line_with_fields_too_many_does_not_shift_the_columns(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("premise,hypothesis,label\na,b,neutral,one,more\nc,d,entailment\n")
    dataset = dataset_of(file, "bigbio_te")
    rows = normalize(load_rows(dataset), dataset)[0]
    assert [(row["input"][:11], row["output"]) for row in rows] == [
        ("Premise: " + a + "\n", b) for a, b in (("a", "neutral"), ("c", "entailment"))
    ]


def test_labels_are_counted_and_texts_are_not() -> None:
    labels = [{"input": "a b c", "output": one} for one in ("yes", "no", "yes", "yes")]
    found = explore(labels, 1, {"words": split_words})
    assert found["labels"] == {"yes": 3, "no": 1}
    assert found["tokens"]["words"]["input"]["median"] == 3
    assert sum(found["tokens"]["words"]["input"]["histogram"]["counts"]) == 4
    texts = [{"input": "a", "output": f"text {i}"} for i in range(4)]
    assert explore(texts, 0, {})["labels"] == {}


# Metrics and statistics


def test_metrics_of_known_outputs() -> None:
    assert score(["accuracy"], ["Neutral.", "entailment"], [["neutral"], ["neutral"]]) == {"accuracy": 0.5}
    similar = score(["pearson"], ["1.0", "2 of 5", "x"], [["2.0"], ["4.0"], ["0.0"]])["pearson"]
    assert similar == pytest.approx(1.0)
    assert agreement([[1, 2], [3]], [[1, 2], [4]]) == 0.5


def test_metrics_by_torchmetrics() -> None:
    pytest.importorskip("torchmetrics", reason="pip install 'thalweg[study]'")
    references = [["the cat sat on the mat"], ["a dog"]]
    same, other = (
        score(["rouge1", "rouge2", "rougeL", "bleu", "exact_match", "f1"], outputs, references)
        for outputs in (["the cat sat on the mat", "a dog"], ["no", "no"])
    )
    assert all(value == pytest.approx(1.0) for key, value in same.items() if key != "bleu")
    assert all(value == pytest.approx(0.0, abs=1e-6) for value in other.values())
    assert score(["macro_f1"], ["a", "a", "b"], [["a"], ["b"], ["b"]])["macro_f1"] == pytest.approx(2 / 3)


def test_a_metric_without_its_library_is_none_and_others_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert score(["accuracy", "rougeL"], ["a"], [["a"]]) == {"accuracy": 1.0, "rougeL": None}


def test_an_interval_holds_the_median_and_a_ratio_its_pairs() -> None:
    middle, low, high = interval([[1.0, 1.1, 0.9], [1.2, 1.0, 1.1]])
    assert low is not None and high is not None and low < middle < high and middle == pytest.approx(math.sqrt(1.1))
    # The machine was three times as slow in the second round: pairs within a round do not see it.
    fast, slow = [[1.0, 1.01, 0.99], [3.0, 3.03, 2.97]], [[2.0, 2.02, 1.98], [6.0, 6.06, 5.94]]
    ratio, low, high = estimate(log_ratios(fast, slow))
    assert (ratio, low, high) == pytest.approx((2.0, 2.0, 2.0))
    # The control: rounds that are not paired do.
    assert (estimate(log_ratios(fast, slow[::-1]))[2] or 0) > 5


def test_one_round_has_the_interval_of_the_null_comparisons_alone() -> None:
    assert estimate([math.log(2.0)])[1:] == (None, None)
    ratio, low, high = estimate([math.log(2.0)], [0.1, -0.1, 0.1, -0.1])
    assert (ratio, low, high) == pytest.approx((2.0, 2 * math.exp(-0.2776), 2 * math.exp(0.2776)))
    # Rounds that agree by chance are no surer than the null comparisons; rounds that differ more are less sure.
    assert estimate([0.0, 0.0], [0.1, -0.1])[2] == pytest.approx(math.exp(0.4303 / math.sqrt(2)), rel=1e-3)
    assert estimate([0.0, 2.0], [0.1, -0.1])[2] == estimate([0.0, 2.0])[2]


def measure_null(generator: np.random.Generator, rounds: int) -> list[list[float]]:
    """Seconds of two techniques that take equally long, and of a third one between them, on a machine that drifts, has
    neighbours for a while and gives each process a speed of its own; by technique and round, a median of 3 turns."""
    ticks = rounds * 9
    slowness = np.cumsum(generator.normal(0, 0.02, ticks))
    tick = 0
    while (tick := tick + int(generator.exponential(25))) < ticks:
        length = 1 + int(generator.exponential(6))
        slowness[tick : tick + length] += generator.uniform(0.2, 1.2)
        tick += length
    turns = np.exp(slowness + np.abs(generator.normal(0, 0.05, ticks))).reshape(rounds, 3, 3)
    seconds = np.median(turns, axis=2) * np.exp(generator.normal(0, 0.03, (rounds, 3)))
    # The order rotates: in round r the technique at place p is (r + p) % 3.
    return [[float(seconds[r, (which - r) % 3]) for r in range(rounds)] for which in (0, 2)]


@pytest.mark.parametrize("rounds", [2, 3, 6])
def test_intervals_hold_the_truth_as_often_as_they_say(rounds: int) -> None:
    generator, held, held_by_spread = np.random.default_rng(rounds), 0, 0
    for _ in range(600):
        groups = [measure_null(generator, rounds) for _ in range(3)]
        logs = [log_ratios([[a] for a in ours], [[b] for b in other]) for ours, other in groups]
        _, low, high = estimate(logs[0], [one for other in logs[1:] for one in other])
        assert low is not None and high is not None
        held += low <= 1 <= high
        held_by_spread += min(logs[0]) <= 0 <= max(logs[0])
    assert held >= 0.94 * 600
    # The control: the extremes of the rounds, which a bootstrap of 3 rounds does not leave.
    assert rounds == 6 or held_by_spread < 0.85 * 600


# Turns


def test_cells_take_turns_and_the_baseline_comes_twice() -> None:
    turns = [(cell.technique.name, number) for _, cell, number in list_turns(study_of())]
    names = ["hugging face", "thalweg", "hugging face (null)"]
    assert turns == [(name, 0) for name in names] + [(name, 1) for name in (*names[1:], names[0])]


LOSSES = {
    "train pytorch": [9.0, 8.5, 8.0], "train thalweg stage 2": [9.0, 8.5, 8.0], "train thalweg bf16": [9.0, 8.54, 8.06],
    "train lora": [9.0, 8.9, 8.8], "train thalweg checkpointing": [9.0, 8.5, 8.0],
}  # fmt: skip


def fake_process(seconds: dict[str, float], failing: dict[str, str] | None = None) -> Any:
    """A stand-in for processes: writes what a cell would."""

    def run_process(function: Any, argument: str, log: Path, timeout: float, *_: Any, **__: Any) -> str:
        if function is study_run.prepare.main:
            function(argument)
            return "exit code 0"
        spec = json.loads(Path(argument).read_text())
        name = spec["technique"]["name"]
        log.write_text("its last words\n")
        if name in (failing or {}):
            return (failing or {})[name]
        time = seconds[name := name.removesuffix(" (null)")]
        if spec["task"] == "training":
            result = {
                "status": "ok", "turns": [{"seconds": time, "tokens": 16}] * 2, "losses": LOSSES[name],
                "quality": {"last loss": LOSSES[name][-1]}, "plan": {}, "load_seconds": 1.0, "joules": None,
                "host_peak": 1e8 + 1e7 * time, "host_run_peak": 1e8, "host_imports": 5e7, "host_children_peak": 0,
                "device_peak": None, "disk": 0, "samples": 2, "batch_size": 2, "versions": {},
            }  # fmt: skip
            study_run.write_json(Path(spec["result"]), result)
            return "exit code 0"
        turn = {"seconds": time, "tokens": 16, "first_seconds": time / 4, "step_seconds": time / 8}
        result = {
            "status": "ok", "turns": [turn, turn], "outputs": [[1, 2], [3]] * 2,
            "quality": {"accuracy": 0.5, "f1": None},
            "load_seconds": 1.0, "host_peak": 2e8, "host_run_peak": 1e8, "host_imports": 5e7, "host_children_peak": 0,
            "device_peak": None, "disk": 0, "joules": None, "samples": 4, "batch_size": 2, "versions": {},
            "work": {
                "weight_bytes": time * 1e8, "cache_bytes": 0, "streamed_bytes": 0, "tier": "", "step_flop": 0,
                "runner": "",
                "first_flop": 0, "first_bytes": 0, "precision": "torch.float32",
                "speeds": {"memory": 1.6e9, "torch.float32": 1e9},
            },
        }  # fmt: skip
        study_run.write_json(Path(spec["result"]), result)
        return "exit code 0"

    return run_process


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Processes that take no time, models that are not there."""
    made = {"path": "", "random": True, "shape": {"parameters": 1}}
    monkeypatch.setattr(study_run.prepare, "_make_model", lambda *args: made)
    monkeypatch.setattr(study_run.prepare, "load_tokenizer", lambda path: split_words)
    return lambda *args: monkeypatch.setattr(study_run, "_run_process", fake_process(*args))


def test_rows_have_ratios_prices_and_a_recommendation(tmp_path: Path, quick: Any) -> None:
    quick({"hugging face": 4.0, "thalweg": 1.0})
    assert run_study(study_of(), tmp_path, lambda line: None) == {"processes": 6, "cells": 3, "failed": 0}
    found = collect(tmp_path)
    baseline, ours = found["rows"]
    assert ours["ratio"][0] == pytest.approx(4.0) and baseline["ratio"][0] == pytest.approx(1.0)
    assert ours["seconds_per_sample"][0] == pytest.approx(0.25)
    assert ours["cost_per_1000"] == pytest.approx(0.25)  # 1,000 samples of 0.25 s at 3.6 an hour
    assert "50% is neither" in ours["why"] and "4.00 times as long" in ours["why"]
    assert found["noise"][0]["ratio"][0] == pytest.approx(1.0)
    assert found["recommended"][0]["fastest"] == "thalweg"
    assert found["recommended"][0]["least_memory_config"] == {"kind": "hugging_face"}


def test_training_has_a_recommendation(tmp_path: Path, quick: Any) -> None:
    # LoRA is the fastest and takes the least memory, but learns something else; bf16 differs by rounding.
    seconds = {"train pytorch": 4.0, "train thalweg stage 2": 3.0, "train thalweg bf16": 2.0, "train lora": 0.5}
    quick({**seconds, "train thalweg checkpointing": 1.0, "hugging face": 1.0})
    study = study_of(techniques=[*seconds, "hugging face"])
    run_study(study, tmp_path, lambda line: None)
    inference, training = sorted(collect(tmp_path)["recommended"], key=lambda one: one["task"])
    assert inference["task"] == "inference" and inference["least_memory_config"] == {"kind": "hugging_face"}
    assert training["fastest"] == training["least_memory"] == "train thalweg bf16"
    assert training["ratio"][0] == pytest.approx(2.0)
    expected = {"kind": "thalweg_train", "config": {"bf16": {"enabled": True}}}
    assert training["config"] == training["least_memory_config"] == expected
    assert training["least_memory_bytes"] == 1.2e8
    write_report(tmp_path)
    lines = (tmp_path / "report.md").read_text().splitlines()
    assert (
        sum(f"training | train thalweg bf16 | 2.00 [2.00, 2.00] | {json.dumps(expected)}" in one for one in lines) == 1
    )


def test_what_is_not_faster_than_noise_is_not_recommended(tmp_path: Path, quick: Any) -> None:
    quick({"hugging face": 1.0, "thalweg": 1.0})
    run_study(study_of(), tmp_path, lambda line: None)
    assert collect(tmp_path)["recommended"][0]["fastest"] == "hugging face"


def test_outputs_that_do_not_depend_on_prompts_show_no_quality(tmp_path: Path, quick: Any) -> None:
    quick({"hugging face": 4.0, "thalweg": 1.0})
    run_study(study_of(), tmp_path, lambda line: None)
    for path in tmp_path.glob("cells/*/*/*/*/round-*.json"):
        result = json.loads(path.read_text())
        path.write_text(json.dumps({**result, "outputs": [[1, 2]] * 4}))
    found = collect(tmp_path)
    assert found["rows"][1]["equal_outputs"] == 1 and found["rows"][1]["different_outputs"] == 1
    assert found["recommended"][0]["fastest"] == "hugging face"


def test_a_failed_cell_is_a_row_with_the_reason(tmp_path: Path, quick: Any) -> None:
    quick({"hugging face": 4.0}, {"thalweg": "killed by SIGKILL"})
    assert run_study(study_of(), tmp_path, lambda line: None)["failed"] == 1
    row = collect(tmp_path)["rows"][1]
    assert row["status"] == "out of memory" and "SIGKILL; its last words" in row["reason"]
    write_report(tmp_path)
    assert "SIGKILL" in (tmp_path / "report.html").read_text()


def test_a_bad_dataset_fails_its_own_cells_alone(tmp_path: Path, quick: Any) -> None:
    quick({"hugging face": 4.0, "thalweg": 1.0})
    good = study_of().datasets[0].model_dump(by_alias=True)
    study = study_of(datasets=[{**good, "name": "bad", "path": "sample:sst2"}, good])
    run_study(study, tmp_path, lambda line: None)
    rows = collect(tmp_path)["rows"]
    assert [row["status"] for row in rows] == ["failed", "failed", "ok", "ok"]
    assert "no 'premise'" in rows[0]["reason"]


def test_a_study_that_was_stopped_goes_on_where_it_was(tmp_path: Path, quick: Any, monkeypatch: Any) -> None:
    quick({})
    process, calls = fake_process({"hugging face": 4.0, "thalweg": 1.0}), []

    def stopped(function: Any, argument: str, *args: Any, **kwargs: Any) -> str:
        calls.append(argument)
        if len(calls) == 4:  # the preparation, two cells, and then
            raise KeyboardInterrupt
        return process(function, argument, *args, **kwargs)

    monkeypatch.setattr(study_run, "_run_process", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_study(study_of(), tmp_path, lambda line: None)
    statuses = [row["status"] for row in collect(tmp_path)["rows"]]
    assert statuses == ["ok", "ok"] and collect(tmp_path)["noise"][0]["status"] == "not measured"
    assert run_study(study_of(), tmp_path, lambda line: None)["processes"] == 4
    assert run_study(study_of(), tmp_path, lambda line: None)["processes"] == 0
    with pytest.raises(ValueError, match="other turns"):
        run_study(study_of(turns=3), tmp_path, lambda line: None)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("do not touch")
    with pytest.raises(ValueError, match="not empty"):
        run_study(study_of(), tmp_path, lambda line: None)


def test_a_finished_study_becomes_a_run_of_the_results(
    tmp_path: Path, quick: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench_folder = Path(__file__).parents[2] / "bench"
    monkeypatch.syspath_prepend(str(bench_folder))
    found = importlib.util.spec_from_file_location("bench_study", bench_folder / "study.py")
    assert found is not None and found.loader is not None
    bench = importlib.util.module_from_spec(found)
    found.loader.exec_module(bench)
    monkeypatch.setattr(sys.modules["_report"], "ROOT", tmp_path)
    monkeypatch.setattr(
        bench, "load_study", lambda name: study_of(name=name, techniques=["hugging face", "thalweg", "thalweg int8"])
    )
    options = ["--folder", str(tmp_path / "out"), "--write", "--python", "thalweg=/another/python"]
    for seconds, name in ((1.0, "mine"), (1.0, "other"), (2.0, "mine")):
        quick({"hugging face": 4.0, "thalweg": seconds}, {"thalweg int8": "killed by SIGKILL"})
        shutil.rmtree(tmp_path / "out" / name, ignore_errors=True)
        assert bench.main([name, *options]) == 0
    spec = next(tmp_path.glob("out/mine/cells/one/llama/scitail/thalweg/spec.json"))
    assert json.loads(spec.read_text())["technique"]["python"] == "/another/python"
    written = json.loads((tmp_path / "results" / "study.json").read_text())
    assert [run["run"] for run in written["runs"]] == ["mine", "other"], "a second run is in the place of the first"
    ratios = {row["case"]: row["ratio"] for row in written["rows"]}
    assert ratios == {
        "mine, one, llama, SciTail, thalweg": 2.0, "mine, one, llama, SciTail, thalweg int8": None,
        "mine, one, llama, SciTail, inference again": 1.0, "other, one, llama, SciTail, thalweg": 4.0,
        "other, one, llama, SciTail, thalweg int8": None, "other, one, llama, SciTail, inference again": 1.0,
    }  # fmt: skip
    assert "SIGKILL" in next(row["note"] for row in written["rows"] if row["case"].endswith("int8"))
    assert torch.__version__.startswith(written["runs"][0]["machine"]["torch"]) and written["runs"][0]["date"]
    text = (tmp_path / "results" / "study.md").read_text()
    assert text.count("## Study: ") == 2 and "figures/" not in text and "### What to use" in text
    assert "What to use" in capsys.readouterr().out
    with pytest.raises(ValueError, match="mine has no technique vllm"):
        bench.main(["mine", "--python", "vllm=/python"])


# The page


def test_the_page_needs_no_network_and_the_texts_agree(tmp_path: Path, quick: Any) -> None:
    quick({"hugging face": 4.0, "thalweg": 1.0})
    run_study(study_of(), tmp_path, lambda line: None)
    write_report(tmp_path)
    page, text = ((tmp_path / f"report.{kind}").read_text() for kind in ("html", "md"))
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert page.count("<table>") == len(re.findall(r"^\| --- ", text, re.MULTILINE)) >= 7
    for part in ("llama (random)", "4.00", "entailment 9", "times as long", "baseline to itself", "No energy"):
        assert part in page and part in text
    figures = re.findall(r"\]\((figures/\w+\.svg)\)", text)
    assert len(figures) == page.count("<img ") >= 3
    assert all((tmp_path / name).read_bytes().lstrip().startswith(b"<?xml") for name in figures)


# Cells


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Cells without processes: what they measure is real, their memory is ours."""

    def run_process(function: Any, argument: str, log: Path, *_: Any, **variables: str) -> str:
        log.parent.mkdir(parents=True, exist_ok=True)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        function(argument)
        return "exit code 0"

    threads = torch.get_num_threads()
    monkeypatch.setattr(study_run, "_run_process", run_process)
    yield
    torch.set_num_threads(threads)


TASKS = [
    nightly("t5", ["hugging face", "thalweg", "thalweg zero-inference host", "thalweg stage 3 offload"]),
    nightly("llama", ["hugging face", "thalweg continuous batching", "thalweg zero-inference nvme"]),
    nightly("llama", ["hugging face", "thalweg tensor parallel 2"]),
    pytest.param("llama", ["hugging face", "thalweg"]),
]
WIDE = {**LLAMA, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.mark.parametrize(("model", "techniques"), TASKS)
def test_techniques_generate_what_the_baseline_generates(
    model: str, techniques: list[str], tmp_path: Path, in_process: Any
) -> None:
    study = study_of(
        rounds=1, turns=1, models=[{"name": model, "config": {"t5": T5, "llama": LLAMA}[model]}], techniques=techniques
    )
    run_study(study, tmp_path, lambda line: None)
    for row in collect(tmp_path)["rows"]:
        assert row["status"] == "ok", row["reason"]
        assert row["equal_outputs"] == 1
        assert row["host_run_peak"] > 0 and row["predicted"]["step_seconds"] > 0
    rounds = sorted(tmp_path.glob("cells/*/*/*/*/round-0.json"))
    outputs = [json.loads(path.read_text())["outputs"] for path in rounds]
    assert all(len(one) == 4 for one in outputs[0])
    assert len({tuple(one) for one in outputs[0]}) > 1, "prompts that all give the same show nothing"


@pytest.mark.nightly
def test_techniques_of_fewer_bits_run_and_their_tokens_may_differ(tmp_path: Path, in_process: Any) -> None:
    techniques = ["hugging face", "hugging face bf16", "thalweg bf16", "thalweg int8", "thalweg int4"]
    study = study_of(rounds=1, turns=1, models=[{"name": "llama", "config": WIDE}], techniques=techniques)
    run_study(study, tmp_path, lambda line: None)
    rows = collect(tmp_path)["rows"]
    assert [row["status"] for row in rows] == ["ok"] * 5, [row.get("reason") for row in rows]
    moved = [row["work"]["weight_bytes"] / rows[0]["work"]["weight_bytes"] for row in rows]
    assert moved == pytest.approx([1, 0.5, 0.5, 0.25, 0.5625 / 4])
    for row in rows:
        assert 0 <= row["equal_outputs"] <= 1 and row["tokens_per_second"] > 0


def bits_of_transformers() -> list[str]:
    return [name for name in ("bitsandbytes", "torchao") if importlib.util.find_spec(name)]


@pytest.mark.nightly
@pytest.mark.skipif(not bits_of_transformers(), reason="neither bitsandbytes nor torchao is installed")
def test_transformers_own_8_bits_are_a_technique(tmp_path: Path, in_process: Any) -> None:
    options = [{"dtype": "bfloat16", "quantization": one} for one in bits_of_transformers()]
    techniques = [{"name": one["quantization"], "kind": "hugging_face", "options": one} for one in options]
    study = study_of(
        rounds=1, turns=1, models=[{"name": "llama", "config": WIDE}], techniques=["hugging face", *techniques]
    )
    run_study(study, tmp_path, lambda line: None)
    for row in collect(tmp_path)["rows"]:
        assert row["status"] == "ok", row["reason"]


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_training_techniques_have_the_losses_of_plain_torch(
    num_micro_batches: int, tmp_path: Path, in_process: Any
) -> None:
    accumulation = {"gradient_accumulation_steps": num_micro_batches}
    faster = accumulation | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}}}
    techniques = [
        {"name": name, "kind": kind, "options": {"config": config}}
        for name, kind, config in (
            ("pytorch", "torch_train", accumulation),
            ("stage 2", "thalweg_train", accumulation | {"zero_optimization": {"stage": 2}}),
            ("another rate", "thalweg_train", faster),
        )
    ]
    study = study_of(rounds=1, techniques=techniques)
    run_study(study, tmp_path, lambda line: None)
    baseline, ours, other = collect(tmp_path)["rows"]
    assert ours["status"] == "ok", ours["reason"]
    assert ours["losses"] == pytest.approx(baseline["losses"], rel=1e-5)
    assert other["losses"][2] != pytest.approx(baseline["losses"][2], rel=1e-3)
    assert baseline["losses"][2] < baseline["losses"][0], "the first batch again, after two steps"
    assert ours["plan"]["bytes"] > 0 and "the plan says" in ours["why"]
    write_report(tmp_path)
    header = next(line for line in (tmp_path / "report.md").read_text().splitlines() if "samples/s" in line)
    assert "memory peak" in header and "plan: ms a step, a rank" in header


def test_an_encoder_s_prompts_are_padded_behind(tmp_path: Path) -> None:
    """BART counts positions from the left end: shorter prompts had others than alone."""
    model = tiny_encoder("bart", seed=2)
    model.generation_config.pad_token_id = 1
    model.save_pretrained(tmp_path)
    plain = HuggingFace({"model": {"path": str(tmp_path)}, "hardware": {"device": "cpu"}})
    prompts = [[(11 * i * i + 5 * n + 7) % 128 + 2 for i in range(n)] for n in (3, 15, 9)]
    alone = [plain.generate([prompt], 8).outputs[0] for prompt in prompts]
    assert plain.generate(prompts, 8).outputs == alone
    assert len({tuple(tokens) for tokens in alone}) > 1


def _run_cell(function: Any, argument: str, variables: dict[str, str], answers: Any) -> None:
    """A cell's process, which is forked from one that has computed nothing, as study's own are."""
    os.environ |= variables
    with suppress(BaseException):
        function(argument)
        answers.put([type(model).__name__ for model in study_training._never_freed])


@pytest.mark.nightly
def test_ranks_train_on_batches_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A cell keeps DDP until its process ends: freed before, its reducer might deadlock with gloo's threads.
    kept: list[str] = []

    def run_forked(function: Any, argument: str, log: Path, *_: Any, **variables: str) -> str:
        log.parent.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("forkserver")
        answers = context.SimpleQueue()
        child = context.Process(target=_run_cell, args=(function, argument, variables, answers))
        child.start()
        child.join()
        assert child.exitcode == 0
        kept.extend([] if answers.empty() else answers.get())
        return "exit code 0"

    monkeypatch.setattr(study_run, "_run_process", run_forked)
    hardware = [{"name": "one", "threads": 1}, {"name": "two", "threads": 1, "ranks": 2}]
    techniques = ["train pytorch", "train thalweg stage 2", "hugging face"]
    run_study(study_of(rounds=1, hardware=hardware, techniques=techniques), tmp_path, lambda line: None)
    rows = {(row["hardware"], row["technique"]): row for row in collect(tmp_path)["rows"]}
    baseline, ours = (rows["two", name] for name in techniques[:2])
    assert ours["status"] == baseline["status"] == "ok", (ours.get("reason"), baseline.get("reason"))
    assert ours["losses"] == pytest.approx(baseline["losses"], rel=1e-5), "rank 0's, by DDP and by the engine"
    # The control: after a step with the other rank's gradients the loss is not that of one rank.
    alone = rows["one", "train pytorch"]
    assert alone["losses"][0] == pytest.approx(baseline["losses"][0], rel=1e-5)
    assert alone["losses"][1] != pytest.approx(baseline["losses"][1], rel=1e-5)
    assert baseline["samples"] == 2 * alone["samples"]
    assert baseline["host_peak"] > 1.2 * alone["host_run_peak"], "the other rank's memory counts"
    refused = rows["two", "hugging face"]
    assert refused["status"] == "unsupported" and "tensor parallel" in refused["reason"]
    # The baseline runs twice: the null comparison's.
    assert kept == ["DistributedDataParallel"] * 2


_FORK = multiprocessing.get_context("fork")


def wait_as_rank(ready: Any) -> None:
    cell_module.end_with_parent()
    ready.send("here")
    time.sleep(60)


def start_a_rank(ready: Any) -> None:
    _FORK.Process(target=wait_as_rank, args=(ready,)).start()
    time.sleep(60)


def test_ranks_end_with_a_cell_that_is_killed() -> None:
    reader, writer = _FORK.Pipe(duplex=False)
    cell = _FORK.Process(target=start_a_rank, args=(writer,))
    cell.start()
    writer.close()
    assert reader.recv() == "here"
    cell.kill()
    # Nobody holds the other end any more.
    assert reader.poll(20), "the rank lives on"
    with pytest.raises(EOFError):
        reader.recv()


def test_machines_that_are_not_here_are_planned_and_marked_so(tmp_path: Path, in_process: Any) -> None:
    planned = {"device": "a100", "planned": True, "ranks": 2, "price_per_hour": 4, "currency": "EUR"}
    hardware = [{"name": name, "memory": memory, **planned} for name, memory in (("large", None), ("small", "1MiB"))]
    techniques = ["train thalweg bf16", "train thalweg checkpointing", "hugging face"]
    study = study_of(rounds=2, hardware=hardware, techniques=techniques)
    assert run_study(study, tmp_path, lambda line: None) == {"processes": 4, "cells": 4, "failed": 0}
    found = collect(tmp_path)
    assert found["rows"] == found["noise"] == [], "nothing was measured"
    assert [row["plan"]["fits"] for row in found["planned"]] == [True, True, False, False]
    first = found["planned"][0]
    assert first["samples"] == 4
    assert first["cost_per_1000"] == pytest.approx(1000 * first["plan"]["seconds"] / 4 * 4 / 3600)
    assert not list(tmp_path.glob("models/*/*.safetensors")), "a plan needs no weights"
    write_report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert f"{first['cost_per_1000']:.3g} EUR" in text and "USD" not in text
    assert "## Planned, not measured" in text and "no, 1 MiB" in text and "## Training" not in text


def test_a_model_that_cannot_fit_is_a_row(tmp_path: Path, in_process: Any) -> None:
    hardware = [{"name": "small", "memory": "64KiB"}, {"name": "large", "memory": "1GiB"}]
    study = study_of(rounds=1, turns=1, techniques=["hugging face"], hardware=hardware)
    run_study(study, tmp_path, lambda line: None)
    small, large = collect(tmp_path)["rows"]
    assert small["status"] == "out of memory" and "64 KiB of memory" in small["reason"]
    assert large["status"] == "ok"


def test_int8_fits_where_four_bytes_a_weight_do_not(tmp_path: Path, in_process: Any) -> None:
    config = {**LLAMA, "hidden_size": 256, "intermediate_size": 512, "dtype": "bfloat16", "tie_word_embeddings": False}
    study = study_of(
        rounds=1, turns=1, models=[{"name": "llama", "config": config}], hardware=[{"name": "a", "memory": "1.6MiB"}],
        techniques=["hugging face", "hugging face bf16", "thalweg int8"],
    )  # fmt: skip
    run_study(study, tmp_path, lambda line: None)
    plain, bf16, ours = collect(tmp_path)["rows"]
    shape = json.loads((tmp_path / "models" / "llama.json").read_text())["shape"]
    assert plain["status"] == bf16["status"] == "out of memory"
    assert f"{format_bytes(4 * shape['parameters'])} for weights" in plain["reason"]
    assert f"{format_bytes(2 * shape['parameters'])} for weights" in bf16["reason"]
    assert ours["status"] == "ok", ours["reason"]
    (file,) = tmp_path.glob("models/*/*.safetensors")
    assert file.stat().st_size < 2.1 * shape["parameters"], "random weights are made in the dtype of the config"


@pytest.mark.parametrize("tied", [False, True])
def test_planned_bytes_of_int8_are_those_that_are_packed(tied: bool) -> None:
    config = transformers.AutoConfig.for_model(
        "llama", hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4, vocab_size=1000,
        tie_word_embeddings=tied,
    )  # fmt: skip
    shape = describe_shape(config)
    spec = build_decoder_spec(transformers.AutoModelForCausalLM.from_config(config).eval())
    packed = sum(packed_bytes(one.out_features, one.in_features, "int8") for one in list_linears(spec))
    planned = count_weight_bytes({"quantization": "int8"}, shape)
    assert planned == pytest.approx(packed + 2 * spec.embed.numel(), rel=0.02)
    assert count_weight_bytes({}, shape) == 4 * shape["parameters"]
    assert planned < 0.6 * count_weight_bytes({"dtype": "bf16"}, shape) or tied


def test_the_shipped_7b_is_planned_by_a_byte_a_weight() -> None:
    study = load_study("llama2_7b")
    fields = dict(study.models[0].config or {})
    shape = describe_shape(transformers.AutoConfig.for_model(fields.pop("model_type"), **fields))
    assert shape["parameters"] == 6_738_415_616 and shape["itemsize"] == 2
    size = {one.name: count_weight_bytes(one.options, shape) / 1e9 for one in study.techniques}
    assert size["thalweg int8"] == pytest.approx(6.61 + 0.26, abs=0.02)
    assert size["hugging face bf16"] == pytest.approx(13.48, abs=0.01)
    assert size["hugging face"] == pytest.approx(26.95, abs=0.01)


def test_random_weights_that_cannot_fit_are_not_made(tmp_path: Path, in_process: Any) -> None:
    huge = {**LLAMA, "hidden_size": 1 << 16, "intermediate_size": 1 << 18, "num_hidden_layers": 100}
    models = [{"name": "huge", "config": huge}, {"name": "small", "config": LLAMA}]
    run_study(study_of(rounds=1, turns=1, techniques=["hugging face"], models=models), tmp_path, lambda line: None)
    row, small = collect(tmp_path)["rows"]
    assert row["status"] == "out of memory" and "for its random weights" in row["reason"]
    assert small["status"] == "ok"


def test_a_technique_whose_library_is_missing_is_unsupported(tmp_path: Path, in_process: Any) -> None:
    absent = {"name": "other", "kind": "zero3", "options": {"library": "not_a_library", "config": {}}}
    run_study(study_of(rounds=1, turns=1, techniques=["hugging face", absent]), tmp_path, lambda line: None)
    row = collect(tmp_path)["rows"][1]
    assert row["status"] == "unsupported" and "not_a_library is not installed" in row["reason"]


def test_a_library_of_8_bits_that_is_missing_is_unsupported(
    tmp_path: Path, in_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    missing = lambda name, *args: None if name in ("bitsandbytes", "torchao") else found(name, *args)
    monkeypatch.setattr("importlib.util.find_spec", missing)
    techniques = ["hugging face", "hugging face int8", "hugging face int8 torchao"]
    run_study(study_of(rounds=1, turns=1, techniques=techniques), tmp_path, lambda line: None)
    plain, *others = collect(tmp_path)["rows"]
    assert plain["status"] == "ok"
    for row, library in zip(others, ("bitsandbytes", "torchao"), strict=True):
        assert row["status"] == "unsupported" and f"{library} is not installed" in row["reason"]


def test_energy_of_devices_is_nvmls(monkeypatch: pytest.MonkeyPatch) -> None:
    millijoules = {"GPU-a": 5, "GPU-b": 7}
    nvml = SimpleNamespace(
        nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: millijoules[handle],
    )  # fmt: skip
    on_host = cell_module._energy_microjoules("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="ab"[index]))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    if on_host is None:
        assert cell_module._energy_microjoules("cuda") == 12_000
    else:
        assert cell_module._energy_microjoules("cuda") >= on_host + 12_000
    # A device that does not count, or no library: what the host says.
    nvml.nvmlDeviceGetTotalEnergyConsumption = None
    assert (cell_module._energy_microjoules("cuda") is None) == (on_host is None)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert (cell_module._energy_microjoules("cuda") is None) == (on_host is None)


def test_an_error_says_what_kind_it_is() -> None:
    torch_says = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
    assert cell_module.describe_failure(torch_says)["status"] == "out of memory"
    assert cell_module.describe_failure(RuntimeError("no"))["status"] == "failed"
