"""The house test's two sides: one plain process, and an engine on ranks.

Both consume the same global batches: step ``s`` is ``world * accumulation`` micro-batches
of ``MICRO`` samples, of which rank ``r`` takes every ``world``-th.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from tests.dist.models import make_batch
from thalweg.zero.whole_parameter import WholeParameter, get_shard

MICRO_BATCH_SIZE = 2
# Between a GPU's kernels and the host's, fp32 sums are added up in other orders, and AdamW divides what is left of
# gradients that cancel by its own size; between equal kernels bounds need no such room.  Chosen, not measured.
FP32_SLACK = 100.0 if torch.cuda.is_available() else 1.0


@dataclass(frozen=True)
class ParityCase:
    """One cell of the parity matrix; ``windows`` are micro-batches per update."""

    stage: int = 0
    dtype: str = "fp32"
    windows: tuple[int, ...] = (1,) * 20
    accumulation: int = 1
    clip: float = 0.0
    optimizer: str = "AdamW"
    params: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2})
    kernels: str = "torch"
    extra: dict[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        """The ds_config of this case."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": MICRO_BATCH_SIZE,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "cpu_kernels": self.kernels,
            "optimizer": {"type": self.optimizer, "params": self.params},
            "zero_optimization": {"stage": self.stage},
        }
        if self.dtype != "fp32":
            config[self.dtype] = {"enabled": True}
        return {**config, **self.extra}

    def with_(self, **changes: Any) -> ParityCase:
        """A copy with other fields."""
        return replace(self, **changes)


@dataclass(frozen=True)
class TrainOutcome:
    """Mean loss of each update, the full parameters after the last, the full gradients of the first window."""

    losses: list[float]
    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor | None]

    def max_loss_difference(self, other: TrainOutcome) -> float:
        """Largest absolute difference of losses."""
        return max(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True))

    def gradient_error(self, other: TrainOutcome) -> float:
        """How far the first gradients are from ``other``'s, relative to theirs in the 2-norm.

        Without those of 0-dim parameters, which FSDP2 does not shard: they are reduced by the step, not before.
        """
        assert [g is None for g in self.gradients] == [g is None for g in other.gradients]
        ours, theirs = (_flat(g for g in x.gradients if g is not None and g.ndim) for x in (self, other))
        return float((ours - theirs).norm() / theirs.norm())

    def update_errors(self, other: TrainOutcome, model: nn.Module) -> tuple[float, float]:
        """What training changed in ``model``'s parameters against what it changed in ``other``: (scale, rest).

        ``scale``: how far the best factor between the two is from 1.  Rounding has no sign, so it hardly moves this,
        while a wrong rate, sum, clip factor or decay does.  ``rest``: what no factor explains, relative.
        """
        start = _flat(model.parameters())
        ours, theirs = (_flat(x.parameters) - start for x in (self, other))
        factor = float(ours @ theirs / (theirs @ theirs))
        return abs(factor - 1), float((ours - factor * theirs).norm() / theirs.norm())


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.detach().double().flatten() for t in tensors])


def ragged_windows(accumulation: int, updates: int) -> tuple[int, ...]:
    """Windows of an epoch that does not divide: every third one is short."""
    short = max(1, accumulation - 1)
    return tuple(short if update % 3 == 2 else accumulation for update in range(updates))


