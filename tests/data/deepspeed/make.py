"""Makes the folders beside this file with DeepSpeed 0.19.8: ``DS_ACCELERATOR=cpu python -m tests.data.deepspeed.make``.

Each is saved by two gloo ranks (the pipeline and the experts by four) after three steps, with the mean losses of the
three that follow in ``losses.json``.  Universal folders are what
DeepSpeed's own ``ds_to_universal`` makes of those of a stage.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.data.deepspeed.job import ROWS, SAVED_AFTER, SCHEDULE, STEPS, OddModel, make_batch, param_groups
from tests.data.deepspeed.layouts import EXPERT_RANKS, MICRO_BATCHES, ExpertModel, micro_batches, pipeline_model

HERE = Path(__file__).parent
CASES = {
    "stage0": {"zero_optimization": {"stage": 0}},
    "stage1": {"zero_optimization": {"stage": 1}},
    "stage2": {"zero_optimization": {"stage": 2}},
    "stage2_elastic": {"zero_optimization": {"stage": 2, "elastic_checkpoint": True}},
    "stage3": {"zero_optimization": {"stage": 3, "sub_group_size": 60, "stage3_param_persistence_threshold": 0}},
    "stage1_bf16": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    "universal1": {"zero_optimization": {"stage": 1}},
    "universal3": {"zero_optimization": {"stage": 3, "sub_group_size": 60, "stage3_param_persistence_threshold": 0}},
    "pipeline": {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": MICRO_BATCHES},
    "moe": {"zero_optimization": {"stage": 2}},
    "moe_data_first": {"zero_optimization": {"stage": 2}, "use_data_before_expert_parallelism": True},
}
STAGES = 2


def world_of(case: str) -> int:
    """The ranks that save a case."""
    if case == "pipeline":
        return 2 * STAGES
    return 2 * EXPERT_RANKS if case.startswith("moe") else 2


def build(case: str, library: Any) -> tuple[torch.nn.Module, list[dict]]:
    """The model of a case and its parameter groups."""
    if case == "pipeline":
        library.init_distributed(dist_backend="gloo")
        model = pipeline_model(library, STAGES)
        return model, [{"params": list(model.parameters()), "lr": 0.02}]
    if case.startswith("moe"):
        library.init_distributed(dist_backend="gloo")
        model = ExpertModel(importlib.import_module("deepspeed.moe.layer").MoE)
        team = dist.get_rank() // 2 if case == "moe_data_first" else dist.get_rank() % EXPERT_RANKS
        draw = torch.Generator().manual_seed(7 + team)
        with torch.no_grad():  # DeepSpeed copies one expert; these are to differ
            for param in model.mixture.deepspeed_moe.experts.parameters():
                param.copy_(torch.randn(param.shape, generator=draw) * 0.4)
        split = importlib.import_module("deepspeed.moe.utils").split_params_into_different_moe_groups_for_optimizer
        return model, split({"params": list(model.parameters()), "lr": 0.02, "name": "all"})
    model = OddModel()
    groups = param_groups(model)
    if case == "stage0":
        groups = [{"params": [p for g in groups for p in g["params"]], "lr": 0.02}]
    return model, groups


def save(case: str, folder: Path) -> None:
    """One rank's part of a case."""
    library = importlib.import_module("deepspeed")
    model, groups = build(case, library)
    world = world_of(case)
    micro_steps = CASES[case].get("gradient_accumulation_steps", 1)
    data_ranks = world // STAGES if case == "pipeline" else world
    config = {
        "train_batch_size": ROWS,
        "train_micro_batch_size_per_gpu": ROWS // data_ranks // micro_steps,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        **CASES[case],
    }
    if isinstance(model, OddModel) and case != "stage0":
        config["scheduler"] = {"type": "WarmupLR", "params": SCHEDULE}
    optimizer = torch.optim.AdamW(groups, lr=0.02)
    engine, *_ = library.initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    for step in range(STEPS):
        if step == SAVED_AFTER:
            engine.save_checkpoint(str(folder), client_state={"epoch": 7, "note": (1, "x"), "table": torch.arange(3)})
        if case == "pipeline":
            rank = engine.grid.get_data_parallel_rank()
            mean = engine.train_batch(micro_batches(step, rank, data_ranks)).detach().float().clone()
        else:
            loss = engine(*make_batch(step, dist.get_rank(), world))
            engine.backward(loss)
            engine.step()
            mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
    if dist.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(losses[SAVED_AFTER:]) + "\n")
    dist.barrier()


def make_universal(folder: Path) -> None:
    """Replace the saved folder by what ``ds_to_universal`` makes of it."""
    (tag,) = (path for path in folder.iterdir() if path.is_dir())
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(tag), "--output_folder", f"{tag}_universal"]
    subprocess.run([*command, "--num_extract_workers", "1", "--num_merge_workers", "1"], check=True)
    shutil.rmtree(tag)
    (folder / "latest").write_text(f"{tag.name}_universal")


def main() -> None:
    """Run both ranks of each case, as processes of their own."""
    if sys.argv[1:2] == ["--rank"]:
        save(sys.argv[2], Path(sys.argv[3]))
        return
    for port, case in enumerate(sys.argv[1:] or CASES, start=29610):
        folder = Path(tempfile.mkdtemp()) / case
        folder.mkdir()
        ranks = []
        world = world_of(case)
        for rank in range(world):
            env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_SIZE": world,
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
            env = {**os.environ, **{key: str(value) for key, value in env.items()}}
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.data.deepspeed.make", "--rank", case, str(folder)], env=env
                )
            )
        codes = [process.wait() for process in ranks]
        if any(codes):
            raise SystemExit(f"{case} failed")
        if case.startswith("universal"):
            make_universal(folder)
        for script in folder.glob("*.py"):
            script.unlink()
        shutil.rmtree(HERE / case, ignore_errors=True)
        shutil.copytree(folder, HERE / case)


if __name__ == "__main__":
    main()
