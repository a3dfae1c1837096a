"""The examples run as their first lines say, bare and under the launcher, and their losses fall."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import recipes
from tests.marks import nightly
from thalweg.config import load_config

ROOT = Path(__file__).parents[2]
BARE = [sys.executable]
TWO = [sys.executable, "-m", "thalweg", "run", "--nproc", "2"]


def losses_of(launcher: list[str], script: str, *arguments: str, cwd: Path) -> tuple[list[float], str]:
    launcher_keys = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    environ = {key: value for key, value in os.environ.items() if key not in launcher_keys}
    done = subprocess.run(
        [*launcher, str(ROOT / "examples" / script), *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environ,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(text) for text in re.findall(r"^step \d+: loss ([\d.]+)$", done.stdout, re.M)], done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "script", "arguments"),
    [
        nightly(TWO, "train_hf.py", ["--model", "llama"]),
        nightly(BARE, "train_hf.py", ["--model", "gpt2"]),
        nightly(TWO, "train_t5.py", []),
        nightly(TWO, "train_hf.py", ["--model", "gpt2"]),
        nightly(BARE, "train_hf.py", ["--model", "llama"]),
        nightly(BARE, "train_t5.py", []),
    ],
    ids=["llama-two ranks", "gpt2-bare", "t5-two ranks", "gpt2-two ranks", "llama-bare", "t5-bare"],
)
def test_hugging_face_models_learn(launcher, script, arguments, tmp_path):
    losses, _ = losses_of(launcher, script, *arguments, "--steps", "10", cwd=tmp_path)
    assert losses[0] > 6.4
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [nightly(BARE), nightly(TWO)], ids=["bare", "two ranks"])
def test_the_gpt_learns_and_leaves_a_checkpoint(launcher, tmp_path):
    losses, printed = losses_of(launcher, "train_gpt.py", "--steps", "10", "--stage", "2", cwd=tmp_path)
    assert 7 < losses[0] < 8.5
    assert losses[-1] < losses[0] - 0.5
    last = json.loads(printed.splitlines()[-1])
    assert last["stage"] == 2
    assert (tmp_path / last["checkpoint"]).is_dir()


HELP = """
import contextlib, runpy, sys
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    with contextlib.suppress(SystemExit):
        runpy.run_path(script, run_name="__main__")
    print("end of", script)
"""


@pytest.mark.nightly
def test_an_example_shows_its_own_command():
    scripts = sorted((ROOT / "examples").glob("train_*.py"))
    done = subprocess.run([sys.executable, "-c", HELP, *map(str, scripts)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for script in scripts:
        text, end, done.stdout = done.stdout.partition(f"end of {script}")
        assert end and f"examples/{script.name}" in text
        assert "--steps" in text


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_recipes_are_valid_configurations(stage, precision):
    config = load_config(recipes.zero(stage, precision=precision, accumulation=2, total_steps=50), world_size=2)
    assert config.zero_optimization.stage == stage
    assert config.train_batch_size == 16
    assert (config.bf16.enabled, config.fp16.enabled) == (precision == "bf16", precision == "fp16")
    assert load_config(recipes.zero3_bf16(), world_size=4).bf16.enabled
    assert load_config(recipes.demo(), world_size=2).zero_optimization.stage == 3


def test_the_examples_configuration_is_the_demos():
    example = load_config(ROOT / "examples" / "ds_config.json", world_size=2)
    demo = load_config(recipes.demo(), world_size=2)
    assert example.zero_optimization.stage == demo.zero_optimization.stage
    assert example.optimizer.type == demo.optimizer.type
