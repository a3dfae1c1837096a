"""Makes the folders beside this file with DeepSpeed 0.19.8: ``DS_ACCELERATOR=cpu python -m tests.data.deepspeed.make``.

Each is saved by two gloo ranks after three steps, with the mean losses of the three that follow in ``losses.json``.
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

import torch
import torch.distributed as dist

from tests.data.deepspeed.job import ROWS, SAVED_AFTER, SCHEDULE, STEPS, OddModel, make_batch, param_groups

HERE, WORLD = Path(__file__).parent, 2
CASES = {
    "stage0": {"zero_optimization": {"stage": 0}},
    "stage1": {"zero_optimization": {"stage": 1}},
    "stage2": {"zero_optimization": {"stage": 2}},
    "stage2_elastic": {"zero_optimization": {"stage": 2, "elastic_checkpoint": True}},
    "stage3": {"zero_optimization": {"stage": 3, "sub_group_size": 60, "stage3_param_persistence_threshold": 0}},
    "stage1_bf16": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
}


def save(case: str, folder: Path) -> None:
    """One rank's part of a case."""
    model = OddModel()
    config = {
        "train_batch_size": ROWS,
        "train_micro_batch_size_per_gpu": ROWS // WORLD,
        "gradient_clipping": 0.0,
        "scheduler": {"type": "WarmupLR", "params": SCHEDULE},
        "zero_allow_untested_optimizer": True,
        **CASES[case],
    }
    groups = param_groups(model)
    if case == "stage0":
        groups = [{"params": [p for g in groups for p in g["params"]], "lr": 0.02}]
        config.pop("scheduler")
    optimizer = torch.optim.AdamW(groups, lr=0.02)
    engine, *_ = importlib.import_module("deepspeed").initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    for step in range(STEPS):
        if step == SAVED_AFTER:
            engine.save_checkpoint(str(folder), client_state={"epoch": 7, "note": (1, "x"), "table": torch.arange(3)})
        loss = engine(*make_batch(step, dist.get_rank(), WORLD))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / WORLD)
    if dist.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(losses[SAVED_AFTER:]) + "\n")
    dist.barrier()


def main() -> None:
    """Run both ranks of each case, as processes of their own."""
    if sys.argv[1:2] == ["--rank"]:
        save(sys.argv[2], Path(sys.argv[3]))
        return
    for port, case in enumerate(sys.argv[1:] or CASES, start=29610):
        folder = Path(tempfile.mkdtemp()) / case
        folder.mkdir()
        ranks = []
        for rank in range(WORLD):
            env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_SIZE": WORLD,
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
        for script in folder.glob("*.py"):
            script.unlink()
        shutil.rmtree(HERE / case, ignore_errors=True)
        shutil.copytree(folder, HERE / case)


if __name__ == "__main__":
    main()
