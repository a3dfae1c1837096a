"""``thalweg config`` as a user runs it: exit codes, streams, one JSON object, under a second, no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

GOOD = """{
  // a usual config
  "train_batch_size": 32,
  "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "allgather_bucket_size": 5e8},
  "bf16": {"enabled": true},
  "gradient_clipping": "auto",
}
"""
BAD = """{
  "train_batch_size": "32",
  "zero_optimizaton": {"stage": 3},
  "fp16": {"enabled": true, "enabled": false},
  "autotuning": {"enabled": true}
}
"""
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def thalweg(*args: str, text: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHERS} | variables
    command = [sys.executable, "-m", "thalweg", "config", *args]
    return subprocess.run(command, input=text, capture_output=True, text=True, env=environment, check=False, timeout=60)


@pytest.fixture
def good(tmp_path: Path) -> str:
    path = tmp_path / "ds_config.json"
    path.write_text(GOOD)
    return str(path)


@pytest.fixture
def bad(tmp_path: Path) -> str:
    path = tmp_path / "bad.json"
    path.write_text(BAD)
    return str(path)


def test_a_good_config_is_printed_resolved(good: str) -> None:
    done = thalweg(good, "--world-size", "4")
    assert done.returncode == 0
    assert not done.stderr
    assert "train_micro_batch_size_per_gpu = 8" in done.stdout
    assert "stage = 3" in done.stdout
    assert "accepted, no effect" in done.stdout
    assert done.stdout.count("zero_optimization.allgather_bucket_size = 500000000") == 1


def test_json_is_one_object_that_loads_again(good: str) -> None:
    done = thalweg(good, "--world-size", "4", "--json")
    tree = json.loads(done.stdout)
    assert done.returncode == 0
    assert not done.stderr
    assert tree["train_micro_batch_size_per_gpu"] == 8
    assert tree["gradient_accumulation_steps"] == 1
    assert tree["gradient_clipping"] == 1.0
    assert tree["zero_optimization"]["stage"] == 3
    again = thalweg("-", "--world-size", "4", "--json", text=done.stdout)
    assert json.loads(again.stdout) == tree


def test_all_problems_on_standard_error_and_exit_2(bad: str) -> None:
    for flags in ((), ("--json",)):
        done = thalweg(bad, *flags)
        assert done.returncode == 2
        assert not done.stdout
        assert "4 problems" in done.stderr
        assert 'train_batch_size (line 2) = "32": expected a whole number' in done.stderr
        assert "zero_optimizaton (line 3)" in done.stderr
        assert "did you mean zero_optimization?" in done.stderr
        assert "on lines 4 and 4" in done.stderr
        assert "not built yet: autotuning.enabled (line 5) = true" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_mismatch_names_the_launcher_and_the_flag() -> None:
    text = '{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}'
    done = thalweg("-", text=text)
    assert done.returncode == 2
    assert "4 x 2 x 1 = 8" in done.stderr
    assert "WORLD_SIZE" in done.stderr
    assert "--world-size" in done.stderr
    assert thalweg("-", "--world-size", "4", text=text).returncode == 0


def test_the_launchers_world_size_is_used(good: str) -> None:
    done = thalweg(good, "--json", RANK="0", WORLD_SIZE="8", LOCAL_RANK="0", LOCAL_WORLD_SIZE="8")
    assert json.loads(done.stdout)["train_micro_batch_size_per_gpu"] == 4


@pytest.mark.parametrize(
    "arguments", [(), ("missing.json",), ("{}", "--world-size", "0"), ("{}", "--worldsize", "2"), (".",)]
)
def test_wrong_use(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = thalweg(*arguments)
    assert done.returncode == 2
    assert done.stderr.strip()
    assert not done.stdout
    assert "Traceback" not in done.stderr


def test_help_has_an_example() -> None:
    done = thalweg("--help")
    assert done.returncode == 0
    assert "thalweg config ds_config.json --world-size 8" in done.stdout


def test_under_a_second_of_work_and_without_torch(good: str) -> None:
    code = (
        "import sys, time, thalweg.cli\n"
        f"thalweg.cli.main(['config', {good!r}, '--world-size', '4'])\n"
        "print('torch' in sys.modules, time.process_time())"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert time.perf_counter() - start < 10  # a busy machine stretches the clock; the work is what is held to 1 s
    torch_loaded, seconds = done.stdout.split()[-2:]
    assert torch_loaded == "False"
    assert float(seconds) < 1.0
