"""`deepspeed`, `ds_report`, `zero_to_fp32.py`, `ds_to_universal` by Thalweg, where that is asked for."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import run_ranks
from tests.repo.source import ROOT
from thalweg.cli import other_programs

DATA = ROOT / "tests" / "data" / "deepspeed"


def _shell(command: str, folder: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """What a person types after `eval "$(thalweg run --as-deepspeed)"`."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    line = f'eval "$({shlex.quote(sys.executable)} -m thalweg run --as-deepspeed)"; {command}'
    done = subprocess.run(["sh", "-c", line], env={**os.environ, "PYTHONPATH": path}, cwd=folder,
                          capture_output=True, text=True, timeout=240)  # fmt: skip
    assert not check or done.returncode == 0, done.stderr
    return done


@pytest.mark.nightly
def test_the_launcher_passes_the_local_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys, deepspeed\n"
        "open(f'out{os.environ[\"RANK\"]}', 'w').write(f'{deepspeed.__version__} {sys.argv[1:]}')\n"
    )
    command = "deepspeed --num_gpus 2 train.py --x 1 && deepspeed --no_local_rank train.py --y 2 && cat out0"
    done = _shell(command, tmp_path)
    assert (tmp_path / "out1").read_text() == "0.19.8 ['--local_rank=1', '--x', '1']"
    assert done.stdout == "0.19.8 ['--y', '2']"


@pytest.mark.nightly
def test_zero_to_fp32_and_ds_to_universal(tmp_path: Path) -> None:
    """On a folder that DeepSpeed wrote; the copy under a new name loads under it."""
    from safetensors.torch import load_file

    source = DATA / "stage3" / "global_step3"
    done = _shell(
        f"zero_to_fp32.py {DATA / 'stage3'} out -t global_step3 && zero_to_fp32.py {DATA / 'stage3'} file/model.bin && "
        f"ds_to_universal --input_folder {source} --output_folder copies/step3_universal && "
        f"python3 -m deepspeed.utils.zero_to_fp32 copies/step3_universal again",
        tmp_path,
    )
    assert "sound" in done.stdout and (tmp_path / "copies/latest_universal").read_text() == "step3_universal"
    first, second, third = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "file", "again"))
    assert first.keys() == second.keys() == third.keys() and "up.weight" in first
    assert all(first[name].equal(third[name]) and first[name].equal(second[name]) for name in first)
    done = _shell(f"ds_to_universal --input_folder {source} --output_folder copies/step3_universal", tmp_path, False)
    assert done.returncode != 0 and "exists: remove it" in done.stderr


def test_they_are_not_there_unless_asked_for() -> None:
    """No command that an install adds has a name of DeepSpeed's: beside a real one, its own stay."""
    import tomllib

    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert list(scripts) == ["thalweg"]


@pytest.mark.parametrize(
    ("program", "given", "ours"),
    [
        ("deepspeed", "--num_gpus 2 t.py --x", "run --as-deepspeed --local-rank --num_gpus 2 t.py --x"),
        ("ds_report", "--hide_errors_and_warnings", "doctor"),
        ("zero_to_fp32.py", "a b", "ckpt export a b --dtype fp32 --max-shard-bytes 5000000000.0"),
        ("zero_to_fp32.py", "a b.bin -t x --max_shard_size 2MB",
         "ckpt export a . --dtype fp32 --max-shard-bytes 2000000.0 --tag x"),
        ("deepspeed.env_report", "", "doctor"),
    ],
)  # fmt: skip
def test_what_a_program_runs(program: str, given: str, ours: str) -> None:
    assert other_programs._PROGRAMS[program](given.split()) == ours.split()


def test_frozen_parameters_are_left_out_where_a_checkpoint_is_saved(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        other_programs._PROGRAMS["zero_to_fp32.py"](["a", "b", "--exclude_frozen_parameters"])
    assert "save it with exclude_frozen_parameters=True" in capsys.readouterr().err


def test_the_variables_are_printed_for_a_shell(tmp_path: Path) -> None:
    done = _shell('command -v deepspeed; echo "$THALWEG_AS_DEEPSPEED"', tmp_path)
    program, variable = done.stdout.splitlines()
    assert Path(program) == ROOT / "thalweg/cli/bin/deepspeed" and variable == "1"


@pytest.mark.nightly
def test_ds_report_is_the_doctor(tmp_path: Path) -> None:
    done = _shell("ds_report --hide_operator_status", tmp_path)
    assert "two ranks over gloo" in done.stdout
    command = [sys.executable, "-m", "thalweg", "doctor", "--json"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = json.loads(subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120).stdout)
    assert all(check["name"] in done.stdout for check in found["checks"])


def _save(rank: int, world: int, folder: str) -> list[float]:
    """A checkpoint under the alias; the weights that it holds."""
    import importlib

    import torch

    import thalweg.compat.deepspeed  # noqa: F401

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2, bias=False)
    weights = model.weight.detach().flatten().tolist()
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}
    initialize = importlib.import_module("deepspeed").initialize
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.save_checkpoint(folder)
    return weights


@pytest.mark.nightly
def test_the_program_lies_beside_a_checkpoint(tmp_path: Path) -> None:
    """As DeepSpeed's users run it, in the folder; no variable is set there."""
    weights = run_ranks(_save, 2, str(tmp_path))[0]
    script = tmp_path / "zero_to_fp32.py"
    assert os.access(script, os.X_OK)
    command = [sys.executable, "zero_to_fp32.py", ".", "out"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    from safetensors.torch import load_file

    assert load_file(tmp_path / "out" / "model.safetensors")["weight"].flatten().tolist() == weights
