"""One process against an engine on data x tensor ranks, on the same global batches."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.dist.parity import full
from tests.dist.tensor_models import batch, loss_of


@dataclass(frozen=True)
class Run:
    """``gradients``: those of the first step by name; ``losses`` of each step; ``parameters`` at the end."""

    losses: list[float]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)

    def differences(self, other: Run) -> dict[str, float]:
        """The largest relative difference of losses, gradients and parameters."""
        pairs = zip(self.losses, other.losses, strict=True)
        return {
            "loss": max(abs(a - b) / abs(b) for a, b in pairs),
            "gradient": worst(self.gradients, other.gradients),
            "parameter": worst(self.parameters, other.parameters),
        }


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Largest difference relative to the largest entry of the tensor, or of all for near-zero ones."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    if not found:
        return 0.0
    scale = max(float(value.abs().max()) for value in wanted.values())
    return max(
        float((found[name] - value).abs().max()) / max(float(value.abs().max()), 1e-2 * scale)
        for name, value in wanted.items()
    )


def run_plain(model: nn.Module, rows: int, steps: int, lr: float = 0.05) -> Run:
    """Plain PyTorch in one process: SGD with momentum, so that a gradient's scale shows."""
    model = copy.deepcopy(model)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses, gradients = [], {}
    for step in range(steps):
        loss = loss_of(model, batch(step, rows))
        loss.backward()
        if step == 0:
            gradients = {
                name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
            }
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Run(losses, gradients, {name: p.detach().clone() for name, p in model.named_parameters()})


def config_of(stage: int, tensor: int, rows: int, ranks: int, lr: float = 0.05, **extra: Any) -> dict[str, Any]:
    """The ds_config of the same run."""
    return {
        "train_micro_batch_size_per_gpu": rows // ranks,
        "gradient_clipping": 1.0,
        "cpu_kernels": "torch",
        "optimizer": {"type": "SGD", "params": {"lr": lr, "momentum": 0.9}},
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"autotp_size": tensor},
        **extra,
    }


def run_engine(
    model: nn.Module, rank: int, world: int, *, stage: int, tensor: int, rows: int, steps: int, **extra: Any
) -> Run:
    """The engine on ``world`` ranks, ``tensor`` of them a team; gathers everything."""
    import thalweg

    ranks = world // tensor
    engine, *_ = thalweg.initialize(
        model=copy.deepcopy(model), config=config_of(stage, tensor, rows, ranks, **extra)
    )
    engine.train()
    losses, gradients = [], {}
    for step in range(steps):
        tokens = batch(step, rows)[rank // tensor :: ranks]
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        if step == 0:
            engine._parts.sharded.finish_window()
            gradients = {
                name: full(p.grad) for name, p in engine.module.named_parameters() if p.grad is not None
            }
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / world)
    parameters = {name: full(p) for name, p in engine.module.named_parameters()}
    engine.close()
    return Run(losses, gradients, parameters)
