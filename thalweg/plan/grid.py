"""One rank of a job over pipeline, data and tensor axes, on one processor.

As in :mod:`.simulate` the ranks are a process group that moves nothing; the model is cut by the very code
that a job runs, first over tensor ranks, then into stages, then sharded over the data ranks.  So a layout of
a thousand ranks is tried in seconds: does it divide, what does each rank hold, what does it send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from thalweg.config import load, resolve
from thalweg.mesh import DATA_AXIS
from thalweg.parallel.pipeline.blocks import StagedModel, cut_blocks, dissect
from thalweg.parallel.team import Team
from thalweg.parallel.tensor import parallelise
from thalweg.plan.simulate import fake_job
from thalweg.zero.options import model_facts, shard_options
from thalweg.zero.shard import Sharded, shard
from thalweg.zero.states import States


@dataclass(frozen=True)
class Grid:
    """Ranks along the axes, the pipeline outermost and the tensor axis innermost."""

    pipeline: int = 1
    data: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        """Ranks of the job."""
        return self.pipeline * self.data * self.tensor

    def rank(self, stage: int, replica: int = 0, part: int = 0) -> int:
        """The rank at these coordinates."""
        return (stage * self.data + replica) * self.tensor + part


@dataclass
class GridRank:
    """What one rank has: shapes of its pieces by parameter, bytes held, bytes sent a step by axis (ring
    form)."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)


def simulate_grid(
    model: nn.Module,
    config: Any,
    batch: Mapping[str, Tensor],
    grid: Grid,
    stage: int,
    replica: int = 0,
    part: int = 0,
) -> GridRank:
    """Cut ``model`` in place to one rank of ``grid``, and take a step of as many micro-batches as the config
    accumulates, each like ``batch``.

    Raises:
        ValueError: the model does not divide so, or this process is part of a job already.
    """
    if dist.is_initialized():
        raise ValueError("a simulation needs a process of its own: this one is part of a job")
    resolved = resolve(load(config), world_size=grid.data, model=model_facts(model))
    anatomy = dissect(model, batch)
    cuts = cut_blocks(model, anatomy, grid.pipeline)
    with fake_job(grid.size, grid.rank(stage, replica, part)):
        shape = (grid.pipeline, grid.data, grid.tensor)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", DATA_AXIS, "tp"))
        team, states = _split(model, mesh, grid, stage) if grid.tensor > 1 else (None, None)
        staged = StagedModel(model, anatomy, cuts, [stage])
        options = shard_options(model, resolved)
        sharded = shard(model, mesh[DATA_AXIS], options, torch.device("cpu"), states)
        if team is not None:
            team.ledger = sharded.ledger
        hidden = _train(staged, sharded, batch, stage, grid, int(resolved.gradient_accumulation_steps))
        found = _look(model, sharded)
        found.sent["pipeline"] = hidden
        sharded.close()
    return found


def _split(model: nn.Module, mesh: DeviceMesh, grid: Grid, stage: int) -> tuple[Team, States]:
    team = Team(mesh["tp"].get_group())
    first = grid.rank(stage)
    ranks = torch.arange(first, first + grid.data * grid.tensor).view(grid.data, grid.tensor).T.contiguous()
    groups = [mesh["tp"].get_group(), mesh[DATA_AXIS].get_group()]
    both = DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=("tp", DATA_AXIS))
    world = dist.group.WORLD
    assert world is not None
    # Nobody answers, so the cut model's outputs mean nothing and cannot be compared.
    return team, parallelise(model, team, both, world, check=False)


def _train(
    staged: StagedModel, sharded: Sharded, batch: Mapping[str, Tensor], stage: int, grid: Grid, micros: int
) -> int:
    """Forward and backward of a window; returns the bytes that go to neighbouring stages."""
    width = _width(staged.module, batch)
    sent = 0
    for index in range(micros):
        sharded.prepare_backward(last=index == micros - 1)
        incoming = torch.zeros(width, requires_grad=True) if stage else None
        value = staged.run(stage, incoming, batch)
        if stage + 1 < grid.pipeline:
            sent += value.nbytes
            value.backward(torch.zeros_like(value))
        else:
            value.backward()
        if incoming is not None:
            assert incoming.grad is not None
            sent += incoming.grad.nbytes
    sharded.finish_window()
    return sent


def _width(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[int, ...]:
    tokens = next(iter(batch.values()))
    hidden = model_facts(model).hidden_size
    if hidden is None:
        raise ValueError(
            f"{type(model).__name__} has no config.hidden_size: stages cannot be simulated apart"
        )
    return (*tokens.shape, hidden)


def _look(model: nn.Module, sharded: Sharded) -> GridRank:
    found, held = GridRank(), Counter[str]()
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        found.shapes[name] = tuple(local.shape)
        held["parameters"] += local.nbytes
        if parameter.grad is not None:
            grad = parameter.grad
            held["gradients"] += (grad.to_local() if isinstance(grad, DTensor) else grad).nbytes
    sent = Counter[str]()
    for entry in sharded.ledger.entries():
        sent["tensor" if entry.carrier == "tensor" else "data"] += entry.sent_bytes
    found.held, found.sent = dict(held), dict(sent)
    return found
