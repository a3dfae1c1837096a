"""`thalweg run --as-deepspeed`: a program as DeepSpeed's documentation shows it, unmodified."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.repo.source import ROOT

PROGRAM = """
    import argparse, json, os, subprocess, sys
    import torch
    import deepspeed
    from deepspeed.utils import logger

    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    deepspeed.init_distributed()

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    engine, optimizer, _, _ = deepspeed.initialize(args=args, model=net, model_parameters=parameters)
    draw = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(12):
        x = torch.randn(4, 8, generator=draw)[engine.global_rank * 2 : engine.global_rank * 2 + 2].to(engine.device)
        loss = torch.nn.functional.mse_loss(engine(x), x.sum(1, keepdim=True))
        engine.backward(loss)
        engine.step()
        deepspeed.comm.all_reduce(loss.detach_())
        losses.append(loss.item() / deepspeed.comm.get_world_size())
    weight = deepspeed.utils.safe_get_full_fp32_param(engine.module[0].weight)
    with deepspeed.zero.GatheredParameters(engine.module[0].weight):
        assert torch.equal(weight, engine.module[0].weight)
    child = subprocess.run([sys.executable, "-c", "import deepspeed; print(deepspeed.__version__)"],
                           capture_output=True, text=True)
    result = {"losses": losses, "norm": weight.norm().item(), "child": child.stdout, "name": deepspeed.__name__}
    with open(f"out{engine.global_rank}.json", "w") as file:
        json.dump(result, file)
"""


def _plain() -> tuple[list[float], float]:
    import torch

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.0)
    draw = torch.Generator().manual_seed(1)
    losses = []
    for number in range(12):
        x = torch.randn(4, 8, generator=draw)
        loss = torch.nn.functional.mse_loss(net(x), x.sum(1, keepdim=True))
        (loss / 2).backward()
        losses.append(loss.item())
        if number % 2:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # DeepSpeed's default where a config says nothing
            optimizer.step()
            optimizer.zero_grad()
    return losses, float(net[0].weight.detach().norm())


def test_a_program_of_the_documentation_runs_unmodified(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(PROGRAM))
    config = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "thalweg", "run", "--as-deepspeed", "--nproc", "2", "train.py"]
    command += ["--deepspeed", "--deepspeed_config", "ds_config.json"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    losses, norm = _plain()
    for rank in range(2):
        result = json.loads((tmp_path / f"out{rank}.json").read_text())
        assert max(abs(a - b) for a, b in zip(result["losses"], losses, strict=True)) < 1e-5
        assert abs(result["norm"] - norm) < 1e-5
        assert (result["child"], result["name"]) == ("0.19.8\n", "deepspeed")
