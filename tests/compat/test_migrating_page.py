"""Each block of docs/migrating.md runs, in order, where a user has a script, a config, a model and a checkpoint."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.test_mii import _make_model
from tests.harness import run_ranks
from tests.repo.source import ROOT
from thalweg.compat.migrate import _packages, _ScriptReader

PAGE = (ROOT / "docs" / "migrating.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n([\s\S]*?)^```", PAGE, re.MULTILINE)
SCRIPT = """
import argparse, torch, deepspeed
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
model = torch.nn.Linear(4, 1)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
engine.backward(engine(torch.ones(2, 4)).sum())
engine.step()
open(f"ran{engine.global_rank}", "a").write("x")
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 2, "overlap_comm": True},
}
# The engine of the user who has the old checkpoint; the page has one of another model by then.
OLD_ENGINE = """
from tests.data.deepspeed.job import OddModel, param_groups
_model = OddModel()
_groups = param_groups(_model)
_config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"}}
engine, *_ = thalweg.initialize(model=_model, model_parameters=_groups, config=_config)
"""


@pytest.mark.nightly
def test_the_blocks_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    shutil.copytree(ROOT / "tests/data/deepspeed/stage2", tmp_path / "old_run")
    run_ranks(_make_model, 1, str(tmp_path / "my-model"))
    python = [body for language, body in BLOCKS if language == "python"]
    python.insert(1, OLD_ENGINE)
    (tmp_path / "page.py").write_text("\n".join(python) + "\nassert client_state['epoch'] == 7\n")
    startup = os.pathsep.join([str(ROOT), str(ROOT / "thalweg/compat/startup")])  # what an install's .pth file does
    environ = {**os.environ, "PYTHONPATH": startup, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("length\n")
    shell = [body for language, body in BLOCKS if language == "sh"]
    interpreter = shlex.quote(str(Path(sys.executable).parent))
    prelude = f'set -e\nthalweg() {{ {shlex.quote(sys.executable)} -m thalweg "$@"; }}\nPATH={interpreter}:"$PATH"\n'
    text = prelude + "\n".join(shell)
    done = subprocess.run(["sh", "-c", text], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "0.19.8\n" in done.stdout and "sound" in done.stdout
    assert (tmp_path / "ran0").read_text() == (tmp_path / "ran1").read_text() == "xx"
    assert (tmp_path / "exported" / "model.safetensors").exists()


def test_the_names_are_those_that_migrate_says(tmp_path: Path) -> None:
    rows = dict(re.findall(r"^\| `((?:deepspeed|mii)\.[\w.]+)` \| `(thalweg\.[\w.]+)` \|$", PAGE, re.MULTILINE))
    assert len(rows) > 8 and run_ranks(_look_up, 1, list(rows))[0] == rows


def _look_up(rank: int, world: int, names: list[str]) -> dict[str, str | None]:
    reader = _ScriptReader(_packages())
    return {name: reader._look_up(name)[0] for name in names}
