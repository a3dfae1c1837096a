"""Programs of a DeepSpeed user's first day, unmodified under the alias: the numbers are those of plain PyTorch.

Each file of ``first_day/programs`` is a script.  It runs on two ranks at each stage, in the ranks' process, as
``thalweg run --as-deepspeed`` would start it, and leaves a ``report``; ``first_day/plain.py`` has a function of the
same name that computes the report without DeepSpeed.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.compat.first_day import plain
from tests.harness import run_ranks

REUSE_RANKS = True
PROGRAMS = Path(__file__).parent / "first_day" / "programs"
NAMES = sorted(path.stem for path in PROGRAMS.glob("*.py") if path.stem not in ("user_model", "__init__"))
# Programs without a model that a stage could change.
NO_STAGE = (
    "accelerator", "collectives", "inference", "inference_in_a_pipeline", "logging_calls", "memory_estimates",
    "on_device",
)  # fmt: skip
STAGES = {"pipeline": (0, 1), "cpu_offload": (1, 2, 3), "batch_keys": (1,), **dict.fromkeys(NO_STAGE, (1,))}
# A program of each kind, at the stage that asks most of it.
IN_GATE = {
    "plain_loop": 2, "command_line": 1, "accumulation": 3, "client_scheduler": 0, "checkpoints": 3, "safe_access": 3,
    "gathered_parameters": 2, "external_parameter": 3, "leaf_modules": 3, "pipeline": 1, "moe": 2, "gan": 1,
    "collectives": 1, "engine_facts": 3, "batch_size_change": 0, "flops_profiler": 3, "on_device": 1, "fp16": 3,
    "tensor_parallel": 0, "monitors": 0, "memory_estimates": 1, "plain_backward": 2, "own_windows": 1,
    "inference_in_a_pipeline": 1,
}  # fmt: skip
TOLERANCES = {"bf16": 3e-2, "sometimes_used": 3e-2, "fp16": 4e-3, "save_16bit_model": 3e-2}


def _run_program(rank: int, world: int, name: str, stages: tuple[int, ...], folder: str) -> list[dict[str, Any]]:
    import torch

    import thalweg.compat.deepspeed  # noqa: F401

    os.chdir(folder)
    sys.path.insert(0, str(PROGRAMS))
    from tests.compat.first_day.programs.user_model import config

    reports = []
    for stage in stages:
        os.environ["STAGE"] = str(stage)
        Path(f"ds_config{rank}.json").write_text(json.dumps(config()))
        arguments = ["--local_rank", str(rank), "--deepspeed", "--deepspeed_config", f"ds_config{rank}.json"]
        before, sys.argv = sys.argv, [f"{name}.py", *arguments]
        torch.manual_seed(rank)
        try:
            reports.append(runpy.run_path(str(PROGRAMS / f"{name}.py"), run_name="__main__")["report"])
        finally:
            sys.argv = before
    return reports


def _mean_losses(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """The ranks' common report; losses are of a rank's own rows."""
    first, *others = reports
    merged = dict(first)
    for key, value in first.items():
        if key.startswith("losses"):
            columns = zip(*(report[key] for report in reports), strict=True)
            merged[key] = [sum(column) / len(reports) for column in columns]
        else:
            assert all(report[key] == value for report in others), (key, reports)
    return merged


def _difference(ours: Any, expected: Any) -> float:
    """The largest difference of numbers; infinite where the shapes or other values differ."""
    if isinstance(expected, dict) and isinstance(ours, dict) and ours.keys() == expected.keys():
        return max((_difference(ours[key], expected[key]) for key in expected), default=0.0)
    if isinstance(expected, list | tuple) and isinstance(ours, list | tuple) and len(ours) == len(expected):
        return max((_difference(a, b) for a, b in zip(ours, expected, strict=True)), default=0.0)
    if isinstance(expected, float) and isinstance(ours, float | int):
        return abs(ours - expected) / max(1.0, abs(expected))
    return 0.0 if ours == expected else float("inf")


@pytest.mark.parametrize("name", IN_GATE)
def test_program_at_one_stage(name: str, tmp_path: Path) -> None:
    """Each at another stage; every program at every stage runs nightly."""
    _check(name, (IN_GATE[name],), tmp_path)


def _check(name: str, stages: tuple[int, ...], folder: Path) -> None:
    expected = getattr(plain, name)()
    for stage, reports in zip(
        stages, zip(*run_ranks(_run_program, 2, name, stages, str(folder)), strict=True), strict=True
    ):
        ours = _mean_losses(list(reports))
        assert _difference(ours, expected) < TOLERANCES.get(name, 2e-5), (stage, ours, expected)


def test_another_rate_is_seen() -> None:
    """The numbers of a program tell a learning rate from another."""
    for name in ("plain_loop", "accumulation", "zero_to_fp32", "safe_access"):
        before, plain.LR = plain.LR, 0.011
        try:
            other = getattr(plain, name)()
        finally:
            plain.LR = before
        assert _difference(other, getattr(plain, name)()) > 10 * TOLERANCES.get(name, 2e-5)


def test_the_same_names_without_the_alias() -> None:
    """What those programs call is below ``thalweg`` itself."""
    import torch.distributed

    import thalweg
    from thalweg.moe.layer import MoE
    from thalweg.moe.utils import is_moe_param

    for name in thalweg.__all__:
        assert getattr(thalweg, name) is not None
    for name in thalweg.zero.__all__:
        assert callable(getattr(thalweg.zero, name))
    assert thalweg.comm.all_reduce is torch.distributed.all_reduce and thalweg.moe.MoE is MoE
    assert callable(thalweg.checkpointing.checkpoint) and thalweg.moe.is_moe_param is is_moe_param
    with pytest.raises(AttributeError):
        _ = thalweg.comm.no_such_collective


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_program(name: str, tmp_path: Path) -> None:
    _check(name, STAGES.get(name, (0, 1, 2, 3)), tmp_path)
