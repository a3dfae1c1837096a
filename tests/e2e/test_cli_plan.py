"""`thalweg plan` and `thalweg tune` as a user runs them."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from thalweg.cli import main
from thalweg.plan.inputs import model_loader

ROOT = Path(__file__).parents[2]
MODEL = {"vocab_size": 512, "n_layer": 2, "n_head": 4, "n_embd": 64, "block_size": 64}
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 2},
}


@pytest.fixture
def files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    return ["--model", str(tmp_path), "--config", str(tmp_path / "ds_config.json")]


def thalweg(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "thalweg", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=240)


@pytest.fixture
def called(capfd):
    """The command line in this process: what only reads its words need not import torch once more."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = main(list(arguments))
        return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    return call


def test_plan_prints_one_json_object_and_writes_a_page(files, tmp_path):
    page = tmp_path / "plan.html"
    gpus = ["--nodes", "2", "--devices-per-node", "4", "--device-memory", "80GiB"]
    done = thalweg("plan", *files, *gpus, "--html", str(page), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["world_size"] == 8
    assert found["fits"] is True
    assert found["per_rank"]["total"] > found["per_rank"]["parameters"] > 0
    assert found["traffic"]["links"]["between nodes"] > 0
    assert "<svg" in page.read_text()


def test_plan_draws_the_schedule_of_a_pipeline(called, tmp_path):
    picture = tmp_path / "schedule.svg"
    options = ["--stages", "4", "--micro-batches", "8"]
    done = called("plan", "--pipeline", str(picture), *options, "--schedule", "1f1b", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["bubble"] == pytest.approx(3 / 11, abs=1e-6)
    assert found["in_flight"] == [4, 3, 2, 1]
    assert found["bubbles"]["zbv"] < found["bubble"] / 2
    assert picture.read_text().startswith("<svg")
    done = called("plan", "--pipeline", *options, "--schedule", "auto")
    assert done.returncode == 0 and "rank 3:" in done.stdout and "no rank waits forever" in done.stdout
    done = called("plan", "--pipeline", *options, "--schedule", "2f2b")
    assert done.returncode == 2 and "zb_h1" in done.stderr


def test_plan_imports_without_the_garbage_collector(called, files, monkeypatch):
    """It walks what libraries leave again and again: half a second while they are imported, one as the program ends."""
    seen, at_exit = [], []
    monkeypatch.setattr("atexit.register", at_exit.append)
    build = model_loader._build_module

    def watched(fields):
        seen.append(gc.isenabled())
        return build(fields)

    monkeypatch.setattr(model_loader, "_build_module", watched)
    try:
        assert called("plan", *files, "--device", "h100").returncode == 0
        assert seen == [False] and gc.isenabled() and gc.freeze in at_exit
        assert called("plan", "--model", files[1] + "/none", "--device", "h100").returncode == 2
        assert gc.isenabled()  # after an error too
    finally:
        gc.unfreeze()


def test_plan_names_the_cure_of_wrong_use(called, files, tmp_path):
    done = called("plan", "--model", str(tmp_path / "none"), "--device", "h100")
    assert done.returncode == 2
    assert "config.json" in done.stderr
    done = called("plan", *files, "--device", "abacus")
    assert done.returncode == 2
    assert "h100" in done.stderr
    done = called("plan", *files, "--html", str(tmp_path / "none" / "plan.html"))
    assert done.returncode == 2 and "no folder" in done.stderr


def test_tune_says_before_it_measures_that_it_cannot_write(called, files, tmp_path):
    done = called("tune", *files, "--best", "3", "--output", str(tmp_path / "none" / "tuned.json"))
    assert done.returncode == 2
    assert "no folder" in done.stderr and "measuring" not in done.stderr


@pytest.mark.nightly
def test_tune_measures_the_best_and_writes_a_config(files, tmp_path):
    output = tmp_path / "tuned.json"
    done = thalweg("tune", *files, "--best", "1", "--output", str(output), "--json", "--sequence-length", "32")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["trials"][0]["seconds"] > 0
    assert found["trials"][0]["peak_bytes"] > 0
    tuned = json.loads(output.read_text())
    assert tuned == found["best"]
    batch = tuned["train_micro_batch_size_per_gpu"] * tuned["gradient_accumulation_steps"]
    assert batch == CONFIG["train_micro_batch_size_per_gpu"]
    assert "measuring 1 of 1" in done.stderr