def run_plain(
    model: nn.Module,
    case: ParityCase,
    world: int,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> TrainOutcome:
    """One process, the whole global batch at once, plain PyTorch."""
    model = copy.deepcopy(model)
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    losses, gradients, position = [], None, 0
    for window in case.windows:
        parts = [make_batch(position + i, world * MICRO_BATCH_SIZE) for i in range(window)]
        position += window
        tokens = torch.cat([part[0] for part in parts])
        labels = torch.cat([part[1] for part in parts])
        loss = model(tokens, labels)
        loss.backward()
        if gradients is None:
            gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        if case.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return TrainOutcome(losses, [p.detach().clone() for p in model.parameters()], gradients or [])


def run_engine(
    model: nn.Module, case: ParityCase, rank: int, world: int, *, with_gradients: bool = False
) -> TrainOutcome:
    """The engine on this rank, its micro-batches of each window.

    ``with_gradients``: gather those of the first window, where they stay until the step on every rank: a tier that
    updates within the backward pass takes them at a time of its own, and ranks would gather different ones.
    """
    import thalweg

    engine, *_ = thalweg.initialize(model=copy.deepcopy(model), config=case.config())
    losses, gradients, position = [], None, 0
    for window in case.windows:
        total = torch.zeros((), device=engine.device)
        for i in range(window):
            tokens, labels = (t.to(engine.device) for t in make_batch(position + i, world * MICRO_BATCH_SIZE))
            if window != case.accumulation:
                engine.set_gradient_accumulation_boundary(i == window - 1)
            loss = engine(tokens[rank::world], labels[rank::world])
            engine.backward(loss)
            if with_gradients and gradients is None and i == window - 1:
                present = full_tensors(p.grad for p in engine.module.parameters() if p.grad is not None)
                gradients = [None if p.grad is None else present.pop(0) for p in engine.module.parameters()]
            engine.step()
            total += loss.detach().float()
        position += window
        dist.all_reduce(total)
        losses.append(float(total) / (world * window))
    rounded = case.config()["zero_optimization"].get("zero_quantized_weights", False)
    parameters = full_tensors(engine.module.parameters(), rounded=rounded)
    engine.close()
    return TrainOutcome(losses, parameters, gradients or [])


@torch.no_grad()
def full_tensor(parameter: torch.Tensor, *, rounded: bool = False) -> torch.Tensor:
    """The logical value of a parameter, gathered, in the host's memory; ``rounded``: programs see it quantised."""
    value: Any = get_shard(parameter)
    return _seen(parameter, (value.full_tensor() if isinstance(value, DTensor) else value.detach()).clone(), rounded)


def _seen(parameter: torch.Tensor, value: torch.Tensor, rounded: bool) -> torch.Tensor:
    if isinstance(parameter, WholeParameter) and not parameter.is_written and not rounded:
        assert torch.equal(parameter.detach(), value.to(parameter.dtype)), "a program sees what is not trained"
    return value.cpu()


@torch.no_grad()
def full_tensors(parameters: Iterable[torch.Tensor], *, rounded: bool = False) -> list[torch.Tensor]:
    """:func:`full_tensor` of each; shards of rows of one mesh, which most are, cross in one message."""
    parameters = list(parameters)
    batches: dict[Any, dict[int, DTensor]] = {}
    for index, parameter in enumerate(parameters):
        value: Any = get_shard(parameter)
        if isinstance(value, DTensor) and value.device_mesh.ndim == 1 and value.placements == (Shard(0),):
            batches.setdefault((value.device_mesh, value.dtype, value.device), {})[index] = value
    found: dict[int, torch.Tensor] = {}
    for (mesh, dtype, device), shards in batches.items():
        world, group = mesh.size(), mesh.get_group()
        # Each rank has as many rows as the first, fewer at the end.
        sizes = [ceil(value.shape[0] / world) * value.shape[1:].numel() for value in shards.values()]
        message = torch.zeros(sum(sizes), dtype=dtype, device=device)
        for value, part in zip(shards.values(), message.split(sizes), strict=True):
            local = value.to_local()
            part[: local.numel()] = local.flatten()
        messages = message.new_empty(world * message.numel())
        dist.all_gather_into_tensor(messages, message, group=group)
        for (index, value), columns in zip(shards.items(), messages.view(world, -1).split(sizes, dim=1), strict=True):
            found[index] = columns.flatten()[: value.numel()].view(value.shape)
    return [
        _seen(parameter, found[i], rounded) if i in found else full_tensor(parameter, rounded=rounded)
        for i, parameter in enumerate(parameters)
    ]


def full_named(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """:func:`full_tensors`, by name."""
    parameters = dict(named)
    return dict(zip(parameters, full_tensors(parameters.values()), strict=True))


def train(engine: Any, rank: int, world: int, first: int, last: int, micros: int = 1) -> list[torch.Tensor]:
    """The parameters after the windows [first, last) of ``micros`` micro-batches, two rows a rank."""
    for batch in range(first * micros, last * micros):
        tokens, labels = make_batch(batch, 2 * world)
        engine.backward(engine(tokens[rank::world], labels[rank::world]))
        engine.step()
    return full_tensors(engine.module.parameters())


def largest_difference(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> float:
    """How far numbers of the one are from those of the other, at most."""
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))


def bitwise_equal(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """Whether two lists of tensors agree in every bit."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
