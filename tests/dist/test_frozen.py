"""A frozen base in few bits with small trained layers beside it, at stage 3; thawing it in mid-run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.harness import run_ranks

WIDTH, RANKS = 24, 2


class Adapted(nn.Module):
    """A linear layer with a frozen base (fp32, bf16, or int8 with a scale a row) and a low-rank one beside it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
        if kind == "int8":
            scale = weight.abs().amax(1, keepdim=True) / 127
            self.scale = nn.Parameter(scale, requires_grad=False)
            weight = (weight / scale).round().to(torch.int8)
        elif kind == "bf16":
            weight = weight.to(torch.bfloat16)
        self.base = nn.Parameter(weight, requires_grad=False)
        self.down = nn.Parameter(torch.randn(4, WIDTH) / WIDTH**0.5)
        self.up = nn.Parameter(torch.zeros(WIDTH, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = self.base.to(x.dtype)
        if self.base.dtype == torch.int8:
            base = base * self.scale.to(x.dtype)
        return F.linear(x, base) + F.linear(F.linear(x, self.down), self.up)


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted(kind) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return (x - y).square().mean()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(RANKS * 4, WIDTH, generator=generator)
    return x, x.roll(1, 1)


def settings(stage: int) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage},
        "memory": {"preflight": "off"},
    }


def thaw(model: nn.Module) -> list[nn.Parameter]:
    names = [name for name, _ in model.named_parameters() if name.endswith("base")]
    thawed = [model.get_parameter(name) for name in names]
    for parameter in thawed:
        parameter.requires_grad_(True)
    return thawed


def plain(kind: str, thaws: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    model = Model(kind)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    losses = []
    for step in range(6):
        if thaws and step == 3:
            optimizer.add_param_group({"params": thaw(model)})
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.detach().float() for name, value in model.named_parameters()}


def _train(rank: int, world_size: int, kind: str, stage: int, thaws: bool):
    import thalweg

    torch.manual_seed(3)
    engine, *_ = thalweg.initialize(model=Model(kind), config=settings(stage))
    dtypes = {name: str(p.dtype) for name, p in engine.module.named_parameters()}
    losses = []
    for step in range(6):
        if thaws and step == 3:
            engine.optimizer.add_param_group({"params": thaw(engine.module)})
        x, y = (part[rank * 4 : rank * 4 + 4] for part in batch(step))
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    whole = {name: p.full_tensor().detach().float().tolist() for name, p in engine.module.named_parameters()}
    engine.close()
    return losses, whole, dtypes


@pytest.mark.parametrize(
    ("kind", "stage", "thaws"), [("bf16", 3, False), ("fp32", 3, True), ("int8", 3, False)]
)
def test_row45_a_frozen_base_in_few_bits_trains_its_adapters_and_thaws(kind, stage, thaws):
    losses, expected = plain(kind, thaws)
    found = run_ranks(_train, RANKS, kind, stage, thaws)
    mean = torch.tensor([rank[0] for rank in found]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses), rtol=1e-5, atol=1e-6)
    wanted = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "int8": "torch.int8"}[kind]
    for _, whole, dtypes in found:
        assert {dtype for name, dtype in dtypes.items() if name.endswith("base")} == {wanted}
        for name, value in whole.items():
            torch.testing.assert_close(torch.tensor(value), expected[name], rtol=1e-5, atol=1e-5)
    torch.manual_seed(3)
    before = {name: p.detach().float() for name, p in Model(kind).named_parameters()}
    moved = [name for name in expected if not torch.equal(torch.tensor(found[0][1][name]), before[name])]
    assert any(name.endswith("up") for name in moved)
    assert any(name.endswith("base") for name in moved) == thaws
