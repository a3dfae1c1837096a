"""`thalweg rlhf all` as a user calls it: two ranks, from a base model to one that an inference engine loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.source import ROOT
from tests.rlhf_support import make_base, make_data
from thalweg.infer import EngineConfig, load_engine

pytestmark = pytest.mark.nightly


def _rlhf(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    environ |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "thalweg", "rlhf", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, env=environ)


def test_all_of_it_in_one_command_and_again(tmp_path: Path) -> None:
    options = {
        "model_name_or_path": str(make_base(tmp_path / "base")), "data_path": str(make_data(tmp_path / "data.jsonl")),
        "output_dir": str(tmp_path / "out"), "zero_stage": 3, "per_device_train_batch_size": 2, "max_seq_len": 48,
        "max_answer_seq_len": 4, "per_device_generation_batch_size": 2, "num_train_steps": 2,
    }  # fmt: skip
    (tmp_path / "rlhf.json").write_text(json.dumps(options))
    done = _rlhf("all", "--config", str(tmp_path / "rlhf.json"), "--nproc", "2")
    assert done.returncode == 0, done.stderr
    model = Path(done.stdout.split()[-1])
    assert model == tmp_path / "out" / "ppo" / "model"
    assert (model.parent / "report.html").is_file()
    load_engine(model, EngineConfig(max_num_seqs=1, max_model_len=32)).close()
    again = _rlhf("all", "--config", str(tmp_path / "rlhf.json"), "--nproc", "2")
    assert again.returncode == 0 and again.stderr.count("is done") == 3, again.stderr


def test_wrong_use_is_one_paragraph_with_its_cure(tmp_path: Path) -> None:
    done = _rlhf("sft", "--output_dir", str(tmp_path), "--data_path", "x.jsonl")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "thalweg: sft has no model to begin with: set model_name_or_path"
