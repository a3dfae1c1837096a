"""`elasticity`: the batch stays the same at another number of ranks, and so does the run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from tests.harness import run_ranks
from tests.marks import nightly

BATCH, STEPS, STOP = 12, 6, 3
ELASTICITY = {"enabled": True, "max_train_batch_size": 13, "micro_batch_sizes": [2, 3]}


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(BATCH * STEPS, 4, generator=generator), torch.randn(BATCH * STEPS, 3, generator=generator)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def _train(rank: int, world: int, folder: str, steps: int, elastic: bool = True) -> tuple[list[float], list[int]]:
    import thalweg

    sizes: dict[str, Any] = {"elasticity": ELASTICITY} if elastic else {"train_micro_batch_size_per_gpu": 2}
    config = {
        **sizes,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_optimization": {"stage": 2},
        "seed": 3,
    }
    engine = thalweg.initialize(model=make_model(), config=config, training_data=TensorDataset(*samples()))[0]
    engine.load_checkpoint(folder)
    batches, losses = iter(engine.training_dataloader), []
    for _ in range(steps):
        found = []
        for _ in range(engine.gradient_accumulation_steps()):
            x, y = next(batches)
            found.append(mse_loss(engine(x), y.to(engine.device)))
            engine.backward(found[-1])
            engine.step()
        total = torch.stack(found).detach().mean()
        torch.distributed.all_reduce(total)
        losses.append(float(total) / world)
    engine.save_checkpoint(folder)
    numbers = [engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.global_steps]
    engine.close()
    return losses, numbers


@pytest.mark.parametrize("worlds", [nightly((2, 1)), (1, 3)], ids=str)
def test_a_run_goes_on_with_the_same_batch_at_another_number_of_ranks(worlds: tuple[int, int], tmp_path: Any) -> None:
    whole, numbers = run_ranks(_train, 2, str(tmp_path / "whole"), STEPS)[0]
    assert numbers == [BATCH, 3, STEPS]
    found: list[float] = []
    for world in worlds:
        losses, (batch, micro, _) = run_ranks(_train, world, str(tmp_path / "moved"), STOP)[0]
        assert batch == BATCH and micro == {1: 3, 2: 3, 3: 2}[world]
        found += losses
    assert found == pytest.approx(whole, rel=1e-5)


def test_without_it_the_run_becomes_another(tmp_path: Any) -> None:
    """The control: micro-batches that stay make other batches."""
    whole = run_ranks(_train, 2, str(tmp_path / "whole"), STEPS, False)[0][0]
    found: list[float] = []
    for world in (2, 1):
        found += run_ranks(_train, world, str(tmp_path / "moved"), STOP, False)[0][0]
    assert found[:STOP] == pytest.approx(whole[:STOP], rel=1e-5)
    assert found != pytest.approx(whole, rel=1e-2)
