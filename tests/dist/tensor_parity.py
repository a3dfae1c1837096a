"""One process against an engine on data x tensor ranks, on the same global batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import inspect
from tests.dist.parity import full_named
from tests.dist.tensor_models import compute_loss, make_batch


@dataclass(frozen=True)
class TrainResult:
    """``gradients``: those of the first step by name; ``losses`` of each step; ``parameters`` at the end."""

    losses: list[float]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)

    def max_differences(self, other: TrainResult) -> dict[str, float]:
        """The largest relative difference of losses, gradients and parameters."""
        pairs = zip(self.losses, other.losses, strict=True)
        return {
            "loss": max(abs(a - b) / abs(b) for a, b in pairs),
            "gradient": max_relative_difference(self.gradients, other.gradients),
            "parameter": max_relative_difference(self.parameters, other.parameters),
        }


def max_relative_difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference relative to the largest entry of the tensor, or of all for near-zero ones."""
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    if not actual:
        return 0.0
    scale = max(float(value.abs().max()) for value in expected.values())
    return max(
        float((actual[name] - value).abs().max()) / max(float(value.abs().max()), 1e-2 * scale)
        for name, value in expected.items()
    )


LossFn = Callable[[Any, int], Tensor]
"""The loss of a model, or an engine, at a step."""


def train_plain(model: nn.Module, loss_fn: LossFn, steps: int, lr: float = 0.05) -> TrainResult:
    """Plain PyTorch in one process: SGD with momentum, so that a gradient's scale shows."""
    model = copy.deepcopy(model)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=lr, momentum=0.9)
    losses, gradients = [], {}
    for step in range(steps):
        loss = loss_fn(model, step)
        loss.backward()
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return TrainResult(losses, gradients, {n: p.detach().clone() for n, p in model.named_parameters()})


def train_engine(model: nn.Module, config: dict[str, Any], loss_fn: LossFn, steps: int) -> TrainResult:
    """The engine on all ranks, each with its own batches; gathers everything."""
    import thalweg

    engine, *_ = thalweg.initialize(model=copy.deepcopy(model), config=config)
    engine.train()
    losses, gradients = [], {}
    for step in range(steps):
        loss = loss_fn(engine, step)
        engine.backward(loss)
        if step == 0:
            inspect.finalize_grads(engine)
            gradients = full_named((n, p.grad) for n, p in engine.module.named_parameters() if p.grad is not None)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    parameters = full_named(engine.module.named_parameters())
    engine.close()
    return TrainResult(losses, gradients, parameters)


def run_plain(model: nn.Module, rows: int, steps: int, lr: float = 0.05) -> TrainResult:
    """One process on the model's own batches of ``rows``."""
    return train_plain(model, lambda own, step: compute_loss(own, make_batch(step, rows)), steps, lr)


def make_config(stage: int, tensor: int, rows: int, data_ranks: int, lr: float = 0.05, **extra: Any) -> dict[str, Any]:
    """The ds_config of the same run."""
    return {
        "train_micro_batch_size_per_gpu": rows // data_ranks,
        "gradient_clipping": 1.0,
        "cpu_kernels": "torch",
        "optimizer": {"type": "SGD", "params": {"lr": lr, "momentum": 0.9}},
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"autotp_size": tensor},
        **extra,
    }


def run_engine(
    model: nn.Module, rank: int, world: int, *, stage: int, tensor: int, rows: int, steps: int, **extra: Any
) -> TrainResult:
    """The engine on ``world`` ranks, ``tensor`` of them a team, on the same batches as :func:`run_plain`."""
    data_ranks = world // tensor
    local_rows = slice(rank // tensor, None, data_ranks)
    config = make_config(stage, tensor, rows, data_ranks, **extra)
    return train_engine(
        model, config, lambda engine, step: compute_loss(engine, make_batch(step, rows)[local_rows]), steps
    )
