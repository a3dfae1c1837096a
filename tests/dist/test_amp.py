"""NVIDIA Apex's ``amp`` block trains as the blocks that it is read as, bit for bit, and as Apex's levels mean it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.parity import full_named
from tests.harness import run_ranks
from tests.marks import nightly

REUSE_RANKS = True
STEPS = 4

_SCALE: dict[str, Any] = {
    "loss_scale_window": 2000, "hysteresis": 1, "initial_scale_power": 16, "max_loss_scale": 2.0**24,
}  # fmt: skip
_NORMS = ["auto", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"]
LEVELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "O0": ({"opt_level": "O0"}, {}),
    "O1": (
        {},
        {
            "fp16": {"enabled": True, **_SCALE},
            "torch_autocast": {"enabled": True, "dtype": "fp16"},
            "data_types": {"param_dtype": "fp32"},
        },
    ),
    "O1 in bf16": (
        {"opt_level": "O1", "cast_model_type": "torch.bfloat16"},
        {"torch_autocast": {"enabled": True, "dtype": "bf16"}},
    ),
    "O2": (
        {"opt_level": "O2", "loss_scale": 128.0, "keep_batchnorm_fp32": "True"},
        {"fp16": {"enabled": True, "loss_scale": 128.0}, "data_types": {"keep_in_fp32_modules": _NORMS}},
    ),
    "O2 in bf16": (
        {"opt_level": "O2", "cast_model_type": "bf16", "keep_batchnorm_fp32": False},
        {"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "bf16"}},
    ),
    "O3": (
        {"opt_level": "O3", "loss_scale": "dynamic"},
        {"fp16": {"enabled": True, **_SCALE}, "data_types": {"buffer_dtype": "fp16"}},
    ),
}


class _Network(nn.Module):
    """A convolution, a batch norm and a linear layer; notes in which dtypes they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 1)
        self.dtypes: tuple[torch.dtype, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        features = self.conv(x)
        normed = self.norm(features).relu()
        self.dtypes = features.dtype, self.norm.weight.dtype
        return self.head(normed.mean(-1))


def _train(rank: int, stage: int, config: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], Any]:
    import thalweg

    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        **config,
    }
    engine, *_ = thalweg.initialize(model=_Network(), config=config)
    losses = []
    for step in range(STEPS):
        x = torch.randn(4, 3, 10, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = (engine(x).float() - x.mean((1, 2))[:, None]).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    found = full_named(engine.module.named_parameters())
    dtypes = engine.module.dtypes
    engine.close()
    return losses, found, dtypes


def _every_level(rank: int, world: int, stage: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for level, (amp, blocks) in LEVELS.items():
        by_amp, by_blocks = _train(rank, stage, {"amp": {"enabled": True, **amp}}), _train(rank, stage, blocks)
        same = all(torch.equal(by_amp[1][name], value) for name, value in by_blocks[1].items())
        found[level] = (by_amp[0] == by_blocks[0] and same, *by_amp)
    return found


@pytest.mark.parametrize("stage", [nightly(0), 2])
def test_a_level_trains_as_the_blocks_that_it_is_read_as(stage: int) -> None:
    half, brain, full = torch.float16, torch.bfloat16, torch.float32
    for found in run_ranks(_every_level, 2, stage):
        assert {level for level, (same, *_) in found.items() if same} == set(LEVELS)
        assert {level: dtypes for level, (*_, dtypes) in found.items()} == {
            "O0": (full, full),
            "O1": (half, full),
            "O1 in bf16": (brain, full),
            "O2": (half, full),
            "O2 in bf16": (brain, brain),
            "O3": (half, half),
        }
        # The control: levels are not alike, so that equality says something (O1 and O2 round this network at the same
        # places); and all of them learn the same.
        losses = {level: tuple(values) for level, (_, values, *_) in found.items()}
        assert losses.pop("O1") == losses["O2"]
        assert len(set(losses.values())) == len(LEVELS) - 1
        for level, values in losses.items():
            assert values == pytest.approx(losses["O0"], rel=0.1), level
