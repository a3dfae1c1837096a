"""0-dim parameters, which FSDP2 does not take: their gradients are the means over all ranks, whatever a window does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import thalweg
from tests.harness import run_ranks
from tests.marks import nightly

REUSE_RANKS = True

LR = 0.5


class Scaled(nn.Module):
    """Two layers, each of which has a 0-dim scale."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.scales = nn.ParameterList(nn.Parameter(torch.tensor(1.0 + i)) for i in range(2))

    def forward(self, x: Tensor, scaled: int = 2) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x) * self.scales[i] if i < scaled else layer(x)
        return x.square().mean()


def _model() -> Scaled:
    torch.manual_seed(0)
    return Scaled()


def _rows(rank: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(rank)
    return [torch.randn(2, 4, generator=draw) for _ in range(2)]


def _train(rank: int, world: int, case: str, stage: int, folder: str) -> list[float]:
    """The scales after an update."""
    model = _model()
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2 if case == "saved" else 1,
        "zero_optimization": {"stage": stage}, "fp16": {"enabled": case == "clipped", "loss_scale": 128.0},
    }  # fmt: skip
    engine, *_ = thalweg.initialize(model=model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=LR))
    rows = [row.to(engine.device) for row in _rows(rank)]
    if case == "saved":  # which reduces what there is of the window
        engine.backward(engine(rows[0]))
        engine.step()
        engine.save_checkpoint(folder)
        engine.backward(engine(rows[1]))
    elif case == "twice":
        both = engine(rows[0]), engine(rows[1])
        engine.backward(both[0], retain_graph=True)
        engine.backward(both[1])
    elif case == "unused":
        engine.backward(engine(rows[0], 2 if rank == 0 else 0))
    else:
        engine.backward(engine(rows[0].half()))
        for scale in engine.module.scales:
            assert scale.grad is not None
            scale.grad.mul_(0.25)
    engine.step()
    found = [float(scale) for scale in engine.module.scales]
    engine.close()
    return found


def _reference(case: str, ranks: int, clip: float = 0.25) -> list[float]:
    """The same of a plain model with the rows of ``ranks`` ranks."""
    model = _model()
    total = torch.zeros(())
    for rank in range(ranks):
        first, second = _rows(rank)
        loss = model(first, 0 if (case, rank) == ("unused", 1) else 2)
        more = {"saved": 0.5, "twice": 1.0}.get(case, 0.0)
        total = total + (more * (loss + model(second)) if more else loss)
    (total / ranks).backward()
    factor = LR * clip if case == "clipped" else LR
    return [float(scale) - factor * float(scale.grad) for scale in model.scales if scale.grad is not None]


@pytest.mark.parametrize("stage", [nightly(0), 1, nightly(3)])
@pytest.mark.parametrize("case", ["saved", "twice", "unused", "clipped"])
def test_scales_have_the_mean_gradient_of_all_ranks(case: str, stage: int, tmp_path: Path) -> None:
    tolerance = 2e-3 if case == "clipped" else 1e-5
    want = _reference(case, 2)
    control = _reference(case, 2, 1.0) if case == "clipped" else _reference(case, 1)
    assert max(abs(a - b) for a, b in zip(want, control, strict=True)) > 10 * tolerance
    for found in run_ranks(_train, 2, case, stage, str(tmp_path)):
        assert found == pytest.approx(want, abs=tolerance)
