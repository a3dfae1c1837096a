"""zero.Init and GatheredParameters with the engine: the same losses at each stage, also in a window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import thalweg
from tests.marks import nightly
from thalweg.nn.transformer import GPT, GPTConfig
from thalweg.zero.gathered_parameters import register_sharded_model

SHAPE = GPTConfig(vocab_size=96, n_layer=2, n_head=2, n_embd=32, block_size=16)


def _engine(stage: int, build: str, accumulation: int, low: bool) -> thalweg.Engine:
    torch.manual_seed(0)
    if build == "init":
        with thalweg.zero.Init():
            model = GPT(SHAPE)
    elif build == "meta":
        with torch.device("meta"):
            model = GPT(SHAPE)
    else:
        model = GPT(SHAPE)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "bf16": {"enabled": low},
        "cpu_kernels": "torch",
    }
    engine, *_ = thalweg.initialize(model=model, config=config)
    register_sharded_model(engine.module)
    return engine


def _train(rank: int, world: int, stage: int, build: str, accumulation: int, low: bool, change: bool) -> list[float]:
    engine = _engine(stage, build, accumulation, low)
    draw = torch.Generator().manual_seed(1)
    losses: list[float] = []
    for micro in range(6):
        tokens = torch.randint(0, 96, (1, 16), generator=draw)
        loss = engine(tokens, tokens)
        if micro == 3:  # in the middle of a window, between forward and backward
            with thalweg.zero.GatheredParameters(engine.module.parameters()):
                assert engine.module.wte.weight.shape == (96, 32)
        engine.backward(loss)
        losses.append(loss.item())
        if micro in (2, 4):  # in the middle of a window for accumulation 2, else before a step
            names = dict(engine.module.named_parameters())
            with thalweg.zero.GatheredParameters([names["wte.weight"], names["norm.bias"]], modifier_rank=world - 1):
                if change and rank == world - 1:
                    engine.module.wte.weight.data.mul_(1.3)
                    engine.module.norm.bias.data.fill_(0.1)
        engine.step()
        with torch.no_grad():
            losses.append(engine(tokens, tokens).item())
    full: dict[str, Tensor] = {}
    for name, param in engine.module.named_parameters():
        with thalweg.zero.GatheredParameters(param):
            full[name] = param.detach().clone()
    losses.append(sum(float(value.double().abs().sum()) for value in full.values()))
    engine.close()
    return losses


def _alone(rank: int, world: int, low: bool, accumulation: int) -> list[float]:
    return _train(rank, world, 0, "plain", accumulation, low, True)


BUILDS = ((0, "init"), (1, "plain"), (2, "meta"), (3, "init"))


def _builds(rank: int, world: int, low: bool, accumulation: int) -> list[list[float]]:
    """Losses of each stage and build, and of one whose parameters nobody changes."""
    found = [_train(rank, world, stage, build, accumulation, low, True) for stage, build in BUILDS]
    return [*found, _train(rank, world, 3, "init", accumulation, low, False)]


@pytest.mark.parametrize("accumulation", [nightly(1), 2])
@pytest.mark.parametrize("low", [nightly(False), True], ids=["fp32", "bf16"])
def test_all_stages_and_builds_agree(together: Any, low: bool, accumulation: int) -> None:
    expected = together(_alone, 1)[0]
    for *found, unchanged in together(_builds, 2):
        for losses, how in zip(found, BUILDS, strict=True):
            assert losses == pytest.approx(expected, rel=1e-2 if low else 2e-6), how
        assert unchanged != pytest.approx(expected, rel=1e-2)  # negative control
